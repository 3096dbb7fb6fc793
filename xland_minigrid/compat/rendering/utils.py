"""Helpers for drawing, under the path of xminigrid."""
from ..pictures import (
    downsample, fill_coords, highlight_img, point_in_circle, point_in_hexagon, point_in_line, point_in_rect,
    point_in_triangle, rotate_fn,
)
