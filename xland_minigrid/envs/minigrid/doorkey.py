"""DoorKey, under the path that xminigrid's users import."""
from .tasks import DoorKey
from ...compat.names import imported_names

__getattr__ = imported_names(__name__)
