"""FourRooms, under the path that xminigrid's users import."""
from ...worlds import FourRooms
from ...names import imported_names

__getattr__ = imported_names(__name__)
