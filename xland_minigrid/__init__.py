"""Meta-reinforcement learning in grid worlds whose rules and goals are data."""
import sys
import warnings

from . import environment, registration, types
from .benchmarks import Benchmark, load_benchmark, load_benchmark_from_path, registered_benchmarks
from .core.compose import AllOf, AnyOf, InOrder, Not, several
from .core.goals import (
    AgentHoldGoal, AgentNearDownGoal, AgentNearGoal, AgentNearLeftGoal, AgentNearRightGoal, AgentNearUpGoal, AgentOnPositionGoal, AgentOnTileGoal,
    EmptyGoal, TileNearDownGoal, TileNearGoal, TileNearLeftGoal, TileNearRightGoal, TileNearUpGoal, TileOnPositionGoal, check_goal, register_goal,
)
from .core.rules import (
    AgentHoldRule, AgentNearDownRule, AgentNearLeftRule, AgentNearRightRule, AgentNearRule, AgentNearUpRule, EmptyRule, TileNearDownRule,
    TileNearLeftRule, TileNearRightRule, TileNearRule, TileNearUpRule, check_rule, register_rule,
)
from .core.ruleset import RuleSet, make_ruleset, print_ruleset, stack_rulesets
from .envs.environment import EnvParams, Environment, State, StepType, TimeStep
from .envs.registration import make, register, registered_environments
from .envs.wrappers import DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper
from .interop import upstream as _upstream  # registers the reader of xminigrid's own files

__version__ = "0.1.0"


def __getattr__(name):
    if name in ("ParseError", "parse_ruleset"):  # reading English needs large tables, which few programs want
        from .core import parse
        return getattr(parse, name)
    if name == "RGBImgObservationWrapper":  # needs the drawing code
        from .viz.images import RGBImgObservationWrapper
        return RGBImgObservationWrapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# `import gymnasium, xland_minigrid` is all that `gymnasium.make("xland_minigrid/...")` needs; in the other order, import xland_minigrid.interop.gymnasium.
# With an older gymnasium than the adapter needs the rest is imported all the same; the warning says what is missing.
if "gymnasium" in sys.modules:
    try:
        from .interop import gymnasium as _gymnasium
    except (ImportError, AttributeError) as _error:
        warnings.warn(f"gymnasium.make does not know these environments: {_error}", stacklevel=2)
