"""Queues without a consumer, and queues whose consumers have stalled: checked every minute.

Owners are notified once when a queue has had no consumer for GUARDIAN_NO_CONSUMER_MINUTES, and once when its consumers
have acknowledged nothing for GUARDIAN_STALLED_MINUTES although it has messages. Each end is notified once too.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from core import broker, bulk, leases
from core.leases import HeldLease, LeaseLost, LeaseTaken
from notifications import enqueue
from notifications.enqueue import Notice
from queues.guard.facts import Facts
from queues.guard.pass_run import guarded_vhosts
from queues.mails import kinds
from queues.mails.subject import subject_key
from queues.models import Move, Queue, Watch
from queues.rules import thresholds
from queues.rules.rows import WITHOUT_COUNTS, StoredQueue
from queues.rules.states import should_have_consumer
from rabbit.errors import BrokerError
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.requests.sending import JSONObject
from rabbit.snapshot import length_of

logger = logging.getLogger(__name__)

LEASE = "consumers"
COUNT_INTERVAL = timedelta(minutes=1)
CONSUMER_FIELDS = ("consumers", "unattended_since", "unattended_notified_at")
STALL_FIELDS = ("acknowledged_total", "stalled_since", "stalled_notified_at")
WRITTEN_FIELDS = ("bytes", *CONSUMER_FIELDS, *STALL_FIELDS)
"""The columns that a count writes."""

GONE_WITH_COUNTS = Q(state=Queue.State.GONE) & (Q(consumers__isnull=False) | Q(stalled_since__isnull=False))
COLUMNS = "name,vhost,consumers,message_bytes"
ACK_COUNTERS = ("ack", "deliver_no_ack", "get_no_ack")
"""The broker's counters of acknowledged messages, and of those that needed none. Rejected ones are in no counter."""
STALL_COLUMNS = ",".join(
    ["messages_ready", "messages_unacknowledged", *(f"message_stats.{name}" for name in ACK_COUNTERS)]
)


class QueueCounts(NamedTuple):
    """The broker's figures of a queue; None: not reported. ``acked_total`` counts from the broker's start."""

    consumers: int
    bytes: int | None = None
    ready: int | None = None
    unacknowledged: int | None = None
    acked_total: int | None = None


class ConsumerState(NamedTuple):
    """The columns of ``queues.models.Queue`` about a queue's consumers, and the bytes of its messages."""

    id: int
    vhost: str
    name: str
    type: str
    exclusive: bool
    registered: bool
    bytes: int | None
    consumers: int | None
    unattended_since: datetime | None
    unattended_notified_at: datetime | None
    acknowledged_total: int | None
    stalled_since: datetime | None
    stalled_notified_at: datetime | None

    def with_consumers(self, consumers: int, now: datetime, minutes: int) -> "ConsumerState":
        """Return the state after a count of the consumers.

        Owners are notified after ``minutes`` without a consumer (0: never), if the queue should have one.
        """
        if consumers:
            return self._replace(consumers=consumers, unattended_since=None, unattended_notified_at=None)
        since = self.unattended_since or now
        should_have = should_have_consumer(self.name, exclusive=self.exclusive, registered=self.registered)
        is_due = minutes > 0 and should_have and now - since >= timedelta(minutes=minutes)
        told_at = self.unattended_notified_at or (now if is_due else None)
        return self._replace(consumers=0, unattended_since=since, unattended_notified_at=told_at)

    def with_progress(self, count: QueueCounts, now: datetime, minutes: int) -> "ConsumerState":
        """Return the state after a count of the acknowledged messages.

        Owners are notified after ``minutes`` of a stall; 0: never. A stall begins when nothing was acknowledged between
        two counts although the queue has messages, ready or unacknowledged. It ends when a message is acknowledged or
        the queue is empty. A stall that was notified continues when the consumers disconnect: they may return and
        still acknowledge nothing. After a restart of the broker its counter is lower: a notified stall continues, and
        any other starts again. Messages of a stream are never acknowledged away.
        """
        if not minutes or self.type == "stream":
            return self._replace(acknowledged_total=None, stalled_since=None, stalled_notified_at=None)
        if count.ready is None or count.unacknowledged is None:
            return self
        if not count.ready + count.unacknowledged:
            return self._replace(acknowledged_total=None, stalled_since=None, stalled_notified_at=None)
        if count.acked_total is None:  # the broker keeps no counters (``rates_mode = none``), or has none yet
            return self
        since = now if count.consumers else None
        if self.acknowledged_total is None:
            return self._replace(acknowledged_total=count.acked_total, stalled_since=since)
        if self.acknowledged_total > count.acked_total and self.stalled_notified_at:
            return self._replace(
                acknowledged_total=count.acked_total, stalled_since=since and (self.stalled_since or now)
            )
        if self.acknowledged_total != count.acked_total:
            return self._replace(acknowledged_total=count.acked_total, stalled_since=since, stalled_notified_at=None)
        if since is None:
            return self._replace(stalled_since=None)
        since = self.stalled_since or now
        told_at = self.stalled_notified_at or (now if now - since >= timedelta(minutes=minutes) else None)
        return self._replace(stalled_since=since, stalled_notified_at=told_at)


