"""Image observations, under the path that xminigrid's users import. The tables are drawn when this module is imported."""
from ..compat.names import RGBImgObservationWrapper
from ..compat.pictures import OUR_TILE_CACHE as TILE_CACHE, OUR_TILE_W_AGENT_CACHE as TILE_W_AGENT_CACHE, TILE_SIZE
from ..viz.images import images_from_observations as _render_obs
