"""Wrappers, under the path that xminigrid's users import."""
from .envs.wrappers import (
    DirectionObservationWrapper,
    DmEnvAutoResetWrapper,
    GymAutoResetWrapper,
    RulesAndGoalsObservationWrapper,
    Wrapper,
)
