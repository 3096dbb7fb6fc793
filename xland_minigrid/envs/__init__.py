"""The environment API, the environments and how they are registered."""
from .environment import EnvCarry, Environment, EnvParams, State, StepType, TimeStep
from .registration import make, register, registered_environments
from .sampling import RulesetSamplingWrapper, SampledParams
from .wrappers import (
    DirectionObservationWrapper,
    DmEnvAutoResetWrapper,
    GymAutoResetWrapper,
    RulesAndGoalsObservationWrapper,
    Wrapper,
)
