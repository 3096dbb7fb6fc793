"""UnlockPickUp at xminigrid's path."""
from .tasks import UnlockPickUp
from ...compat.names import imported_names

__getattr__ = imported_names(__name__)
