"""Tasks of the original MiniGrid. Its other modules are paths that xminigrid's users import."""
from .tasks import (
    BlockedUnlockPickUp, DoorKey, Empty, EmptyRandom, FourRooms, LavaGap, LockedRoom, Memory, MemoryCarry, MiniGridTask, Playground,
    PlaygroundEnvParams, Unlock, UnlockPickUp,
)
