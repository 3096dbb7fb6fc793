"""Grids as RGB images, under the path that xminigrid's users import."""
from ..compat.names import render
