"""Tasks of the original MiniGrid. `compat.names` adds a module for each, at xminigrid's paths."""
from .tasks import (
    BlockedUnlockPickUp, DoorKey, Empty, EmptyRandom, FourRooms, LavaGap, LockedRoom, Memory, MemoryCarry,
    MiniGridTask, Playground, PlaygroundEnvParams, Unlock, UnlockPickUp,
)
