"""Environments, in the identifiers of xminigrid 0.9.3."""
from ..worlds import (
    BlockedUnlockPickUp, DoorKey, Empty, EmptyRandom, FourRooms, LockedRoom, Memory, Playground, Unlock, UnlockPickUp,
    XLandMiniGrid,
)
