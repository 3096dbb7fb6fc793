"""Grids as RGB images, in the identifiers of xminigrid 0.9.3."""
from ..pictures import COLORS_MAP, render, render_tile
