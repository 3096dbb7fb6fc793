"""xminigrid 0.9.3 under its own names, paths and identifiers, for programs written for it: `import xland_minigrid.compat as xminigrid`."""
import importlib

__version__ = "0.9.3"

_WHERE = {"make": "registration", "register": "registration", "registered_environments": "registration", "load_benchmark": "benchmarks", "registered_benchmarks": "benchmarks"}
_MODULES = ("benchmarks", "core", "environment", "envs", "experimental", "registration", "rendering", "types", "wrappers")


def __getattr__(name):
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
