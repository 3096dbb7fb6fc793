"""Environments whose compiled programs the tests of one process share: compiling takes seconds, running takes milliseconds."""
import re
import signal
from contextlib import contextmanager
from functools import cache

import jax

import xland_minigrid
from xland_minigrid.core.layouts import GRID_TYPES, layout, pad_layout, valid_size
from xland_minigrid.envs.environment import Environment
from xland_minigrid.envs.xland import XLandMiniGrid

# One of each class, and of each kind of layout that compiles a program of its own; layouts that are data share the program of R4.
CLASSES = ["XLand-MiniGrid-R4-9x9", "XLand-MiniGrid-Maze-9x9", "XLand-MiniGrid-Rooms-9x9", "MiniGrid-Empty-5x5", "MiniGrid-EmptyRandom-5x5",
           "MiniGrid-DoorKey-5x5", "MiniGrid-BlockedUnlockPickUp", "MiniGrid-FourRooms", "MiniGrid-LockedRoom", "MiniGrid-Playground",
           "MiniGrid-Unlock", "MiniGrid-UnlockPickUp", "MiniGrid-MemoryS8", "MiniGrid-LavaGapS5"]


@cache
def compiled(env_id, wrapper=None, **changes):
    """Return an environment, its parameters, and its compiled `reset(params, key)` and `step(params, timestep, action)`.

    Environments of one class share their programs wherever the shapes and the static parameters agree. To make them agree, the parameters of an
    XLand-MiniGrid environment hold its layout as data (see `layout_as_data`). Data is free to change: `params.replace(ruleset=...)` compiles
    nothing as long as the new ruleset has the shapes of the old one. A different batch size or a different `max_steps` is a new program.

    Args:
        env_id: a registered id.
        wrapper: a class of wrapper, such as `GymAutoResetWrapper`.
        changes: hashable parameters for `make`, such as `max_steps=9`.
    """
    bare, params = xland_minigrid.make(env_id, **changes)
    env, reset, step = _programs(type(bare), wrapper)
    return env, layout_as_data(params) if isinstance(bare, XLandMiniGrid) else params, reset, step


def layout_as_data(params):
    """Return the same parameters with the layout as an array, so that all layouts of one grid size have one structure and may share a batch.

    Mazes and rooms that are drawn at every reset stay as they are: two programs for each size.
    """
    kind, height, width = params.grid_type, params.height, params.width
    if kind not in GRID_TYPES or params.layout is not None:
        return params
    plans = [layout(k, height, width) for k in GRID_TYPES if valid_size(k, height, width)]
    plan = pad_layout(layout(kind, height, width), height, width, free=max(len(p.free) for p in plans),
                      doors=max(p.doors.shape[0] for p in plans), places=max(p.doors.shape[1] for p in plans))
    return params.replace(layout=plan, grid_type="R1")


@cache
def _programs(cls, wrapper):
    env = cls() if wrapper is None else wrapper(cls())
    return env, jax.jit(env.reset), _step_of(cls) if wrapper is None else jax.jit(env.step)


def _step_of(cls):
    "The compiled step of a bare environment; classes that differ in their resets alone share it."
    return _jitted_step(cls.step, cls._outcome, cls._observe, cls.has_rules, None if cls.step is Environment.step else cls)


@cache
def _jitted_step(step, outcome, observe, has_rules, owner):
    plain = type("Plain", (Environment,), dict(default_params=None, _generate_problem=None, _outcome=outcome, _observe=observe, has_rules=has_rules))
    return jax.jit((owner or plain)().step)


def jit_for_long(function, **kwargs):
    "`jax.jit` with XLA's optimisations on, which the fast tests turn off: for a program that runs for seconds, not for milliseconds."
    return jax.jit(function, compiler_options=dict(xla_backend_optimization_level=1, xla_llvm_disable_expensive_passes=False), **kwargs)


def refusals(cases, errors=(ValueError, TypeError), one_line=True):
    """Try wrong input of many kinds. Return what went wrong as `{name: reason}`: `assert refusals(cases) == {}`.

    Args:
        cases: by name, `(call, words)` or `(call, error, words)`: the call has to raise the error, and its message has to match the words (`re.search`).
        errors: what a call without an error of its own may raise.
        one_line: also require a message of one line.
    """
    wrong = {}
    for name, (call, *error, words) in cases.items():
        try:
            wrong[name] = f"returned {call()!r}"
        except (error[0] if error else errors) as refusal:
            if not re.search(words, str(refusal)) or one_line and "\n" in str(refusal).strip():
                wrong[name] = f"{type(refusal).__name__}: {refusal}"
        except Exception as other:
            wrong[name] = f"raised {other!r}"
    return wrong


@contextmanager
def no_hang(seconds=120):
    "End what would take for ever with `TimeoutError`. The limit says nothing about speed: it only turns a hang into a failure. Without effect on Windows."
    def give_up(*_):
        raise TimeoutError(f"not done after {seconds} seconds")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