def count_consumers() -> int:
    """Count the consumers of the guarded queues, write the changes, and return the number of notifications.

    It takes one request for all queues. A queue that the answer lacks, or lists without a number, keeps its state.
    Nothing changes if the broker is unreachable, or another process is counting.
    """
    try:
        with leases.lease(LEASE) as lease:
            notified = _count(lease)
    except (LeaseTaken, LeaseLost):
        return 0
    if notified:
        enqueue.wake(notified)
    return notified


def _count(lease: HeldLease) -> int:
    now = timezone.now()
    watch, _ = Watch.objects.get_or_create(id=1)
    try:
        management = broker.management()
        counted = _fetch_counts(management)
    except BrokerError as error:
        # The monitor notifies operators of an outage. Log only its start here.
        is_first = watch.consumers_counted_at is None or now - watch.consumers_counted_at < 2 * COUNT_INTERVAL
        logger.log(logging.WARNING if is_first else logging.DEBUG, "Could not count consumers: %s", error)
        return 0
    before = {state.id: state for state in _stored_states()}
    after = {
        id_: state.with_consumers(count.consumers, now, settings.GUARDIAN_NO_CONSUMER_MINUTES)
        .with_progress(count, now, settings.GUARDIAN_STALLED_MINUTES)
        ._replace(bytes=state.bytes if count.bytes is None else count.bytes)
        for id_, state in before.items()
        if (count := counted.get((state.vhost, state.name))) is not None
    }
    consumer_changes = _changed(before, after, "unattended_notified_at")
    # If the check was turned off, that says nothing about the queues.
    stall_changes = _changed(before, after, "stalled_notified_at") if settings.GUARDIAN_STALLED_MINUTES else set()
    gathered = _gather_facts(management, consumer_changes | stall_changes, now)
    lease.renew_if_due()
    notices: dict[tuple[int, bool], Notice] = {}
    for queue in gathered.queues:
        earlier, state, count = before[queue.id], after[queue.id], counted[queue.vhost, queue.name]
        if queue.id in consumer_changes and (notice := _notice(queue, earlier, state, gathered, now)):
            notices[queue.id, False] = notice
        if queue.id in stall_changes and (notice := _stall_notice(queue, earlier, state, count, gathered, now)):
            notices[queue.id, True] = notice
    with transaction.atomic():
        lease.renew()
        remaining = _lock_remaining([id_ for id_, one in after.items() if one != before[id_]])
        notices = {which: notice for which, notice in notices.items() if which[0] in remaining}
        for changes, is_stall, names in (
            (consumer_changes, False, CONSUMER_FIELDS),
            (stall_changes, True, STALL_FIELDS),
        ):
            for id_ in changes:
                if (id_, is_stall) not in notices:  # the next count decides again
                    after[id_] = after[id_]._replace(**{name: getattr(before[id_], name) for name in names})
        changed = [one for id_, one in after.items() if one != before[id_]]
        bulk.update(
            Queue, WRITTEN_FIELDS, [(one.id, *(getattr(one, name) for name in WRITTEN_FIELDS)) for one in changed]
        )
        Queue.objects.filter(GONE_WITH_COUNTS).update(**WITHOUT_COUNTS)
        Watch.objects.filter(id=watch.id).update(consumers_counted_at=now)
        return enqueue.enqueue(list(notices.values()), now, lease)


def _changed(before: Mapping[int, ConsumerState], after: Mapping[int, ConsumerState], told_at: str) -> set[int]:
    """Return the ids of the queues for which this column became set or empty."""
    return {id_ for id_, state in after.items() if bool(getattr(state, told_at)) != bool(getattr(before[id_], told_at))}


def _lock_remaining(ids: Sequence[int]) -> set[int]:
    """Lock the rows to write, and return those of these queues that are neither gone nor about to be deleted.

    Rows are locked by id, in the order of a pass, to avoid a deadlock.
    """
    selected = Q(bulk.among(Queue, ("id",), [(id_,) for id_ in ids])) if ids else Q(pk__in=[])
    rows = Queue.objects.select_for_update().filter(selected | GONE_WITH_COUNTS).order_by("id")
    ending = (Queue.State.GONE, Queue.State.DELETING)
    return {id_ for id_, state in rows.values_list("id", "state") if state not in ending}


