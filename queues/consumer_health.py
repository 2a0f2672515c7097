"""Queues without a consumer, or whose consumers have stalled: looked at every minute.

They are told about where GUARDIAN_NO_CONSUMER_MINUTES and GUARDIAN_STALLED_MINUTES say so: once that a queue has had no
consumer for so long, or that nothing was taken out of it with messages in it and consumers there; and once that it is
over.
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
from queues import kinds, thresholds
from queues.comparison import StoredQueue
from queues.facts import Facts
from queues.listing import should_have_consumer
from queues.models import Queue, Watch
from queues.pass_run import guarded_vhosts
from queues.subject import about
from rabbit.management import BrokerError, Management, Row
from rabbit.names import QueueName
from rabbit.snapshot import length_of

logger = logging.getLogger(__name__)

LEASE = "consumers"
COUNT_INTERVAL = timedelta(minutes=1)
CONSUMER_FIELDS = ("consumers", "unattended_since", "unattended_told_at")
STALL_FIELDS = ("taken_out", "stalled_since", "stalled_told_at")
WRITTEN_FIELDS = (*CONSUMER_FIELDS, *STALL_FIELDS)
"""What is written of a queue: of its consumers, and of whether they take anything out."""

GONE_WITH_COUNTS = Q(state=Queue.State.GONE) & (Q(consumers__isnull=False) | Q(stalled_since__isnull=False))
COLUMNS = "name,vhost,consumers"
ACK_COUNTERS = ("ack", "deliver_no_ack", "get_no_ack")
"""The broker's counts of messages that were acknowledged, or needed no acknowledgement. It counts no rejected ones."""
STALL_COLUMNS = ",".join(
    ["messages_ready", "messages_unacknowledged", *(f"message_stats.{one}" for one in ACK_COUNTERS)]
)


class Count(NamedTuple):
    """What the broker said of a queue; None: it didn't, or wasn't asked. ``taken_out`` counts messages ever since."""

    consumers: int
    ready: int | None = None
    unacknowledged: int | None = None
    taken_out: int | None = None


class ConsumerState(NamedTuple):
    """What is known of a queue's consumers. The fields are those of ``queues.models.Queue``."""

    id: int
    vhost: str
    name: str
    type: str
    exclusive: bool
    registered: bool
    consumers: int | None
    unattended_since: datetime | None
    unattended_told_at: datetime | None
    taken_out: int | None
    stalled_since: datetime | None
    stalled_told_at: datetime | None

    def with_consumers(self, consumers: int, now: datetime, minutes: int) -> "ConsumerState":
        """Return what is known now that it has so many. ``minutes`` without one are told about; 0: never.

        That is told of those alone that should have one.
        """
        if consumers:
            return self._replace(consumers=consumers, unattended_since=None, unattended_told_at=None)
        since = self.unattended_since or now
        is_missed = should_have_consumer(self.name, exclusive=self.exclusive, registered=self.registered)
        is_news = minutes > 0 and is_missed and now - since >= timedelta(minutes=minutes)
        told_at = self.unattended_told_at or (now if is_news else None)
        return self._replace(consumers=0, unattended_since=since, unattended_told_at=told_at)

    def with_progress(self, count: Count, now: datetime, minutes: int) -> "ConsumerState":
        """Return what is known now of whether its consumers work. ``minutes`` of a stall are told about; 0: never.

        A stall counts from the first look at which nothing had been taken out since the one before, with messages in
        the queue: consumers may stand still with all of them in hand. It is over when something is taken out, or when
        nothing is in it. Consumers that go leave it told: those that come back may stand still too. A count that fell,
        as the broker was restarted, ends no stall that was told, and begins the time of another anew. Nothing is taken
        out of a stream.
        """
        if not minutes or self.type == "stream":
            return self._replace(taken_out=None, stalled_since=None, stalled_told_at=None)
        if count.ready is None or count.unacknowledged is None:
            return self
        if not count.ready + count.unacknowledged:
            return self._replace(taken_out=None, stalled_since=None, stalled_told_at=None)
        if count.taken_out is None:  # the broker counts nothing (``rates_mode = none``), or has seen nothing yet
            return self
        since = now if count.consumers else None
        if self.taken_out is None:
            return self._replace(taken_out=count.taken_out, stalled_since=since)
        if self.taken_out > count.taken_out and self.stalled_told_at:
            return self._replace(taken_out=count.taken_out, stalled_since=since and (self.stalled_since or now))
        if self.taken_out != count.taken_out:
            return self._replace(taken_out=count.taken_out, stalled_since=since, stalled_told_at=None)
        if since is None:
            return self._replace(stalled_since=None)
        since = self.stalled_since or now
        told_at = self.stalled_told_at or (now if now - since >= timedelta(minutes=minutes) else None)
        return self._replace(stalled_since=since, stalled_told_at=told_at)


