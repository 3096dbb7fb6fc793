"""Playing by hand at xminigrid's path."""
from .play import ManualControl
