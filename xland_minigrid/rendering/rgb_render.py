"""Grids as RGB images, under the path that xminigrid's users import."""
from ..viz.render import render
