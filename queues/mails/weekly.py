"""The weekly summary: the states of an owner's queues, and the week's warnings and deletions.

It is due on Monday at 8:00 in the owner's time zone. If Guardian is down then, it is sent later in the week.
"""

from datetime import UTC, datetime, time, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Count, F, Q
from django.utils import timezone

from accounts.models import Owner
from core.time_zones import zone_of
from notifications import enqueue
from notifications.enqueue import Notice
from notifications.preferences import deferred_until
from queues.access import own_queues
from queues.mails import kinds
from queues.models import Queue, QueueEvent
from queues.rules.listing import WITHOUT_CONSUMER

WEEK = timedelta(days=7)
MIN_INTERVAL = timedelta(days=4)
"""Without it, an owner who changes the time zone would get two summaries in a row."""

DUE_AT = time(8)

MAX_EVENTS = 20
MAX_LONGEST = 5
MAX_WITHOUT_CONSUMER = 10

SUBSCRIBERS = Q(is_active=True, weekly_summary=True)


def is_due(owner: Owner, now: datetime) -> bool:
    """Return whether this week's summary is due. An owner who joined after the last Monday gets none yet."""
    last = owner.weekly_summary_at or owner.date_joined
    is_apart = owner.weekly_summary_at is None or now - owner.weekly_summary_at > MIN_INTERVAL
    return is_apart and last < last_monday(now, owner.time_zone)


def last_monday(now: datetime, time_zone: str) -> datetime:
    """Return the last Monday at 8:00 in this time zone that has passed."""
    zone = zone_of(time_zone)
    today = now.astimezone(zone).date()
    for weeks in (0, 1):
        monday = datetime.combine(today - timedelta(days=today.weekday(), weeks=weeks), DUE_AT, zone).astimezone(UTC)
        if monday <= now:
            break
    return monday


def enqueue_weekly_summaries() -> int:
    """Enqueue the weekly summaries that are due, and return their number.

    An owner without queues and events gets none until the next week.
    """
    now = timezone.now()
    due = [owner for owner in Owner.objects.filter(SUBSCRIBERS).order_by("id") if is_due(owner, now)]
    enqueued = sum(_enqueue(owner, now) for owner in due)
    if enqueued:
        enqueue.wake(enqueued)
    return enqueued


def _enqueue(found: Owner, now: datetime) -> int:
    week = _week(found, now)
    with transaction.atomic():
        # If two processes run this, the second waits for this lock and then finds no summary due.
        owner = Owner.objects.select_for_update().filter(SUBSCRIBERS, pk=found.pk).first()
        if owner is None or not is_due(owner, now):
            return 0
        Owner.objects.filter(pk=owner.pk).update(weekly_summary_at=now)
        if not week["queues"] and not week["happened"]:
            return 0
        later = deferred_until(owner.quiet_from, owner.quiet_until, owner.time_zone, now)
        return enqueue.enqueue([Notice(kinds.WEEKLY, week, recipients=[owner.email], deferred_until=later)], now)


def _week(owner: Owner, now: datetime) -> dict[str, Any]:
    queues = Queue.objects.filter(own_queues(owner))
    existing = queues.exclude(state=Queue.State.GONE)
    states = (Queue.State.OK, Queue.State.WARNED, Queue.State.DELETING)
    of_state = {state.value: Count("id", filter=Q(state=state)) for state in states}
    numbers = existing.aggregate(queues=Count("id"), unattended=Count("id", filter=WITHOUT_CONSUMER), **of_state)
    unattended = numbers.pop("unattended")

    counted = (QueueEvent.Kind.WARNED, QueueEvent.Kind.DELETED)
    events = QueueEvent.objects.filter(queue__in=queues, at__gt=now - WEEK, at__lte=now, kind__in=counted)
    warnings, deletions = (Count("id", filter=Q(kind=kind)) for kind in counted)
    lines = events.values_list("queue__name").annotate(warnings=warnings, deletions=deletions)
    happened = [
        {"queue": name, "warnings": warnings, "deletions": deletions}
        for name, warnings, deletions in lines.order_by("-deletions", "-warnings", "queue__name")
    ]

    length = F("ready") + F("unacknowledged")
    by_length = existing.annotate(messages=length).order_by(F("messages").desc(nulls_last=True), "name")

    def first(rows: Any, most: int) -> list[dict[str, Any]]:
        return [{"queue": name, "length": messages} for name, messages in rows.values_list("name", "messages")[:most]]

    without_consumer = first(by_length.filter(WITHOUT_CONSUMER), MAX_WITHOUT_CONSUMER)
    return {
        **numbers,
        "deleted": sum(line["deletions"] for line in happened),
        "happened": happened[:MAX_EVENTS],
        "more_happened": max(0, len(happened) - MAX_EVENTS),
        "longest": first(by_length.filter(messages__gt=0), MAX_LONGEST),
        "unattended": without_consumer,
        "more_unattended": unattended - len(without_consumer),
    }
