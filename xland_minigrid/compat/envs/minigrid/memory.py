"""Memory at xminigrid's path."""
from ...worlds import Memory
from ....envs.minigrid.tasks import MemoryCarry as MemoryEnvCarry
from ...names import imported_names

__getattr__ = imported_names(__name__)
