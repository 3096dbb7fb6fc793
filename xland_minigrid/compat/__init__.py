"""Names, paths and identifiers of xminigrid 0.9.3: `import xland_minigrid.compat as xminigrid`."""
import importlib

__version__ = "0.9.3"

_WHERE = {**dict.fromkeys(("make", "register", "registered_environments"), "registration"),
          **dict.fromkeys(("load_benchmark", "registered_benchmarks"), "benchmarks")}
_MODULES = "benchmarks core environment envs experimental registration rendering types wrappers".split()

def __getattr__(name):
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
