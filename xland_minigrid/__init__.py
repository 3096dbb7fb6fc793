"""Meta-reinforcement learning in grid worlds whose rules and goals are data."""
from .core.ruleset import RuleSet
from .envs.environment import EnvParams, Environment, State, StepType, TimeStep
from .envs.registration import make, register, registered_environments

__version__ = "0.1.0"
