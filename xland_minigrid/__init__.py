"""Meta-reinforcement learning in grid worlds whose rules and goals are data."""
from .benchmarks import Benchmark, load_benchmark, load_benchmark_from_path, registered_benchmarks
from .core.ruleset import RuleSet, print_ruleset
from .envs.environment import EnvParams, Environment, State, StepType, TimeStep
from .envs.registration import make, register, registered_environments

__version__ = "0.1.0"
