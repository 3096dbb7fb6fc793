"""Tables of identifiers of xminigrid 0.9.3. Importing this module makes the arrays."""
from ...core.actions import NUM_ACTIONS
from ..identifiers import (
    DIRECTIONS, FREE_TO_PUT_DOWN, LOS_BLOCKING, NUM_COLORS, NUM_TILES, PICKABLE, TILES_REGISTRY, WALKABLE, Colors,
    Tiles,
)
from ..names import NUM_LAYERS
