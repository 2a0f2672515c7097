"""Record queues as gone that Guardian deleted with their Pulse user, vhost or registration.

Otherwise the next list would count as too short. Each function takes three statements for any number of queues (those
of a Pulse user seven), and writes the same rows as a pass.
"""

from collections.abc import Collection
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from accounts.models import PulseUser
from core import bulk
from queues.models import Move, Queue, QueueEvent, QueueSample
from queues.rules.rows import GONE_FIELDS, WITHOUT_COUNTS
from rabbit.snapshot import length_of

UNREGISTERED = {"why": "unregistered"}
WITH_VHOST = {"why": "vhost"}

OF_OWNERS: dict[str, Any] = {
    "warn_length": None,
    "max_length": None,
    "unbounded": False,
    "limits_until": None,
    "limits_before": None,
    "limits_phase": "",
    "notified_state": Queue.State.OK,
    "quiet_until": None,
    "recovery_notified": False,
    "merged": 0,
    "reminded_at": None,
    "acknowledged_at": None,
    "acknowledged_by": None,
    "unattended_notified_at": None,
    "stalled_notified_at": None,
}
"""The columns with what owners chose for a queue, or know of it, as of a new queue."""


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

    Another person may create a Pulse user of this name, and gets these rows with the queues. So they lose their limits
    and their history. Operators find the events by the queue's name. Call it before the Pulse user's row is deleted:
    then its queues lose their owner.
    """
    with transaction.atomic():
        number = _forget(Q(pulse_user=pulse_user), {"with": pulse_user.username})
        Queue.objects.filter(pulse_user=pulse_user).update(**OF_OWNERS)
        QueueSample.objects.filter(queue__pulse_user=pulse_user).delete()
        Move.objects.filter(queue__pulse_user=pulse_user).delete()
        events = QueueEvent.objects.filter(queue__pulse_user=pulse_user)
        events.exclude(kind=QueueEvent.Kind.REMOVED, by=None).update(queue=None)
    return number


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
                (
                    id_,
                    vhost,
                    name,
                    QueueEvent.Kind.REMOVED,
                    now,
                    {"length": length_of(ready, unacknowledged), **details},
                )
                for id_, vhost, name, ready, unacknowledged in queues
            ],
        )
    return len(queues)
