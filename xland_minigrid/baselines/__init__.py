"""Agents that learn to learn: RL² by recurrent PPO, from the network to the demonstration.

The parts are imported from their modules (`xland_minigrid.baselines.rl2` and so on), so that importing the package stays quick; those that everybody needs are here as well.
"""
_LATER = {"load_agent": "rl2", "train": "rl2", "preset": "rl2", "TrainConfig": "rl2", "evaluate": "evaluation", "boxed_agents": "agents"}


def __getattr__(name):
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__():
    return sorted({*globals(), *_LATER})


__all__ = sorted(_LATER)
