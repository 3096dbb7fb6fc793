"""Widgets to play and explore in a notebook, each imported when you use it: this package loads no ipywidgets."""
from importlib import import_module

_HOMES = {"EnvPlayer": "env_player", "RulesetExplorer": "explorer", "RolloutViewer": "rollout",
          "TrainingDashboard": "training", "ScalingLab": "scaling"}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(_HOMES)}.")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return sorted([*globals(), *_HOMES])
