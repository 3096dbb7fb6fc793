"""Grids as RGB images, under the path that xminigrid's users import."""
from ..compat.names import render
from ..compat.pictures import draw as render_tile
from ..viz.render import RGB as COLORS_MAP
