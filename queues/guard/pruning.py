"""Delete old rows: samples, reports, delivered notifications, events, the audit trail, queues that are long gone.

Each small batch is a transaction of its own, so that no pass waits for it.
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
from notifications.models import Notification, SubjectMute
from queues.archives import writing
from queues.models import Move, Pass, Queue, QueueEvent, QueueSample, Watch
from queues.rules.thresholds import GONE

BATCH = 1000

KEEP_SAMPLES = timedelta(days=8)
KEEP_ALL_SAMPLES = timedelta(hours=2)
KEEP_SAMPLES_BY_MINUTE = timedelta(days=2)
KEEP_PASSES = timedelta(days=7)
KEEP_NOTIFICATIONS = timedelta(days=90)
KEEP_LOCKS = timedelta(hours=1)  # after their expiry: a crash leaves locks behind
KEEP_MOVES = timedelta(days=90)
KEEP_EVENTS = timedelta(days=365)
KEEP_AUDIT = timedelta(days=365)

also_pruned: list[Callable[[datetime], QuerySet[Any]]] = []
"""Functions of other packages that take the current time and return their old rows."""


def prune() -> int:
    """Delete old rows, and return their number: 0 if another process is pruning.

    All samples are kept for two hours, then the last of each minute for two days, then the last of each hour.
    """
    try:
        with lease("prune"):
            return _prune(timezone.now())
    except LeaseTaken:
        return 0


def _prune(now: datetime) -> int:
    delivered = [Notification.State.SENT, Notification.State.FAILED]
    return (
        writing.enforce_bounds()
        + _delete(QueueSample.objects.filter(at__lt=now - KEEP_SAMPLES))
        + _thin(now)
        + _delete(Pass.objects.filter(at__lt=now - KEEP_PASSES))
        + _delete(Notification.objects.filter(state__in=delivered, created__lt=now - KEEP_NOTIFICATIONS))
        + _delete(SubjectMute.objects.filter(until__lt=now))
        + _delete(Lease.objects.filter(name__startswith=locks.PREFIX, expires_at__lt=now - KEEP_LOCKS))
        + sum(_delete(old(now)) for old in also_pruned)
        + _delete(QueueEvent.objects.filter(at__lt=now - KEEP_EVENTS))
        + _delete(Move.objects.filter(finished__lt=now - KEEP_MOVES))
        + _delete(AuditEntry.objects.filter(timestamp__lt=now - KEEP_AUDIT))
        + _delete(LogEntry.objects.filter(action_time__lt=now - KEEP_AUDIT))
        + _delete(
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
    """Keep only the last sample of each queue and minute, or hour, where samples are old enough."""
    watch, _ = Watch.objects.get_or_create(id=1)
    all_until = (now - KEEP_ALL_SAMPLES).replace(second=0, microsecond=0)
    by_minute_until = (now - KEEP_SAMPLES_BY_MINUTE).replace(minute=0, second=0, microsecond=0)
    return _thin_up_to(all_until, watch, "thinned_by_minute", TruncMinute("at")) + _thin_up_to(
        by_minute_until, watch, "thinned_by_hour", TruncHour("at")
    )


def _thin_up_to(until: datetime, watch: Watch, progress: str, moment: TruncMinute | TruncHour) -> int:
    """Thin samples hour by hour, from where the last run ended. The watch's column ``progress`` has that time."""
    deleted = 0
    since = getattr(watch, progress) or QueueSample.objects.aggregate(first=Min("at"))["first"]
    while since is not None and since < until:
        next_hour = since.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        end = min(next_hour, until)
        hour = QueueSample.objects.filter(at__gte=since, at__lt=end)
        last = hour.annotate(moment=moment).values("queue", "moment").annotate(last=Max("id")).values("last")
        # Query the ids once: the query is expensive, and deleting a batch makes it no cheaper.
        deleted += _delete_ids(QueueSample, list(hour.exclude(id__in=last).values_list("id", flat=True)))
        since = end
        Watch.objects.filter(id=watch.id).update(**{progress: since})
    return deleted


def _delete(rows: QuerySet[Model]) -> int:
    deleted = 0
    while ids := list(rows.order_by("pk").values_list("pk", flat=True)[:BATCH]):
        deleted += rows.filter(pk__in=ids).delete()[0]
    return deleted


def _delete_ids(model: type[Model], ids: list[int]) -> int:
    for start in range(0, len(ids), BATCH):
        model._default_manager.filter(pk__in=ids[start : start + BATCH]).delete()
    return len(ids)
