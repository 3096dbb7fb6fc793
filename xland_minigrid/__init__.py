"""Meta-reinforcement learning in grid worlds whose rules and goals are data."""
import sys

from . import environment, registration, types
from .benchmarks import Benchmark, load_benchmark, load_benchmark_from_path, registered_benchmarks
from .core.compose import AllOf, AnyOf, InOrder, Not, several
from .core.goals import register_goal
from .core.rules import register_rule
from .core.ruleset import RuleSet, make_ruleset, print_ruleset, stack_rulesets
from .envs.environment import EnvParams, Environment, State, StepType, TimeStep
from .envs.registration import make, register, registered_environments

__version__ = "0.1.0"


def __getattr__(name):
    if name in ("ParseError", "parse_ruleset"):  # reading English needs large tables, which few programs want
        from .core import parse
        return getattr(parse, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# `import gymnasium, xland_minigrid` is all that `gymnasium.make("xland_minigrid/...")` needs; in the other order, import xland_minigrid.interop.gymnasium.
# An older gymnasium than the adapter wants is no reason not to import the rest; importing the adapter itself then says what is missing.
if "gymnasium" in sys.modules:
    try:
        from .interop import gymnasium as _gymnasium
    except (ImportError, AttributeError):
        pass
