"""Environments: their interface, wrappers and registry."""
from .environment import EnvCarry, Environment, EnvParams, State, StepType, TimeStep
from .minigrid import (
    BlockedUnlockPickUp, DoorKey, Empty, EmptyRandom, FourRooms, LockedRoom, Memory, Playground, Unlock, UnlockPickUp,
)
from .registration import make, register, registered_environments
from .sampling import RulesetSamplingWrapper, SampledParams, sample_tasks
from .wrappers import (
    DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper, Wrapper,
)
from .xland import XLandMiniGrid
