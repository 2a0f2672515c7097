"""The kinds of notification about sweeps of agents' queues."""

from typing import Any

from notifications import kinds
from notifications.models import Notification
from rabbit.names import readable


def _of_orphans(notification: Notification) -> dict[str, Any]:
    orphans = notification.facts["orphans"]
    return {"orphans": [{name: readable(value) for name, value in one.items()} for one in orphans]}


SWEEP_BRAKE = kinds.register("sweep-brake", "the brake holds a sweep of agents' queues")
ORPHANS_IN_USE = kinds.register(
    "orphans-in-use", "somebody reads from queues that nobody registered", context=_of_orphans
)
