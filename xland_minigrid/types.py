"""The records that travel through an environment, and names for annotations, under the path that xminigrid's users import."""
from .compat.names import AgentState, EnvCarry, EnvCarryT, GridState, IntOrArray, RuleSet, State, StepType, Tile, TimeStep
