"""Playing by hand, under the path that xminigrid's users import."""
from .play import ManualControl
