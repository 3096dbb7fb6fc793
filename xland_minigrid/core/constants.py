"""Tables of identifiers as JAX arrays, under the path that xminigrid's users import. The arrays are made when this module is imported."""
import jax.numpy as jnp
import numpy as np

from . import grid, tiles
from .actions import NUM_ACTIONS
from .tiles import NUM_COLORS, NUM_TILES, Colors, Tiles

NUM_LAYERS = 2
TILES_REGISTRY = jnp.asarray(np.stack(np.indices((NUM_TILES, NUM_COLORS)), axis=-1), jnp.uint8)
DIRECTIONS = jnp.asarray(grid.DIRECTIONS)
WALKABLE = jnp.asarray(tiles.WALKABLE)
PICKABLE = jnp.asarray(tiles.PICKABLE)
FREE_TO_PUT_DOWN = jnp.asarray(tiles.FREE_TO_PUT_DOWN)
LOS_BLOCKING = jnp.asarray(tiles.LOS_BLOCKING)
