"""The environment interface, under the path that xminigrid's users import."""
from .compat.names import EnvCarryT, Environment, EnvParams, EnvParamsT, IntOrArray, State, StepType, TimeStep