def count_consumers() -> int:
    """Count the consumers of the guarded queues, write down what changed, and return the number of notifications.

    One request, whatever the number of queues. A queue that the answer lacks, or tells no number of, keeps what was
    known of it. Where the broker is away, or another process is counting, nothing changes.
    """
    try:
        with leases.lease(LEASE) as lease:
            told = _count(lease)
    except (LeaseTaken, LeaseLost):
        return 0
    if told:
        enqueue.nudge(told)
    return told


def _count(lease: HeldLease) -> int:
    now = timezone.now()
    watch, _ = Watch.objects.get_or_create(id=1)
    try:
        management = broker.management()
        counted = _fetch_counts(management)
    except BrokerError as error:
        # The monitor tells people of an outage; one line at its beginning is enough here.
        is_first = watch.consumers_counted_at is None or now - watch.consumers_counted_at < 2 * COUNT_INTERVAL
        logger.log(logging.WARNING if is_first else logging.DEBUG, "Consumers can't be counted: %s", error)
        return 0
    before = {attendance.id: attendance for attendance in _stored_states()}
    after = {
        id_: attendance.with_consumers(count.consumers, now, settings.GUARDIAN_NO_CONSUMER_MINUTES).with_progress(
            count, now, settings.GUARDIAN_STALLED_MINUTES
        )
        for id_, attendance in before.items()
        if (count := counted.get((attendance.vhost, attendance.name))) is not None
    }
    lonely = {id_ for id_, one in after.items() if bool(one.unattended_told_at) != bool(before[id_].unattended_told_at)}
    stalls = {id_ for id_, one in after.items() if bool(one.stalled_told_at) != bool(before[id_].stalled_told_at)}
    if not settings.GUARDIAN_STALLED_MINUTES:
        stalls = set()  # nobody looks any more: that is no news of the queues
    told = _gather_facts(management, lonely | stalls, now)
    lease.renew_if_due()
    notices: dict[tuple[int, bool], Notice] = {}
    for queue in told.queues:
        notice = _notice(queue, before[queue.id], after[queue.id], told, now) if queue.id in lonely else None
        if notice is not None:
            notices[queue.id, False] = notice
        count = counted[queue.vhost, queue.name]
        notice = (
            _stall_notice(queue, before[queue.id], after[queue.id], count, told, now) if queue.id in stalls else None
        )
        if notice is not None:
            notices[queue.id, True] = notice
    with transaction.atomic():
        lease.renew()
        there = _lock_remaining([id_ for id_, one in after.items() if one != before[id_]])
        notices = {which: notice for which, notice in notices.items() if which[0] in there}
        for news, is_stall, names in ((lonely, False, CONSUMER_FIELDS), (stalls, True, STALL_FIELDS)):
            for id_ in news:
                if (id_, is_stall) not in notices:  # the next count decides anew
                    after[id_] = after[id_]._replace(**{name: getattr(before[id_], name) for name in names})
        changed = [one for id_, one in after.items() if one != before[id_]]
        bulk.update(
            Queue, WRITTEN_FIELDS, [(one.id, *(getattr(one, name) for name in WRITTEN_FIELDS)) for one in changed]
        )
        # Not when it was told: who was told is told of a consumer, too, when the queue comes back with one.
        Queue.objects.filter(GONE_WITH_COUNTS).update(
            consumers=None, unattended_since=None, taken_out=None, stalled_since=None
        )
        Watch.objects.filter(id=watch.id).update(consumers_counted_at=now)
        return enqueue.enqueue(list(notices.values()), now)


