"""Many tasks: make them, keep them, sample and split them."""
from xland_minigrid.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFileError,
    benchmark_file,
    benchmark_info,
    data_folder,
    digest,
    generate_benchmark,
    load_benchmark,
    load_benchmark_from_path,
    registered_benchmarks,
)
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
