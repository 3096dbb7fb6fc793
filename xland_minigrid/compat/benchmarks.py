"""Benchmarks and files, in the identifiers of xminigrid 0.9.3."""
from ..benchmarks import registered_benchmarks
from .tasks import (
    DATA_PATH, NAME2HFFILENAME, Benchmark, get_ruleset, load_benchmark, load_benchmark_from_path, load_bz2_pickle,
    save_bz2_pickle,
)
