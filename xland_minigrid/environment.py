"""The environment interface, under the path that xminigrid's users import."""
from typing import TypeVar

from .envs.environment import Environment, EnvParams
from .types import EnvCarryT, IntOrArray, State, StepType, TimeStep

EnvParamsT = TypeVar("EnvParamsT", bound=EnvParams)
