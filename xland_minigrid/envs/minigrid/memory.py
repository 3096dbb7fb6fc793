"""Memory, under the path that xminigrid's users import."""
from .tasks import Memory
from .tasks import MemoryCarry as MemoryEnvCarry