def _lock_remaining(ids: Sequence[int]) -> set[int]:
    """Return which of these queues are neither gone nor about to be, and lock all that is to be written.

    By id, as a pass does: in another order the two would wait for each other.
    """
    theirs = Q(bulk.among(Queue, ("id",), [(id_,) for id_ in ids])) if ids else Q(pk__in=[])
    rows = Queue.objects.select_for_update().filter(theirs | GONE_WITH_COUNTS).order_by("id")
    leaving = (Queue.State.GONE, Queue.State.DELETING)
    return {id_ for id_, state in rows.values_list("id", "state") if state not in leaving}


def _fetch_counts(management: Management) -> Mapping[QueueName, Count]:
    """Return what the broker says of each guarded queue that it tells a number of consumers of.

    Raises:
        BrokerError: it can't be asked.
    """
    vhosts = guarded_vhosts()
    columns = f"{COLUMNS},{STALL_COLUMNS}" if settings.GUARDIAN_STALLED_MINUTES else COLUMNS
    rows = management.list_queues(None, {"columns": columns})
    return {
        (row["vhost"], row["name"]): Count(
            consumers,
            _number(row.get("messages_ready")),
            _number(row.get("messages_unacknowledged")),
            _acked_total(row),
        )
        for row in rows
        if (vhosts is None or row["vhost"] in vhosts) and (consumers := _number(row.get("consumers"))) is not None
    }


def _acked_total(row: Row) -> int | None:
    stats = row.get("message_stats")
    if not isinstance(stats, dict) or not stats:
        return None
    return sum(_number(stats.get(name)) or 0 for name in ACK_COUNTERS)


def _number(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _stored_states() -> list[ConsumerState]:
    rows = Queue.objects.exclude(state=Queue.State.GONE).order_by().values_list(*ConsumerState._fields)
    return [ConsumerState._make(row) for row in rows]


class _Gathered(NamedTuple):
    queues: Sequence[Queue]
    facts: Facts


def _gather_facts(management: Management, ids: set[int], now: datetime) -> _Gathered:
    """Return these queues, and what is to be told of them."""
    if not ids:
        return _Gathered([], Facts({}, {}, now))
    these = bulk.among(Queue, ("id",), [(id_,) for id_ in ids])
    queues = list(Queue.objects.filter(these).select_related("pulse_user").order_by("id"))
    known = [_as_stored(queue) for queue in queues]
    return _Gathered(queues, Facts.gather(management, broker.amqp_url(), known, now))


def _as_stored(queue: Queue) -> StoredQueue:
    return StoredQueue._make(getattr(queue, name) for name in StoredQueue._fields)


def _notice(queue: Queue, before: ConsumerState, after: ConsumerState, news: _Gathered, now: datetime) -> Notice | None:
    """Return what is to be told of this queue; None where a second look, at the queue itself, doesn't bear it out."""
    told = news.facts.of(_as_stored(queue), thresholds.of_queue(queue))
    exact: int | None = told["consumers"]
    if after.consumers:
        if exact == 0:
            return None
        since = before.unattended_since  # unknown where the queue was gone in between
        kind, seen = kinds.CONSUMERS_BACK, exact or after.consumers
    else:
        if exact != 0:  # None: it isn't there any more, or doesn't answer
            return None
        since = after.unattended_since
        kind, seen = kinds.NO_CONSUMERS, 0
    seconds = max(0.0, (now - since).total_seconds()) if since else None
    facts = {**told, "consumers": seen, "seconds": seconds}
    return Notice(kind, facts, about(queue.id), queue.pulse_user_id, queue.owner_id)


def _stall_notice(
    queue: Queue, before: ConsumerState, after: ConsumerState, count: Count, news: _Gathered, now: datetime
) -> Notice | None:
    """Return what is to be told of this queue's stall, or of its end; None where a second look doesn't bear it out."""
    told = news.facts.of(_as_stored(queue), thresholds.of_queue(queue))
    if after.stalled_told_at:
        if not told["consumers"]:  # none is there any more, which is another matter; or it doesn't answer
            return None
        kind, since = kinds.STALLED, after.stalled_since
    else:
        kind, since = kinds.STALL_OVER, before.stalled_since  # unknown where its consumers were gone
    facts = {
        **told,
        "length": length_of(count.ready, count.unacknowledged),
        "ready": count.ready,
        "unacknowledged": count.unacknowledged,
        "seconds": max(0.0, (now - since).total_seconds()) if since else None,
    }
    return Notice(kind, facts, about(queue.id), queue.pulse_user_id, queue.owner_id)
