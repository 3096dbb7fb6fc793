"""Environments by name, under the path that xminigrid's users import."""
from .compat.names import EnvSpec, load, make, register, registered_environments
from .envs.registration import registry

_REGISTRY = registry.specs
