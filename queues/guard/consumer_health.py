"""Consumers: counted every minute. Then each queue is diagnosed (``rules/diagnosis.py``).

Owners are notified once when a queue has had no consumer for GUARDIAN_NO_CONSUMER_MINUTES, and once when its consumers
have acknowledged nothing for GUARDIAN_STALLED_MINUTES although it has messages. Each end is notified once too.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from core import broker, bulk, leases
from core.leases import HeldLease, LeaseLost, LeaseTaken
from notifications import enqueue
from notifications.audience import Ownership
from notifications.enqueue import Notice
from queues.guard import activity
from queues.guard.facts import Facts
from queues.guard.pass_run import guarded_vhosts
from queues.mails import kinds
from queues.mails.subject import subject_key
from queues.models import Move, Queue, Watch
from queues.rules import diagnosis, thresholds
from queues.rules.activity import Activity, stored_activity
from queues.rules.rows import WITHOUT_COUNTS, StoredQueue
from rabbit.errors import BrokerError
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.requests.queues import ACK_COUNTERS
from rabbit.requests.sending import JSONObject
from rabbit.snapshot import length_of

logger = logging.getLogger(__name__)

LEASE = "consumers"
COUNT_INTERVAL = timedelta(minutes=1)
MAX_LOOKED_AT = 50
"""Queues whose figures are fetched in one run."""

CONSUMER_FIELDS = ("consumers", "unattended_since", "unattended_notified_at")
STALL_FIELDS = ("acknowledged_total", "stalled_since", "stalled_notified_at")
WRITTEN_FIELDS = ("bytes", *CONSUMER_FIELDS, *STALL_FIELDS, "diagnosis", "diagnosis_since")
"""The columns that a count writes, besides ``activity``."""

GONE_WITH_COUNTS = Q(state=Queue.State.GONE) & (
    Q(consumers__isnull=False) | Q(stalled_since__isnull=False) | ~Q(diagnosis="")
)
BEING_FETCHED = Q(state=Queue.State.DELETING, block_reason="")
"""Queues about to be deleted. Their unacknowledged messages may be Guardian's."""

COLUMNS = ",".join(
    ["name,vhost,consumers,message_bytes,messages_ready,messages_unacknowledged"]
    + [f"message_stats.{name}" for name in ACK_COUNTERS]
)


class QueueCounts(NamedTuple):
    """The broker's figures of a queue; None: not reported. ``acked_total`` counts from the broker's start."""

    consumers: int
    bytes: int | None = None
    ready: int | None = None
    unacknowledged: int | None = None
    acked_total: int | None = None


