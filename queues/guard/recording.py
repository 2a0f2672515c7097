"""Record what became of the queues to delete, and enqueue the notices."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.dispatch import Signal
from django.utils import timezone

from core import bulk
from core.leases import HeldLease
from notifications import enqueue
from notifications.enqueue import Notice
from queues.archives import writing
from queues.archives.outcomes import Removed
from queues.guard import registered
from queues.mails import kinds
from queues.mails.subject import subject_key
from queues.models import Queue, QueueEvent
from queues.rules.quiet import QuietPeriod
from queues.rules.rows import StoredQueue
from queues.rules.thresholds import DELETING, GONE

deletions_recorded = Signal()
"""Sent with ``number`` after this number of deletions was recorded."""


def stored(rows: QuerySet[Queue]) -> list[StoredQueue]:
    """Return these rows of ``Queue`` as a pass reads them."""
    return list(map(StoredQueue._make, rows.values_list(*StoredQueue._fields)))


def finish(queues: Sequence[StoredQueue], lease: HeldLease) -> int:
    """Record that these queues were deleted by a request whose answer was lost. Return the number of notifications."""
    if not queues:
        return 0
    facts = _last_facts(queues)
    # The deleter archives after the decision, and before it sets delete_sent_at.
    decided = {queue.id: queue.decided_at or queue.delete_sent_at for queue in queues}
    since = {id_: at for id_, at in decided.items() if id_ and at}
    writing.keep_fetched(list(since))
    for id_, archived in writing.kept_since(since).items():
        facts[id_] |= Removed(archived, archived.dropped, archived.held).as_facts()
    return record_deleted(queues, facts, lease, lease)[1]


def record_deleted(
    queues: Sequence[StoredQueue], facts: dict[int | None, dict[str, Any]], lease: HeldLease, group: HeldLease
) -> tuple[int, int]:
    """Record the deletions and enqueue the notices in one transaction. Return the numbers of both.

    The notices are a group while ``group`` is held.
    """
    now = timezone.now()
    with transaction.atomic():
        lease.renew()
        ids = still_deleting(queues)
        queues = [queue for queue in queues if queue.id in ids]
        write_states([_deleted(queue) for queue in queues], now)
        write_events([(queue, QueueEvent.Kind.DELETED, facts[queue.id]) for queue in queues], now)
        # Only queues registered since the decision: a registered queue is not deletable.
        newly_registered = [(queue.vhost, queue.name) for queue in queues if queue.owner_id is not None]
        if newly_registered:
            registered.provider().record_missing(newly_registered)
        notices = [Notice(kinds.DELETION, facts[queue.id], subject_key(queue.id), *queue.ownership) for queue in queues]
        notified = enqueue.enqueue(notices, now, group)
    deletions_recorded.send(Queue, number=len(queues))
    return len(queues), notified


def still_deleting(queues: Sequence[StoredQueue]) -> set[int]:
    """Lock the queues that are still in state deleting, and return their ids: an owner may have deleted one."""
    these = bulk.among(Queue, ("id",), [(queue.id,) for queue in queues])
    rows = Queue.objects.select_for_update().filter(these, state=DELETING).order_by("id")
    return set(rows.values_list("id", flat=True))


def _deleted(queue: StoredQueue) -> StoredQueue:
    return queue.with_quiet_period(QuietPeriod())._replace(
        state=GONE, delete_sent_at=None, misses=0, warned_since=None, over_unacked_since=None
    )


def write_states(queues: Iterable[StoredQueue], now: datetime) -> None:
    """Write the states of these queues, the messages already sent about them, and when there was an outcome."""
    fields = (
        "state", "misses", "delete_sent_at", "notified_state", "quiet_until", "recovery_notified", "merged",
        "last_call_limit", "warned_since", "over_unacked_since",
    )  # fmt: skip
    rows = [
        (queue.id, *(getattr(queue, name) for name in fields), None if queue.state == DELETING else now)
        for queue in queues
    ]
    bulk.update(Queue, (*fields, "outcome_at"), rows)


def write_events(events: Sequence[tuple[StoredQueue | Queue, str, dict[str, Any]]], at: datetime) -> None:
    """Insert events with their details."""
    rows = [(queue.id, queue.vhost, queue.name, kind, at, details) for queue, kind, details in events]
    bulk.insert(QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), rows)


def _last_facts(queues: Sequence[StoredQueue]) -> dict[int | None, dict[str, Any]]:
    """Return the facts recorded with each decision, by the queue's id."""
    facts: dict[int | None, dict[str, Any]] = {
        queue.id: {"queue": queue.name, "vhost": queue.vhost} for queue in queues
    }
    these = bulk.among(QueueEvent, ("queue",), [(id_,) for id_ in facts])
    events = QueueEvent.objects.filter(these, kind=QueueEvent.Kind.DELETABLE).order_by("id")
    facts.update(events.values_list("queue", "details"))
    return facts
