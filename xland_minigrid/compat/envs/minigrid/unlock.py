"""Unlock at xminigrid's path."""
from ...worlds import Unlock
from ...names import imported_names

__getattr__ = imported_names(__name__)
