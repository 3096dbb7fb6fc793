"""Empty, under the path that xminigrid's users import."""
from .tasks import Empty, EmptyRandom
from ...compat.names import imported_names

__getattr__ = imported_names(__name__)
