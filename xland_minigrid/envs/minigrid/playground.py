"""Playground at xminigrid's path."""
from .tasks import Playground
from .tasks import PlaygroundEnvParams
from ...compat.names import imported_names

__getattr__ = imported_names(__name__)
