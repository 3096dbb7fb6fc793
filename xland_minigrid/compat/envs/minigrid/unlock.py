"""Unlock, under the path that xminigrid's users import."""
from ...worlds import Unlock
