"""Removing what is old: samples, reports, delivered notifications, events and the rows of queues long gone.

In small batches, each a transaction of its own, so that no pass waits for it.
"""

from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Max, Min, Model, QuerySet
from django.db.models.functions import TruncHour, TruncMinute
from django.utils import timezone

from queues.models import Notification, Pass, Queue, QueueEvent, QueueSample
from queues.thresholds import GONE

BATCH = 1000

KEEP_SAMPLES = timedelta(days=8)
KEEP_SAMPLES_WHOLE = timedelta(hours=2)
KEEP_SAMPLES_BY_MINUTE = timedelta(days=2)
KEEP_PASSES = timedelta(days=7)
KEEP_NOTIFICATIONS = timedelta(days=90)
KEEP_EVENTS = timedelta(days=365)


def prune() -> int:
    """Remove what is old and return the number of rows that went.

    Samples are kept whole for two hours, then the last of each minute for two days, then the last of each hour.
    """
    now = timezone.now()
    delivered = [Notification.State.SENT, Notification.State.FAILED]
    return (
        _remove(QueueSample.objects.filter(at__lt=now - KEEP_SAMPLES))
        + _thin(now)
        + _remove(Pass.objects.filter(at__lt=now - KEEP_PASSES))
        + _remove(Notification.objects.filter(state__in=delivered, created__lt=now - KEEP_NOTIFICATIONS))
        + _remove(QueueEvent.objects.filter(at__lt=now - KEEP_EVENTS))
        + _remove(
            Queue.objects.filter(
                state=GONE,
                last_seen__lt=now - timedelta(days=settings.GUARDIAN_FORGET_DAYS),
                unbounded=False,
                warn_length=None,
                max_length=None,
            )
        )
    )


def _thin(now: datetime) -> int:
    """Keep the last sample of each queue and minute, or hour, of what is old enough."""
    return _thin_between(now - KEEP_SAMPLES_BY_MINUTE, now - KEEP_SAMPLES_WHOLE, TruncMinute("at")) + _thin_between(
        now - KEEP_SAMPLES, now - KEEP_SAMPLES_BY_MINUTE, TruncHour("at")
    )


def _thin_between(since: datetime, until: datetime, moment: TruncMinute | TruncHour) -> int:
    """Thin the oldest stretch of samples that has something to thin."""
    removed = 0
    rows = QueueSample.objects.filter(at__gte=since, at__lt=until)
    first = rows.aggregate(first=Min("at"))["first"]
    while first is not None and first < until:
        stretch = rows.filter(at__gte=first, at__lt=first + timedelta(hours=1))
        kept = stretch.annotate(moment=moment).values("queue", "moment").annotate(last=Max("id")).values("last")
        removed += _remove(stretch.exclude(id__in=list(kept.values_list("last", flat=True))))
        first = rows.filter(at__gte=first + timedelta(hours=1)).aggregate(first=Min("at"))["first"]
    return removed


def _remove(rows: QuerySet[Model]) -> int:
    removed = 0
    while ids := list(rows.order_by("pk").values_list("pk", flat=True)[:BATCH]):
        removed += rows.model._default_manager.filter(pk__in=ids).delete()[0]
    return removed
