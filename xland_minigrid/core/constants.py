"""Tables of identifiers at xminigrid's path, as JAX arrays that importing this module makes."""
from ..compat.names import (
    DIRECTIONS, FREE_TO_PUT_DOWN, LOS_BLOCKING, NUM_ACTIONS, NUM_COLORS, NUM_LAYERS, NUM_TILES, PICKABLE,
    TILES_REGISTRY, WALKABLE, Colors, Tiles,
)
