"""Agents that learn to learn: RL² by recurrent PPO, from the network to the demonstration.

Import the parts from their modules (`xland_minigrid.baselines.rl2` and so on): importing the package stays quick.
The most common ones are also here.
"""
_LATER = {"load_agent": "agents", "train": "rl2", "preset": "rl2", "TrainConfig": "rl2", "evaluate": "evaluation",
          "boxed_agents": "agents", "score_probes": "evaluation"}


def __getattr__(name):
    if name == "nnx":  # Flax, or the sentence that says how to get it
        return _nnx()
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


def _nnx():
    try:
        import optax
        from flax import nnx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"Agents that learn need {error.name}: pip install 'xland_minigrid[train]'.",
                                  name=error.name) from None
    return nnx


def __dir__():
    return sorted({*globals(), *_LATER})


__all__ = sorted(_LATER)
