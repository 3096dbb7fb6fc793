"""Many environments at once: `EnvPool` in this process or over sockets, groups of episodes for GRPO, text environments, a server.

Each name is imported from its module when it is used, so that importing the package stays quick.
"""
_PARTS = {
    "client": "Session Step", "server": "EnvServer ServerConfig start_server", "pool": "EnvPool SyncPool Batch",
    "episodes": "Env register_env make_env envs RolloutRequest read_rows blocking", "remote": "OpenEnvWrapper",
    "curriculum": "Curriculum SomeSolve TierCurriculum Tier Schedule", "status": "watch",
    "group": "Rollout RolloutGroup pad read_jsonl TokenBudget",
    "errors": "PoolError PoolExhausted SessionLost ResetRequired SessionBusy PoolClosed BadRequest DeadlineExceeded EnvFault "
              "Unauthorized ConnectFailed WrongThread"}
_LATER = {name: part for part, names in _PARTS.items() for name in names.split()}


def __getattr__(name):
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__():
    return sorted({*globals(), *_LATER})


__all__ = sorted(_LATER)
