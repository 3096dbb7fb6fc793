"""Wrappers, under the path that xminigrid's users import."""
from .envs.sampling import RulesetSamplingWrapper
from .envs.wrappers import (
    DirectionObservationWrapper,
    DmEnvAutoResetWrapper,
    GymAutoResetWrapper,
    RulesAndGoalsObservationWrapper,
    Wrapper,
)


def __getattr__(name):
    if name == "RGBImgObservationWrapper":  # needs the drawing code, which nobody else should load
        from .viz.images import RGBImgObservationWrapper
        return RGBImgObservationWrapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
