"""Many tasks: make them, keep them, sample and split them."""
from xland_minigrid.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFileError,
    benchmark_file,
    benchmark_info,
    benchmark_sizes,
    data_folder,
    digest,
    find_benchmark,
    generate_benchmark,
    load_benchmark,
    load_benchmark_from_path,
    registered_benchmarks,
)
from xland_minigrid.benchmarks.files import read_file, read_manifest, write_file
from xland_minigrid.benchmarks.generate import (
    GENERATOR_VERSION,
    GOAL_KINDS,
    PRESETS,
    RULE_KINDS,
    Recipe,
    canonical,
    generate_rulesets,
    identities,
    max_init_tiles,
    max_rules,
    recipe_of,
)
from xland_minigrid.benchmarks.splits import Split, split_rows

# What needs time or other packages to import is imported when it is asked for.
_LATER = {
    "demonstrations": ("Demonstrations", "DemonstrationsFileError", "check_demonstrations", "load_demonstrations", "noise_schedule", "save_demonstrations"),
    "difficulty": ("Difficulty", "stratified"),
    "exact": ("Shortest", "shortest"),
    "hub": ("HubError", "fetch"),
    "oracle": ("Solution", "Failure", "estimated_steps", "reference_steps", "replay", "solve_from", "solve_tasks"),
    "probes": ("PROBES", "Probe", "probe", "probes_benchmark", "score_probes"),
    "solve": ("Plan", "Plans", "Reason", "plan_of", "prove"),
    "statistics": ("benchmark_statistics", "deduplicate", "figure_4", "plot_statistics"),
}
_WHERE = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__():
    return sorted({*globals(), *_WHERE})


__all__ = sorted({name for name in globals() if not name.startswith("_")} | set(_WHERE))
