"""Noting that queues are gone which Guardian removed with what they belonged to.

So the next pass does not take the broker's list for a short one. Each takes three statements, whatever the number of
queues, and leaves the same rows as a pass that misses them.
"""

from collections.abc import Collection
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from accounts.models import PulseUser
from core import bulk
from queues.models import Queue, QueueEvent
from rabbit.snapshot import length_of

UNREGISTERED = {"why": "unregistered"}
WITH_VHOST = {"why": "vhost"}


def forget(names: Collection[tuple[str, str]]) -> int:
    """Note that these queues, given as (vhost, name), were deleted since no registration stands for them.

    Return how many of them were known. Those that are known to be gone, or not known at all, are left out.
    """
    if not names:
        return 0
    return _forget(Q(bulk.among(Queue, ("vhost", "name"), list(set(names)))), UNREGISTERED)


def forget_vhost(vhost: str) -> int:
    """Note that all queues of a vhost were deleted with it, and return their number."""
    return _forget(Q(vhost=vhost), WITH_VHOST)


def forget_queues_of(pulse_user: PulseUser) -> int:
    """Note that all queues of a Pulse user were deleted with it, and return their number.

    Call it while the Pulse user's row is still there: with that, its queues lose their owner.
    """
    return _forget(Q(pulse_user=pulse_user), {"with": pulse_user.username})


def gone_fields() -> dict[str, Any]:
    """Return what a pass writes of a queue that is gone, so that both leave the same row."""
    return {
        "state": Queue.State.GONE, "misses": 0, "ready": None, "unacknowledged": None, "delete_sent_at": None,
        "over_unacked_since": None, "consumers": None, "unattended_since": None, "taken_out": None,
        "stalled_since": None,
    }  # fmt: skip


def figures(ready: int | None, unacknowledged: int | None) -> dict[str, int | None]:
    """Return what an event tells of a queue's length."""
    return {"length": length_of(ready, unacknowledged)}


def _forget(these: Q, details: dict[str, Any]) -> int:
    now = timezone.now()
    with transaction.atomic():
        rows = Queue.objects.select_for_update().filter(these).exclude(state=Queue.State.GONE)
        # In the order in which a pass locks them.
        there = list(rows.order_by("id").values_list("id", "vhost", "name", "ready", "unacknowledged"))
        rows.update(**gone_fields(), last_seen=now)
        bulk.insert(
            QueueEvent,
            ("queue", "vhost", "queue_name", "kind", "at", "details"),
            [
                (id_, vhost, name, QueueEvent.Kind.REMOVED, now, {**figures(ready, unacknowledged), **details})
                for id_, vhost, name, ready, unacknowledged in there
            ],
        )
    return len(there)
