"""Tasks of the original MiniGrid. The other modules are xminigrid's paths."""
from .tasks import (
    BlockedUnlockPickUp, DoorKey, Empty, EmptyRandom, FourRooms, LavaGap, LockedRoom, Memory, MemoryCarry,
    MiniGridTask, Playground, PlaygroundEnvParams, Unlock, UnlockPickUp,
)
