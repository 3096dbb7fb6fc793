"""BlockedUnlockPickUp, under the path that xminigrid's users import."""
from .tasks import BlockedUnlockPickUp
