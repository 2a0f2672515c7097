"""The conditions of several queues, with what they depend on: their trends, and how those that are gone ended."""

from collections.abc import Collection
from datetime import datetime

from django.db.models import OuterRef, QuerySet, Subquery

from queues.models import Queue, QueueEvent
from queues.rules import states, thresholds
from queues.rules.listing import that_may_fill
from queues.rules.states import Condition
from queues.rules.trends import trends

ENDINGS = (QueueEvent.Kind.DELETED, QueueEvent.Kind.REMOVED, QueueEvent.Kind.GONE)
"""The kinds of event after which a queue is gone."""

FILLING_COMPARED = 50


def conditions(queues: Collection[Queue], now: datetime | None) -> dict[int, Condition]:
    """Return the conditions of these queues by primary key. Without ``now``, nothing is predicted."""
    trend_of = trends(queues, now) if now else {}
    deleted = deleted_by_guardian(queues)
    found = {}
    for queue in queues:
        trend = trend_of.get(queue.pk)
        seconds = trend.growth.seconds_to_max if trend and trend.growth else None
        limits = thresholds.of_queue(queue)
        found[queue.pk] = states.condition(queue, limits, seconds, was_deleted=queue.pk in deleted)
    return found


def soonest_to_fill(queues: QuerySet[Queue], now: datetime | None) -> list[int]:
    """Return the primary keys of the queues that are critical because they will soon be full, the soonest first.

    They are found among the fastest growing ones. Without ``now``, nothing is predicted.
    """
    if now is None:
        return []
    growing = list(that_may_fill(queues.select_related("pulse_user"), now)[:FILLING_COMPARED])
    left = {}
    for pk, trend in trends([queue for queue in growing if not thresholds.is_spared(queue)], now).items():
        if trend.growth is not None and trend.growth.seconds_to_max is not None:
            left[pk] = trend.growth.seconds_to_max
    return [pk for pk in sorted(left, key=left.__getitem__) if left[pk] < states.CRITICAL_SECONDS]


def deleted_by_guardian(queues: Collection[Queue]) -> set[int]:
    """Return the primary keys of those of these queues that are gone because Guardian deleted them."""
    pks = [queue.pk for queue in queues if queue.state == Queue.State.GONE]
    if not pks:
        return set()
    last = QueueEvent.objects.filter(queue=OuterRef("pk"), kind__in=ENDINGS).order_by("-at").values("kind")[:1]
    ended = Queue.objects.filter(pk__in=pks).order_by().annotate(ended=Subquery(last))
    return set(ended.filter(ended=QueueEvent.Kind.DELETED).values_list("pk", flat=True))
