"""Many tasks: make them, keep them, sample and split them."""
from .benchmark import Benchmark, generate_benchmark
from .files import BenchmarkFileError, data_folder, digest, read_file, write_file
from .generate import GENERATOR_VERSION, GOAL_KINDS, PRESETS, RULE_KINDS, Recipe, canonical, generate_rulesets, identities
from .generate import max_init_tiles, max_rules, recipe_of
from .registry import benchmark_file, benchmark_info, find_benchmark, load_benchmark, load_benchmark_from_path
from .registry import registered_benchmarks
from .splits import Split, split_rows

# What needs time or other packages to import is imported when it is asked for.
_LATER = {
    "difficulty": ("Difficulty", "estimated_steps", "stratified"),
    "exact": ("Shortest", "shortest"),
    "expert": ("TaskPlan", "consult", "expert_action", "plan_steps", "steps_to_go", "task_plan"),
    "histories": ("Histories", "NoisyExpert", "check_histories", "load_histories", "record"),
    "hub": ("HubError", "fetch"),
    "oracle": ("reference_steps", "replay", "solve_tasks"),
    "planner": ("Failure", "Solution", "solve_from"),
    "probes": ("PROBES", "Probe", "probe", "probes_benchmark"),
    "solve": ("Plan", "Plans", "Reason", "plan_of", "prove"),
    "statistics": ("benchmark_statistics", "deduplicate"),
    ".compat.names": ("get_ruleset",),  # these two for programs written for xminigrid
    ".compat.tasks": ("DATA_PATH", "NAME2HFFILENAME", "load_bz2_pickle", "save_bz2_pickle"),
}
_WHERE = {name: f".{module}" for module, names in _LATER.items() for name in names}


def __getattr__(name):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(_WHERE[name], __name__), name)


def __dir__():
    return sorted({*globals(), *_WHERE})


__all__ = sorted({name for name in globals() if not name.startswith("_")} | set(_WHERE))
