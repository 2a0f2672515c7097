"""The weekly summary: the states of an owner's queues, and the week's warnings and deletions.

It is due on Monday at 8:00 in the owner's time zone. If Guardian is down then, it is sent later in the week.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Count, F, Q, Window
from django.db.models.functions import RowNumber
from django.utils import timezone

from accounts.models import Owner, PulseUser
from core import bulk
from core.time_zones import zone_of
from notifications import enqueue
from notifications.audience import Ownership
from notifications.enqueue import Notice
from notifications.preferences import deferred_until
from queues.mails import kinds
from queues.models import Queue, QueueEvent
from queues.rules.listing import WITHOUT_CONSUMER

BATCH = 500
WEEK = timedelta(days=7)
MIN_INTERVAL = timedelta(days=4)
"""Without it, an owner who changes the time zone would get two summaries in a row."""

DUE_AT = time(8)

MAX_EVENTS = 20
MAX_LONGEST = 5
MAX_WITHOUT_CONSUMER = 10

Line = dict[str, Any]
Week = dict[str, Any]


class Subscriber(NamedTuple):
    """An owner who gets the summary. The fields are columns of ``accounts.models.Owner``."""

    id: int
    email: str
    time_zone: str
    quiet_from: time | None
    quiet_until: time | None
    weekly_summary_at: datetime | None
    date_joined: datetime

    def is_due(self, now: datetime) -> bool:
        """Return whether this week's summary is due. An owner who joined after the last Monday gets none yet."""
        last = self.weekly_summary_at or self.date_joined
        is_apart = self.weekly_summary_at is None or now - self.weekly_summary_at > MIN_INTERVAL
        return is_apart and last < last_monday(now, self.time_zone)


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

    An owner without queues and events gets none until the next week. It takes a constant number of statements for each
    500 owners.
    """
    now = timezone.now()
    enqueued = 0
    subscribers = (
        Owner.objects.filter(is_active=True, weekly_summary=True).order_by("id").values_list(*Subscriber._fields)
    )
    due = [one for row in subscribers if (one := Subscriber._make(row)).is_due(now)]
    for start in range(0, len(due), BATCH):
        enqueued += _enqueue(due[start : start + BATCH], now)
    if enqueued:
        enqueue.wake(enqueued)
    return enqueued


def _enqueue(owners: Sequence[Subscriber], now: datetime) -> int:
    weeks = _weeks([owner.id for owner in owners], now)
    with transaction.atomic():
        # If two processes run this, the second waits for these locks and then finds no summary due.
        these = Owner.objects.filter(pk__in=[owner.id for owner in owners], is_active=True, weekly_summary=True)
        locked = these.select_for_update().order_by("id")
        still_due = [
            one for row in locked.values_list(*Subscriber._fields) if (one := Subscriber._make(row)).is_due(now)
        ]
        bulk.update(Owner, ("weekly_summary_at",), [(owner.id, now) for owner in still_due])
        notices = [
            Notice(
                kinds.WEEKLY,
                weeks[owner.id],
                recipients=[owner.email],
                deferred_until=deferred_until(owner.quiet_from, owner.quiet_until, owner.time_zone, now),
            )
            for owner in still_due
            if owner.id in weeks
        ]
        return enqueue.enqueue(notices, now)


def _weeks(owners: Sequence[int], now: datetime) -> dict[int, Week]:
    """Return the summaries of these owners, without those who have neither queues nor events."""
    memberships = PulseUser.owners.through.objects.filter(owner__in=owners)
    owned: dict[int, list[Ownership]] = {owner: [Ownership(owner_id=owner)] for owner in owners}
    for owner, pulse_user in memberships.order_by("pulseuser").values_list("owner", "pulseuser"):
        owned[owner].append(Ownership(pulse_user))
    pulse_users = {one.pulse_user_id for ownerships in owned.values() for one in ownerships} - {None}
    queues = Queue.objects.filter(Q(owner__in=owners) | Q(pulse_user__in=pulse_users))
    existing = queues.exclude(state=Queue.State.GONE).order_by()
    states = _states(existing)
    happened = _happened(queues, now)
    longest = _longest(existing.filter(ready__isnull=False, unacknowledged__isnull=False), MAX_LONGEST)
    unattended = _longest(existing.filter(WITHOUT_CONSUMER), MAX_WITHOUT_CONSUMER)
    weeks = {}
    for owner, ownerships in owned.items():
        week = _week(ownerships, states, happened, longest, unattended)
        if week["queues"] or week["happened"]:
            weeks[owner] = week
    return weeks


def _states(queues: Any) -> Mapping[Ownership, Mapping[str, int]]:
    """Return the number of queues in each state, and of those without a consumer, by ownership."""
    unattended = Count("id", filter=WITHOUT_CONSUMER)
    rows = queues.values_list("pulse_user", "owner", "state").annotate(number=Count("id"), unattended=unattended)
    found: dict[Ownership, dict[str, int]] = {}
    for pulse_user, owner, state, number, without_consumer in rows:
        counts = found.setdefault(Ownership(pulse_user, owner), {"unattended": 0})
        counts[state] = number
        counts["unattended"] += without_consumer
    return found


def _happened(queues: Any, now: datetime) -> dict[Ownership, list[Line]]:
    """Return the week's warnings and deletions, one line for each of these queues, by ownership."""
    kinds = {QueueEvent.Kind.WARNED.value: "warnings", QueueEvent.Kind.DELETED.value: "deletions"}
    events = QueueEvent.objects.filter(queue__in=queues, at__gt=now - WEEK, at__lte=now, kind__in=list(kinds))
    owner_columns = ("queue__pulse_user", "queue__owner")
    rows = events.values(*owner_columns, "queue__name", "kind").order_by("queue__name")
    found: dict[Ownership, dict[str, Line]] = {}
    for row in rows.annotate(times=Count("id")):
        lines = found.setdefault(Ownership(*(row[name] for name in owner_columns)), {})
        line = lines.setdefault(row["queue__name"], {"queue": row["queue__name"], "warnings": 0, "deletions": 0})
        line[kinds[row["kind"]]] += row["times"]
    return {owned: list(lines.values()) for owned, lines in found.items()}


