"""Queues without a consumer: counted every minute, and told about where GUARDIAN_NO_CONSUMER_MINUTES says so.

Told is once that a queue has had none for so long, and once that it has one again.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from queues import bulk, outbox, thresholds
from queues.comparison import Known, QueueName
from queues.facts import Facts
from queues.lease import HeldLease, LeaseLost, LeaseTaken, lease
from queues.models import Notification, Queue, Watch
from queues.monitor import guarded_vhosts
from queues.outbox import Telling
from rabbit import connections
from rabbit.management import BrokerError, Management
from rabbit.names import DEAD_LETTER_QUEUE

logger = logging.getLogger(__name__)

LEASE = "consumers"
EVERY = timedelta(minutes=1)
WRITTEN = ("consumers", "unattended_since", "unattended_told_at")
GONE_AND_COUNTED = Q(state=Queue.State.GONE, consumers__isnull=False)


class Attendance(NamedTuple):
    """What is known of a queue's consumers. The fields are those of ``queues.models.Queue``."""

    id: int
    vhost: str
    name: str
    exclusive: bool
    registered: bool
    consumers: int | None
    unattended_since: datetime | None
    unattended_told_at: datetime | None

    def at(self, consumers: int, now: datetime, minutes: int) -> "Attendance":
        """Return what is known now that it has so many. ``minutes`` without one are told about; 0: never.

        Nobody has to read dead letters, so that is not told of them.
        """
        if consumers:
            return self._replace(consumers=consumers, unattended_since=None, unattended_told_at=None)
        since = min(self.unattended_since or now, now)  # later than now: the clock was set back
        is_meant = self.exclusive or (self.registered and self.name == DEAD_LETTER_QUEUE)
        is_news = minutes > 0 and not is_meant and now - since >= timedelta(minutes=minutes)
        told_at = self.unattended_told_at or (now if is_news else None)
        return self._replace(consumers=0, unattended_since=since, unattended_told_at=told_at)


def count_consumers() -> int:
    """Count the consumers of the guarded queues, write down what changed, and return the number of notifications.

    One request, whatever the number of queues. A queue that the answer lacks, or tells no number of, keeps what was
    known of it. Where the broker is away, or another process is counting, nothing changes.
    """
    try:
        with lease(LEASE) as held:
            told = _count(held)
    except (LeaseTaken, LeaseLost):
        return 0
    if told:
        outbox.nudge()
    return told


def _count(held: HeldLease) -> int:
    now = timezone.now()
    watch, _ = Watch.objects.get_or_create(id=1)
    try:
        management = connections.management()
        counted = _ask(management)
    except BrokerError as error:
        # The monitor tells people of an outage; one line at its beginning is enough here.
        is_first = watch.consumers_counted_at is None or now - watch.consumers_counted_at < 2 * EVERY
        logger.log(logging.WARNING if is_first else logging.DEBUG, "Consumers can't be counted: %s", error)
        return 0
    before = {attendance.id: attendance for attendance in _known()}
    after = {
        id_: attendance.at(consumers, now, settings.GUARDIAN_NO_CONSUMER_MINUTES)
        for id_, attendance in before.items()
        if (consumers := counted.get((attendance.vhost, attendance.name))) is not None
    }
    news = {id_ for id_, one in after.items() if bool(one.unattended_told_at) != bool(before[id_].unattended_told_at)}
    told = _gather_facts(management, news, now)
    held.keep()
    tellings = []
    for queue in told.queues:
        telling = _telling(queue, before[queue.id], after[queue.id], told, now)
        if telling is not None:
            tellings.append(telling)
    with transaction.atomic():
        held.renew()
        there = _still_there([id_ for id_, one in after.items() if one != before[id_]])
        tellings = [telling for telling in tellings if telling.queue_id in there]
        for id_ in news - {telling.queue_id for telling in tellings}:
            after[id_] = before[id_]  # the next count decides anew
        changed = [one for id_, one in after.items() if one != before[id_]]
        bulk.update(Queue, WRITTEN, [(one.id, *(getattr(one, name) for name in WRITTEN)) for one in changed])
        # Not when it was told: who was told is told of a consumer, too, when the queue comes back with one.
        Queue.objects.filter(GONE_AND_COUNTED).update(consumers=None, unattended_since=None)
        Watch.objects.filter(id=watch.id).update(consumers_counted_at=now)
        return outbox.tell(tellings, now)


def _still_there(ids: Sequence[int]) -> set[int]:
    """Return which of these queues are neither gone nor about to be, and lock all that is to be written.

    By id, as a pass does: in another order the two would wait for each other.
    """
    theirs = Q(bulk.among(Queue, ("id",), [(id_,) for id_ in ids])) if ids else Q(pk__in=[])
    rows = Queue.objects.select_for_update().filter(theirs | GONE_AND_COUNTED).order_by("id")
    leaving = (Queue.State.GONE, Queue.State.DELETING)
    return {id_ for id_, state in rows.values_list("id", "state") if state not in leaving}


def _ask(management: Management) -> Mapping[QueueName, int]:
    """Return the number of consumers of each guarded queue that the broker tells one of.

    Raises:
        BrokerError: it can't be asked.
    """
    vhosts = guarded_vhosts()
    rows = management.list_queues(None, {"columns": "name,vhost,consumers"})
    return {
        (row["vhost"], row["name"]): consumers
        for row in rows
        if (vhosts is None or row["vhost"] in vhosts)
        and isinstance(consumers := row.get("consumers"), int)
        and not isinstance(consumers, bool)
        and consumers >= 0
    }


def _known() -> list[Attendance]:
    rows = Queue.objects.exclude(state=Queue.State.GONE).order_by().values_list(*Attendance._fields)
    return [Attendance._make(row) for row in rows]


class _News(NamedTuple):
    queues: Sequence[Queue]
    facts: Facts


def _gather_facts(management: Management, ids: set[int], now: datetime) -> _News:
    """Return these queues, and what is to be told of them."""
    if not ids:
        return _News([], Facts({}, {}, now))
    these = bulk.among(Queue, ("id",), [(id_,) for id_ in ids])
    queues = list(Queue.objects.filter(these).select_related("pulse_user").order_by("id"))
    known = [_as_known(queue) for queue in queues]
    return _News(queues, Facts.gather(management, connections.amqp_url(), known, now))


def _as_known(queue: Queue) -> Known:
    return Known._make(getattr(queue, name) for name in Known._fields)


def _telling(queue: Queue, before: Attendance, after: Attendance, news: _News, now: datetime) -> Telling | None:
    """Return what is to be told of this queue; None where a second look, at the queue itself, doesn't bear it out."""
    told = news.facts.of(_as_known(queue), thresholds.of_queue(queue))
    exact: int | None = told["consumers"]
    if after.consumers:
        if exact == 0:
            return None
        since = before.unattended_since  # unknown where the queue was gone in between
        kind, seen = Notification.Kind.CONSUMERS_BACK, exact or after.consumers
    else:
        if exact != 0:  # None: it isn't there any more, or doesn't answer
            return None
        since = after.unattended_since
        kind, seen = Notification.Kind.NO_CONSUMERS, 0
    seconds = max(0.0, (now - since).total_seconds()) if since else None
    facts = {**told, "consumers": seen, "seconds": seconds}
    return Telling(kind, facts, queue.id, queue.pulse_user_id, queue.owner_id)
