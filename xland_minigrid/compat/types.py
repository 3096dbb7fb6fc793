"""The records that travel through an environment, in the identifiers of xminigrid 0.9.3, and names for annotations."""
from .identifiers import AgentState
from .names import EnvCarry, EnvCarryT, GridState, IntOrArray, StepType, Tile, TimeStep
from .worlds import RuleSet, State