def _fetch_counts(management: Management) -> Mapping[QueueName, QueueCounts]:
    """Return the figures of each guarded queue for which the broker reports a number of consumers.

    Raises:
        BrokerError: the broker is unreachable or refuses.
    """
    vhosts = guarded_vhosts()
    columns = f"{COLUMNS},{STALL_COLUMNS}" if settings.GUARDIAN_STALLED_MINUTES else COLUMNS
    rows = management.list_queues(None, {"columns": columns})
    return {
        (row["vhost"], row["name"]): QueueCounts(
            consumers,
            _number(row.get("message_bytes")),
            _number(row.get("messages_ready")),
            _number(row.get("messages_unacknowledged")),
            _acked_total(row),
        )
        for row in rows
        if (vhosts is None or row["vhost"] in vhosts) and (consumers := _number(row.get("consumers"))) is not None
    }


def _acked_total(row: JSONObject) -> int | None:
    stats = row.get("message_stats")
    if not isinstance(stats, dict) or not stats:
        return None
    return sum(_number(stats.get(name)) or 0 for name in ACK_COUNTERS)


def _number(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _stored_states() -> list[ConsumerState]:
    """Return what is stored of all queues but those whose messages are being moved: the consumer there is Guardian."""
    moving = Move.objects.filter(state=Move.State.RUNNING).values("queue")
    rows = (
        Queue.objects.exclude(state=Queue.State.GONE)
        .exclude(pk__in=moving)
        .order_by()
        .values_list(*ConsumerState._fields)
    )
    return [ConsumerState._make(row) for row in rows]


class _Gathered(NamedTuple):
    queues: Sequence[Queue]
    facts: Facts


def _gather_facts(management: Management, ids: set[int], now: datetime) -> _Gathered:
    """Return these queues and their facts."""
    if not ids:
        return _Gathered([], Facts({}, {}, now))
    these = bulk.among(Queue, ("id",), [(id_,) for id_ in ids])
    queues = list(Queue.objects.filter(these).select_related("pulse_user").order_by("id"))
    stored = [_as_stored(queue) for queue in queues]
    return _Gathered(queues, Facts.gather(management, broker.amqp_url(), stored, now))


def _as_stored(queue: Queue) -> StoredQueue:
    return StoredQueue._make(getattr(queue, name) for name in StoredQueue._fields)


def _notice(
    queue: Queue, before: ConsumerState, after: ConsumerState, gathered: _Gathered, now: datetime
) -> Notice | None:
    """Return the notice about this queue's consumers; None: a passive declare does not confirm the count."""
    facts = gathered.facts.of(_as_stored(queue), thresholds.of_queue(queue))
    exact: int | None = facts["consumers"]
    if after.consumers:
        if exact == 0:
            return None
        since = before.unattended_since  # None: the queue was gone in between
        kind, consumers = kinds.CONSUMERS_BACK, exact or after.consumers
    else:
        if exact != 0:  # None: the queue is gone, or does not respond
            return None
        since = after.unattended_since
        kind, consumers = kinds.NO_CONSUMERS, 0
    seconds = max(0.0, (now - since).total_seconds()) if since else None
    facts |= {"consumers": consumers, "seconds": seconds}
    return Notice(kind, facts, subject_key(queue.id), queue.pulse_user_id, queue.owner_id)


def _stall_notice(
    queue: Queue, before: ConsumerState, after: ConsumerState, count: QueueCounts, gathered: _Gathered, now: datetime
) -> Notice | None:
    """Return the notice about the start or end of a stall; None: a passive declare does not confirm the stall."""
    facts = gathered.facts.of(_as_stored(queue), thresholds.of_queue(queue))
    if after.stalled_notified_at:
        if not facts["consumers"]:  # no consumer is left, or the queue does not respond
            return None
        kind, since = kinds.STALLED, after.stalled_since
    else:
        kind, since = kinds.STALL_OVER, before.stalled_since  # None: the consumers had disconnected
    facts |= {
        "length": length_of(count.ready, count.unacknowledged),
        "ready": count.ready,
        "unacknowledged": count.unacknowledged,
        "seconds": max(0.0, (now - since).total_seconds()) if since else None,
    }
    return Notice(kind, facts, subject_key(queue.id), queue.pulse_user_id, queue.owner_id)