class ConsumerState(NamedTuple):
    """The columns of ``queues.models.Queue`` about a queue's consumers and its diagnosis, and what these depend on."""

    id: int
    vhost: str
    name: str
    type: str
    exclusive: bool
    registered: bool
    state: str
    warn_length: int | None
    ready: int | None
    unacknowledged: int | None
    bytes: int | None
    consumers: int | None
    unattended_since: datetime | None
    unattended_notified_at: datetime | None
    acknowledged_total: int | None
    stalled_since: datetime | None
    stalled_notified_at: datetime | None
    diagnosis: str
    diagnosis_since: datetime | None
    activity: dict[str, Any] | None

    @property
    def written(self) -> list[Any]:
        return [getattr(self, name) for name in WRITTEN_FIELDS]

    def with_count(self, count: QueueCounts, now: datetime) -> "ConsumerState":
        """Return the state after a count, with the diagnosis and the notices still to decide."""
        lengths = count.ready, count.unacknowledged
        ready, unacknowledged = (self.ready, self.unacknowledged) if None in lengths else lengths
        return (
            self._with_consumers(count.consumers, now)
            ._with_progress(count, now)
            ._replace(
                ready=ready, unacknowledged=unacknowledged, bytes=self.bytes if count.bytes is None else count.bytes
            )
        )

    def _with_consumers(self, consumers: int, now: datetime) -> "ConsumerState":
        if consumers:
            return self._replace(consumers=consumers, unattended_since=None, unattended_notified_at=None)
        return self._replace(consumers=0, unattended_since=self.unattended_since or now)

    def _with_progress(self, count: QueueCounts, now: datetime) -> "ConsumerState":
        """Return the state after a count of the acknowledged messages.

        A stall begins when nothing was acknowledged between two counts although the queue has messages, ready or
        unacknowledged. It ends when a message is acknowledged or the queue is empty. A stall that was notified
        continues when the consumers disconnect: they may return and still acknowledge nothing. After a restart of the
        broker its counter is lower: a notified stall continues, and any other starts again, as after a count without
        figures. Messages of a stream are never acknowledged away.
        """
        if self.type == "stream":
            return self._replace(acknowledged_total=None, stalled_since=None, stalled_notified_at=None)
        unknown = self if self.stalled_notified_at else self._replace(stalled_since=None)
        if count.ready is None or count.unacknowledged is None:
            return unknown
        if not count.ready + count.unacknowledged:
            return self._replace(acknowledged_total=None, stalled_since=None, stalled_notified_at=None)
        if count.acked_total is None:  # the broker keeps no counters (``rates_mode = none``), or has none yet
            return unknown
        since = now if count.consumers else None
        if self.acknowledged_total is None:
            return self._replace(acknowledged_total=count.acked_total, stalled_since=since)
        if self.acknowledged_total > count.acked_total and self.stalled_notified_at:
            return self._replace(
                acknowledged_total=count.acked_total, stalled_since=since and (self.stalled_since or now)
            )
        if self.acknowledged_total != count.acked_total:
            return self._replace(acknowledged_total=count.acked_total, stalled_since=since, stalled_notified_at=None)
        return self._replace(stalled_since=since and (self.stalled_since or now))

    def with_diagnosis(self, looked_at: Activity | None, now: datetime) -> "ConsumerState":
        """Return the state with the diagnosis that follows. ``looked_at`` are the queue's figures, if fetched now."""
        state = self
        if looked_at is not None:
            state = self._replace(activity=looked_at.after(stored_activity(self.activity)).as_json())
        found = diagnosis.of_row(state, now, now)
        if found is None:
            return state._replace(diagnosis="", diagnosis_since=None)
        return state._replace(diagnosis=found.code, diagnosis_since=found.since or now)

    def with_notices(self, now: datetime, *, unattended_minutes: int, stalled_minutes: int) -> "ConsumerState":
        """Return the state with the times of the notices that are due. With 0 minutes, there are none."""

        def is_due(since: datetime | None, minutes: int) -> bool:
            return bool(minutes) and since is not None and now - since >= timedelta(minutes=minutes)

        unattended_at, stalled_at = self.unattended_notified_at, self.stalled_notified_at
        if self.diagnosis == diagnosis.Code.NO_CONSUMER and is_due(self.unattended_since, unattended_minutes):
            unattended_at = unattended_at or now
        if self.diagnosis in diagnosis.NOTHING_ACKNOWLEDGED and is_due(self.stalled_since, stalled_minutes):
            stalled_at = stalled_at or now
        return self._replace(
            unattended_notified_at=unattended_at, stalled_notified_at=stalled_at if stalled_minutes else None
        )


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
        id_: state.with_count(count, now)
        for id_, state in before.items()
        if (count := counted.get((state.vhost, state.name))) is not None
    }
    looked_at = activity.fetch(management, _to_look_at(after.values()), now)
    lease.renew_if_due()
    for id_, state in after.items():
        after[id_] = state.with_diagnosis(looked_at.get((state.vhost, state.name)), now).with_notices(
            now,
            unattended_minutes=settings.GUARDIAN_NO_CONSUMER_MINUTES,
            stalled_minutes=settings.GUARDIAN_STALLED_MINUTES,
        )
    consumer_changes = _changed(before, after, "unattended_notified_at")
    # If the check was turned off, that says nothing about the queues.
    stall_changes = _changed(before, after, "stalled_notified_at") if settings.GUARDIAN_STALLED_MINUTES else set()
    queues, gathered = _gather_facts(management, consumer_changes | stall_changes, now)
    lease.renew_if_due()
    notices: dict[tuple[int, bool], Notice] = {}
    for queue in queues:
        earlier, state, count = before[queue.id], after[queue.id], counted[queue.vhost, queue.name]
        facts = gathered.of(_as_stored(queue), thresholds.of_queue(queue))
        found = diagnosis.of_row(state, now, now)
        facts["diagnosis"] = found.as_json() if found else None
        subject, ownership = subject_key(queue.id), Ownership(queue.pulse_user_id, queue.owner_id)
        if queue.id in consumer_changes and (content := _about_consumers(earlier, state, facts, now)):
            notices[queue.id, False] = Notice(*content, subject, *ownership)
        if queue.id in stall_changes and (content := _about_stall(earlier, state, count, facts, now)):
            notices[queue.id, True] = Notice(*content, subject, *ownership)
    with transaction.atomic():
        lease.renew()
        remaining = _lock_remaining([id_ for id_, one in after.items() if one.written != before[id_].written])
        notices = {which: notice for which, notice in notices.items() if which[0] in remaining}
        for changes, is_stall, names in (
            (consumer_changes, False, CONSUMER_FIELDS),
            (stall_changes, True, STALL_FIELDS),
        ):
            for id_ in changes:
                if (id_, is_stall) not in notices:  # the next count decides again
                    after[id_] = after[id_]._replace(**{name: getattr(before[id_], name) for name in names})
        changed = [one for id_, one in after.items() if one.written != before[id_].written]
        bulk.update(Queue, WRITTEN_FIELDS, [(one.id, *one.written) for one in changed])
        fresh = [one for one in after.values() if (one.vhost, one.name) in looked_at]
        bulk.update(Queue, ("activity",), [(one.id, one.activity) for one in fresh])
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
    """Return the figures of each guarded queue for which the broker reports a number of consumers."""
    vhosts = guarded_vhosts()
    rows = management.list_queues(None, {"columns": COLUMNS})
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


