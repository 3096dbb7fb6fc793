"""BlockedUnlockPickUp, under the path that xminigrid's users import."""
from ...worlds import BlockedUnlockPickUp
