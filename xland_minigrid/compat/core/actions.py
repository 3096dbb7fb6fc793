"""Actions, on grids in the identifiers of xminigrid 0.9.3."""
from ..laws import move_forward, pick_up, put_down, take_action, toggle, turn_clockwise, turn_counterclockwise
