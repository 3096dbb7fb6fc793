"""Tasks of MiniGrid, in the identifiers of xminigrid 0.9.3."""
from ... import worlds
from ...names import add_task_modules

add_task_modules(__name__, worlds)
