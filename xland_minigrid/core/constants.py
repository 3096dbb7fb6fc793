"""Tables of identifiers as JAX arrays, under the path that xminigrid's users import. The arrays are made when this module is imported."""
from ..compat.names import (
    DIRECTIONS, FREE_TO_PUT_DOWN, LOS_BLOCKING, NUM_ACTIONS, NUM_COLORS, NUM_LAYERS, NUM_TILES, PICKABLE, TILES_REGISTRY, WALKABLE, Colors, Tiles,
)
