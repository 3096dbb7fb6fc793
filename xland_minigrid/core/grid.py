"""Building and reading grids at xminigrid's path."""
from ..compat.grid import (
    align_with_up, cartesian_product_1d, check_can_put, check_pickable, check_see_behind, check_walkable,
    coordinates_mask, equal, free_tiles_mask, get_neighbouring_tiles, grid_coords, pad_along_axis, sample_coordinates,
    sample_direction, transparent_mask,
)
from .walls import (
    DIRECTION_NAMES, DIRECTIONS, empty_world, four_rooms, horizontal_line, inside, nine_rooms, rectangle, room,
    two_rooms, vertical_line,
)
