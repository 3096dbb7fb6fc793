"""Memory, under the path that xminigrid's users import."""
from ...worlds import Memory
from ....envs.minigrid.tasks import MemoryCarry as MemoryEnvCarry
