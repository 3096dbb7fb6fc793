"""The path of xminigrid's laws, in its identifiers."""
from . import actions, constants, goals, grid, observation, rules