def _longest(queues: Any, number: int) -> dict[Ownership, list[Line]]:
    """Return the ``number`` longest of these queues for each ownership."""
    length = F("ready") + F("unacknowledged")
    owner_columns = ("pulse_user", "owner")
    place = Window(RowNumber(), partition_by=owner_columns, order_by=[length.desc(nulls_last=True), "name"])
    rows = queues.annotate(length_now=length, place=place).filter(place__lte=number).order_by(*owner_columns, "place")
    found: dict[Ownership, list[Line]] = {}
    for pulse_user, owner, name, messages in rows.values_list(*owner_columns, "name", "length_now"):
        found.setdefault(Ownership(pulse_user, owner), []).append({"queue": name, "length": messages})
    return found


def _week(
    ownerships: Sequence[Ownership],
    states: Mapping[Ownership, Mapping[str, int]],
    happened: Mapping[Ownership, list[Line]],
    longest: Mapping[Ownership, list[Line]],
    unattended: Mapping[Ownership, list[Line]],
) -> Week:
    """Return the summary of the owner with these ownerships."""

    def number(state: str) -> int:
        return sum(states.get(ownership, {}).get(state, 0) for ownership in ownerships)

    def lines(by_ownership: Mapping[Ownership, list[Line]]) -> list[Line]:
        return [line for ownership in ownerships for line in by_ownership.get(ownership, [])]

    worst_first = sorted(lines(happened), key=lambda line: (-line["deletions"], -line["warnings"], line["queue"]))
    long = sorted((line for line in lines(longest) if line["length"]), key=lambda line: -line["length"])
    without_consumer = lines(unattended)[:MAX_WITHOUT_CONSUMER]
    ok, warned, deleting = number(Queue.State.OK), number(Queue.State.WARNED), number(Queue.State.DELETING)
    return {
        "queues": ok + warned + deleting,
        "ok": ok,
        "warned": warned,
        "deleting": deleting,
        "deleted": sum(line["deletions"] for line in worst_first),
        "happened": worst_first[:MAX_EVENTS],
        "more_happened": max(0, len(worst_first) - MAX_EVENTS),
        "longest": long[:MAX_LONGEST],
        "unattended": without_consumer,
        "more_unattended": number("unattended") - len(without_consumer),
    }
