"""The environment interface, in the identifiers of xminigrid 0.9.3."""
from .names import EnvCarryT, EnvParams, EnvParamsT, IntOrArray, StepType, TimeStep
from .worlds import Environment, State
