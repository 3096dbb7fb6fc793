"""The records that travel through an environment, and names for annotations, under the path that xminigrid's users import."""
from typing import TypeAlias, TypeVar

import jax

from .core.actions import AgentState
from .core.ruleset import RuleSet
from .envs.environment import EnvCarry, State, StepType, TimeStep

GridState: TypeAlias = jax.Array
Tile: TypeAlias = jax.Array
IntOrArray: TypeAlias = int | jax.Array
EnvCarryT = TypeVar("EnvCarryT")
