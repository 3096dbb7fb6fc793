"""Playground, under the path that xminigrid's users import."""
from .tasks import Playground
from .tasks import PlaygroundEnvParams
