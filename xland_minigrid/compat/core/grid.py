"""Building and reading grids, in the identifiers of xminigrid 0.9.3."""
from ...core.walls import horizontal_line, rectangle, vertical_line
from ..grid import (
    align_with_up, cartesian_product_1d, coordinates_mask, equal, grid_coords, pad_along_axis, sample_direction,
)
from ..laws import (
    check_can_put, check_pickable, check_see_behind, check_walkable, empty_world, four_rooms, free_tiles_mask,
    get_neighbouring_tiles, nine_rooms, room, sample_coordinates, transparent_mask, two_rooms,
)
