"""Our wrappers, which hold no identifiers."""
from .names import (
    DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper, Wrapper,
)
