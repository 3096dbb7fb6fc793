"""Environments by name, under the path that xminigrid's users import."""
from .compat.names import EnvSpec, make, register, registered_environments
