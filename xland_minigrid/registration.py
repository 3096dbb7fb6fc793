"""Environments by name, under the path that xminigrid's users import."""
from .envs.registration import EnvSpec, make, register, registered_environments
