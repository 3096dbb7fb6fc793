"""LockedRoom at xminigrid's path."""
from ...worlds import LockedRoom
from ...names import imported_names

__getattr__ = imported_names(__name__)
