"""Playground, under the path that xminigrid's users import."""
from ...worlds import Playground
from ....envs.minigrid.tasks import PlaygroundEnvParams
