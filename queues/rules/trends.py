"""The recent lengths of several queues: a sparkline and the growth of each."""

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from django.db.models import OuterRef, Subquery

from queues.models import Queue, QueueSample
from queues.rules import charts, growth, thresholds

SPAN = charts.SPANS["hour"]


class Trend(NamedTuple):
    """``line`` is an SVG path over the last hour. It is empty, and ``growth`` None, if no length is known."""

    line: str
    growth: growth.Growth | None


def trends(queues: Collection[Queue], now: datetime) -> dict[int, Trend]:
    """Return the trend of each of these queues by its primary key, with two statements."""
    began = now - SPAN.duration
    pks = [queue.pk for queue in queues]
    before = QueueSample.objects.filter(queue=OuterRef("pk"), at__lte=began).order_by("-at").values("length")[:1]
    earlier = Queue.objects.filter(pk__in=pks).order_by().annotate(before=Subquery(before)).values_list("pk", "before")
    samples: dict[int, list[charts.Sample]] = defaultdict(list)
    for pk, length in earlier:
        if length is not None:
            samples[pk].append((began, length))
    recent = QueueSample.objects.filter(queue__in=pks, at__gt=began).order_by("at")
    for pk, at, length in recent.values_list("queue_id", "at", "length"):
        samples[pk].append((at, length))
    return {queue.pk: _trend(queue, samples[queue.pk], began, now) for queue in queues}


def _trend(queue: Queue, samples: list[charts.Sample], began: datetime, now: datetime) -> Trend:
    if queue.length is None or queue.state == Queue.State.GONE:
        return Trend(charts.sparkline(samples, began, now), None)
    grows = growth.recent_growth(samples, queue.length, now, queue.first_seen, thresholds.of_queue(queue).max)
    # A length that has not changed for longer than samples are kept has none.
    return Trend(charts.sparkline(samples or [(max(began, queue.first_seen), queue.length)], began, now), grows)
