"""XLand-MiniGrid, in the identifiers of xminigrid 0.9.3."""
from ...envs.xland import XLandEnvParams
from ..worlds import (
    XLandMiniGrid, generate_four_rooms, generate_nine_rooms, generate_room, generate_six_rooms, generate_two_rooms,
)
