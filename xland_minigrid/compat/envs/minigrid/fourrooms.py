"""FourRooms at xminigrid's path."""
from ...worlds import FourRooms
from ...names import imported_names

__getattr__ = imported_names(__name__)
