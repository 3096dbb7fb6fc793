"""The path of xminigrid's rendering; the code lives in `xland_minigrid.viz`."""
from . import rgb_render, text_render
