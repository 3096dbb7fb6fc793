"""Many environments at once: `EnvPool` in this process or over sockets, groups of episodes for GRPO, text environments, a server.

The parts are imported from their modules (`xland_minigrid.pool.server` and so on), so that importing the package stays quick; those that everybody needs are here as well.
"""
_LATER = {
    "EnvPool": "pool", "SyncPool": "pool", "Batch": "pool", "Session": "client", "Step": "client", "EnvServer": "server", "ServerConfig": "server", "start_server": "server",
    "Rollout": "group", "RolloutGroup": "group", "Env": "episodes", "register_env": "episodes", "make_env": "episodes", "envs": "episodes", "RolloutRequest": "episodes",
    "read_rows": "episodes", "blocking": "episodes", "OpenEnvWrapper": "remote", "watch": "status",
    "Curriculum": "curriculum", "SomeSolve": "curriculum", "TierCurriculum": "curriculum", "Tier": "curriculum", "Schedule": "curriculum",
    "pad": "group", "read_jsonl": "group", "TokenBudget": "group",
    **dict.fromkeys(("PoolError", "PoolExhausted", "SessionLost", "ResetRequired", "SessionBusy", "PoolClosed", "BadRequest", "DeadlineExceeded", "EnvFault", "Unauthorized", "ConnectFailed",
                     "WrongThread"), "errors"),
}


def __getattr__(name):
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__():
    return sorted({*globals(), *_LATER})


__all__ = sorted(_LATER)
