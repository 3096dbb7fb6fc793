"""Wrappers, under the path that xminigrid's users import."""
from .compat import names
from .compat.names import DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper, Wrapper
from .envs.sampling import RulesetSamplingWrapper


def __getattr__(name):
    if name == "RGBImgObservationWrapper":  # needs the drawing code, which nobody else should load
        return names.RGBImgObservationWrapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
