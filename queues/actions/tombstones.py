"""Record queues as gone that Guardian deleted with their Pulse user, vhost or registration.

Otherwise the next list would count as too short. Each function takes three statements for any number of queues, and
writes the same rows as a pass.
"""

from collections.abc import Collection
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from accounts.models import PulseUser
from core import bulk
from queues.models import Queue, QueueEvent
from queues.rules.rows import GONE_FIELDS, WITHOUT_COUNTS
from rabbit.snapshot import length_of

UNREGISTERED = {"why": "unregistered"}
WITH_VHOST = {"why": "vhost"}


def forget(names: Collection[tuple[str, str]]) -> int:
    """Record that these queues, given as (vhost, name), were deleted because they have no registration.

    Return the number of rows written. Queues without a row, or already gone, are left out.
    """
    if not names:
        return 0
    return _forget(Q(bulk.among(Queue, ("vhost", "name"), list(set(names)))), UNREGISTERED)


def forget_vhost(vhost: str) -> int:
    """Record that all queues of a vhost were deleted with it, and return their number."""
    return _forget(Q(vhost=vhost), WITH_VHOST)


def forget_queues_of(pulse_user: PulseUser) -> int:
    """Record that all queues of a Pulse user were deleted with it, and return their number.

    Call it before the Pulse user's row is deleted: then its queues lose their owner.
    """
    return _forget(Q(pulse_user=pulse_user), {"with": pulse_user.username})


def figures(ready: int | None, unacknowledged: int | None) -> dict[str, int | None]:
    return {"length": length_of(ready, unacknowledged)}


def _forget(selected: Q, details: dict[str, Any]) -> int:
    now = timezone.now()
    with transaction.atomic():
        rows = Queue.objects.select_for_update().filter(selected).exclude(state=Queue.State.GONE)
        # A pass locks in this order too.
        queues = list(rows.order_by("id").values_list("id", "vhost", "name", "ready", "unacknowledged"))
        rows.update(**GONE_FIELDS, **WITHOUT_COUNTS, last_seen=now)
        bulk.insert(
            QueueEvent,
            ("queue", "vhost", "queue_name", "kind", "at", "details"),
            [
                (id_, vhost, name, QueueEvent.Kind.REMOVED, now, {**figures(ready, unacknowledged), **details})
                for id_, vhost, name, ready, unacknowledged in queues
            ],
        )
    return len(queues)
