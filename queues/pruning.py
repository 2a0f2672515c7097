"""Removing what is old: samples, reports, delivered notifications, events, the audit trail, rows of what is long gone.

In small batches, each a transaction of its own, so that no pass waits for it.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.db.models import Max, Min, Model, QuerySet
from django.db.models.functions import TruncHour, TruncMinute
from django.utils import timezone

from accounts.models import AuditEntry
from core import locks
from core.leases import LeaseTaken, lease
from core.models import Lease
from notifications.models import Notification
from queues.models import Pass, Queue, QueueEvent, QueueSample, Watch
from queues.thresholds import GONE

BATCH = 1000

KEEP_SAMPLES = timedelta(days=8)
KEEP_SAMPLES_WHOLE = timedelta(hours=2)
KEEP_SAMPLES_BY_MINUTE = timedelta(days=2)
KEEP_PASSES = timedelta(days=7)
KEEP_NOTIFICATIONS = timedelta(days=90)
KEEP_LOCKS = timedelta(hours=1)  # since they expired: a crash left them
KEEP_EVENTS = timedelta(days=365)
KEEP_AUDIT = timedelta(days=365)

also_pruned: list[Callable[[datetime], QuerySet[Any]]] = []
"""Functions of other packages that return, by the time of now, rows of theirs that are old."""


def prune() -> int:
    """Remove what is old and return the number of rows that went: none where another process is at it.

    Samples are kept whole for two hours, then the last of each minute for two days, then the last of each hour.
    """
    try:
        with lease("prune"):
            return _prune(timezone.now())
    except LeaseTaken:
        return 0


def _prune(now: datetime) -> int:
    delivered = [Notification.State.SENT, Notification.State.FAILED]
    return (
        _remove(QueueSample.objects.filter(at__lt=now - KEEP_SAMPLES))
        + _thin(now)
        + _remove(Pass.objects.filter(at__lt=now - KEEP_PASSES))
        + _remove(Notification.objects.filter(state__in=delivered, created__lt=now - KEEP_NOTIFICATIONS))
        + _remove(Lease.objects.filter(name__startswith=locks.PREFIX, expires_at__lt=now - KEEP_LOCKS))
        + sum(_remove(old(now)) for old in also_pruned)
        + _remove(QueueEvent.objects.filter(at__lt=now - KEEP_EVENTS))
        + _remove(AuditEntry.objects.filter(timestamp__lt=now - KEEP_AUDIT))
        + _remove(LogEntry.objects.filter(action_time__lt=now - KEEP_AUDIT))
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
    """Keep the last sample of each queue and minute, or hour, of what is old enough and was not thinned yet."""
    watch, _ = Watch.objects.get_or_create(id=1)
    whole_until = (now - KEEP_SAMPLES_WHOLE).replace(second=0, microsecond=0)
    by_minute_until = (now - KEEP_SAMPLES_BY_MINUTE).replace(minute=0, second=0, microsecond=0)
    return _thin_up_to(whole_until, watch, "thinned_by_minute", TruncMinute("at")) + _thin_up_to(
        by_minute_until, watch, "thinned_by_hour", TruncHour("at")
    )


def _thin_up_to(until: datetime, watch: Watch, done: str, moment: TruncMinute | TruncHour) -> int:
    """Thin hour by hour from where it ended last time, which ``done`` names on the watch."""
    removed = 0
    since = getattr(watch, done) or QueueSample.objects.aggregate(first=Min("at"))["first"]
    while since is not None and since < until:
        next_hour = since.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        end = min(next_hour, until)
        stretch = QueueSample.objects.filter(at__gte=since, at__lt=end)
        last = stretch.annotate(moment=moment).values("queue", "moment").annotate(last=Max("id")).values("last")
        # Asked for once: the question is dear, and its answer shrinks with none of the batches.
        removed += _remove_these(QueueSample, list(stretch.exclude(id__in=last).values_list("id", flat=True)))
        since = end
        Watch.objects.filter(id=watch.id).update(**{done: since})
    return removed


def _remove(rows: QuerySet[Model]) -> int:
    removed = 0
    while ids := list(rows.order_by("pk").values_list("pk", flat=True)[:BATCH]):
        removed += rows.filter(pk__in=ids).delete()[0]
    return removed


def _remove_these(model: type[Model], ids: list[int]) -> int:
    for start in range(0, len(ids), BATCH):
        model._default_manager.filter(pk__in=ids[start : start + BATCH]).delete()
    return len(ids)
