"""Environments by name, in the identifiers of xminigrid 0.9.3."""
from .names import EnvSpec, load
from .worlds import make, register, registered_environments, registry

_REGISTRY = registry.specs
