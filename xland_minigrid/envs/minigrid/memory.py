"""Memory at xminigrid's path."""
from .tasks import Memory
from .tasks import MemoryCarry as MemoryEnvCarry
from ...compat.names import imported_names

__getattr__ = imported_names(__name__)
