"""Playground at xminigrid's path."""
from ...worlds import Playground
from ....envs.minigrid.tasks import PlaygroundEnvParams
from ...names import imported_names

__getattr__ = imported_names(__name__)
