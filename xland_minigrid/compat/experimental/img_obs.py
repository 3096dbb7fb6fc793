"""Image observations, in the identifiers of xminigrid 0.9.3. The tables are drawn when this module is imported."""
from ..pictures import TILE_CACHE, TILE_SIZE, TILE_W_AGENT_CACHE, RGBImgObservationWrapper, render_obs as _render_obs
