"""Image observations, under the path that xminigrid's users import. The tables are drawn when a program asks for them."""
from ..compat import pictures
from ..compat.names import RGBImgObservationWrapper
from ..compat.pictures import TILE_SIZE
from ..viz.images import images_from_observations as _render_obs


def __getattr__(name):
    if name in ("TILE_CACHE", "TILE_W_AGENT_CACHE"):
        return getattr(pictures, f"OUR_{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