def _to_look_at(states: Iterable[ConsumerState]) -> list[QueueName]:
    """Return the queues whose figures to fetch: those with a problem or near their threshold or growing first.

    Of these, and of the others, those whose figures are oldest.
    """
    default = thresholds.policy().thresholds.warn

    def place(state: ConsumerState) -> tuple[bool, str]:
        length, last = length_of(state.ready, state.unacknowledged) or 0, state.activity or {}
        is_urgent = (
            state.state != Queue.State.OK
            or state.diagnosis not in diagnosis.NO_PROBLEM
            or 2 * length >= (state.warn_length or default)
            or length > last.get("ready", 0) + last.get("unacknowledged", 0)
        )
        return not is_urgent, last.get("at", "")

    # The figures would not change what is known of a queue that nobody consumes.
    consumed = [state for state in states if state.consumers or state.state != Queue.State.OK]
    return [(state.vhost, state.name) for state in sorted(consumed, key=place)[:MAX_LOOKED_AT]]


def _stored_states() -> list[ConsumerState]:
    """Return what is stored of all queues but those whose messages Guardian fetches or moves: it is their consumer."""
    moving = Move.objects.filter(state=Move.State.RUNNING).values("queue")
    rows = (
        Queue.objects.exclude(state=Queue.State.GONE)
        .exclude(BEING_FETCHED)
        .exclude(pk__in=moving)
        .order_by()
        .values_list(*ConsumerState._fields)
    )
    return [ConsumerState._make(row) for row in rows]


def _gather_facts(management: Management, ids: set[int], now: datetime) -> tuple[Sequence[Queue], Facts]:
    """Return these queues and their facts."""
    if not ids:
        return [], Facts({}, {}, now)
    these = bulk.among(Queue, ("id",), [(id_,) for id_ in ids])
    queues = list(Queue.objects.filter(these).select_related("pulse_user").order_by("id"))
    return queues, Facts.gather(management, broker.amqp_url(), list(map(_as_stored, queues)), now)


def _as_stored(queue: Queue) -> StoredQueue:
    return StoredQueue._make(getattr(queue, name) for name in StoredQueue._fields)


Content = tuple[str, dict[str, Any]]
"""The kind and the facts of a notice."""


def _about_consumers(before: ConsumerState, after: ConsumerState, facts: JSONObject, now: datetime) -> Content | None:
    """Return the notice about a queue's consumers, or None if a passive declare does not confirm the count."""
    exact = facts["consumers"]  # None: the queue is gone, or does not respond
    if after.consumers:
        kind, since, is_confirmed = kinds.CONSUMERS_BACK, before.unattended_since, exact != 0
    else:
        kind, since, is_confirmed = kinds.NO_CONSUMERS, after.unattended_since, exact == 0
    return (kind, facts | {"consumers": exact or after.consumers} | _lasted(since, now)) if is_confirmed else None


def _about_stall(
    before: ConsumerState, after: ConsumerState, count: QueueCounts, facts: JSONObject, now: datetime
) -> Content | None:
    """Return the notice about the start or end of a stall, or None if a passive declare does not confirm the stall."""
    if after.stalled_notified_at and not facts["consumers"]:  # no consumer is left, or the queue does not respond
        return None
    kind, since = kinds.STALLED, after.stalled_since
    if not after.stalled_notified_at:
        kind, since = kinds.STALL_OVER, before.stalled_since
    figures = {
        "length": length_of(count.ready, count.unacknowledged),
        "ready": count.ready,
        "unacknowledged": count.unacknowledged,
    }
    return kind, facts | figures | _lasted(since, now)


def _lasted(since: datetime | None, now: datetime) -> JSONObject:
    """Return for how long it lasted: unknown if the queue was gone, or its consumers disconnected, in between."""
    return {"seconds": max(0.0, (now - since).total_seconds()) if since else None}
