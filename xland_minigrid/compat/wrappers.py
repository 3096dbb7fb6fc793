"""Wrappers: they are ours, since they hold no identifiers."""
from .names import DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper, Wrapper
