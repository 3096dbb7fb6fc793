"""Image observations, in the identifiers of xminigrid 0.9.3. The tables are drawn when a program asks for them."""
from .. import pictures
from ..pictures import TILE_SIZE, RGBImgObservationWrapper, render_obs as _render_obs


def __getattr__(name):
    if name in ("TILE_CACHE", "TILE_W_AGENT_CACHE"):
        return getattr(pictures, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
