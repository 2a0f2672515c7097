"""The weekly summary: how an owner's queues stand, and what happened to them in the week.

It is due on Monday at eight in the owner's time zone. Who could not be told then is told later in the week.
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
from notifications import enqueue
from notifications.audience import Ownership
from notifications.enqueue import Notice
from notifications.preferences import deferred_until, zone_of
from queues import kinds
from queues.listing import WITHOUT_CONSUMER
from queues.models import Queue, QueueEvent

BATCH = 500
WEEK = timedelta(days=7)
MIN_INTERVAL = timedelta(days=4)
"""Two summaries are further apart, so that an owner who moves to another time zone doesn't get one after the other."""

DUE_AT = time(8)

MAX_EVENTS = 20
MAX_LONGEST = 5
MAX_WITHOUT_CONSUMER = 10

Line = dict[str, Any]
Week = dict[str, Any]


class Subscriber(NamedTuple):
    """An owner who wants the summary. The fields are those of ``accounts.models.Owner``."""

    id: int
    email: str
    time_zone: str
    quiet_from: time | None
    quiet_until: time | None
    weekly_summary_at: datetime | None
    date_joined: datetime

    def is_due(self, now: datetime) -> bool:
        """Return whether this week's summary is to be written. Who joined in the week has had no week yet."""
        last = self.weekly_summary_at or self.date_joined
        is_apart = self.weekly_summary_at is None or now - self.weekly_summary_at > MIN_INTERVAL
        return is_apart and last < last_monday(now, self.time_zone)


def last_monday(now: datetime, time_zone: str) -> datetime:
    """Return the last Monday, eight o'clock, that is over in this time zone."""
    zone = zone_of(time_zone)
    today = now.astimezone(zone).date()
    for weeks in (0, 1):
        monday = datetime.combine(today - timedelta(days=today.weekday(), weeks=weeks), DUE_AT, zone).astimezone(UTC)
        if monday <= now:
            break
    return monday


def enqueue_weekly_summaries() -> int:
    """Write the weekly summaries that are due, and return their number.

    An owner with nothing to tell gets none, and is asked about again next week. It takes a constant number of
    statements for each 500 owners.
    """
    now = timezone.now()
    told = 0
    wanting = Owner.objects.filter(is_active=True, weekly_summary=True).order_by("id").values_list(*Subscriber._fields)
    due = [one for row in wanting if (one := Subscriber._make(row)).is_due(now)]
    for start in range(0, len(due), BATCH):
        told += _tell(due[start : start + BATCH], now)
    if told:
        enqueue.nudge(told)
    return told


def _tell(owners: Sequence[Subscriber], now: datetime) -> int:
    weeks = _weeks([owner.id for owner in owners], now)
    with transaction.atomic():
        # Another process may be at it: whoever has these rows first writes the summaries, and the other finds it done.
        these = bulk.among(Owner, ("id",), [(owner.id,) for owner in owners])
        locked = Owner.objects.select_for_update().filter(these, is_active=True, weekly_summary=True).order_by("id")
        mine = [one for row in locked.values_list(*Subscriber._fields) if (one := Subscriber._make(row)).is_due(now)]
        bulk.update(Owner, ("weekly_summary_at",), [(owner.id, now) for owner in mine])
        notices = [
            Notice(
                kinds.WEEKLY,
                weeks[owner.id],
                recipients=[owner.email],
                deferred_until=deferred_until(owner.quiet_from, owner.quiet_until, owner.time_zone, now),
            )
            for owner in mine
            if owner.id in weeks
        ]
        return enqueue.enqueue(notices, now)


def _weeks(owners: Sequence[int], now: datetime) -> dict[int, Week]:
    """Return what there is to tell each of these owners; nothing of those who have neither queues nor events."""
    through = PulseUser.owners.through
    theirs = through.objects.filter(bulk.among(through, ("owner",), [(owner,) for owner in owners]))
    owned: dict[int, list[Ownership]] = {owner: [Ownership(owner_id=owner)] for owner in owners}
    for owner, pulse_user in theirs.order_by("pulseuser").values_list("owner", "pulseuser"):
        owned[owner].append(Ownership(pulse_user))
    accounts = {whose.pulse_user_id for all_theirs in owned.values() for whose in all_theirs} - {None}
    these = Q(bulk.among(Queue, ("owner",), [(owner,) for owner in owners]))
    if accounts:
        these |= Q(bulk.among(Queue, ("pulse_user",), [(account,) for account in accounts]))
    there = Queue.objects.filter(these).exclude(state=Queue.State.GONE).order_by()
    states = _states(there)
    happened = _happened(these, now)
    longest = _first(there.filter(ready__isnull=False, unacknowledged__isnull=False), MAX_LONGEST)
    unattended = _first(there.filter(WITHOUT_CONSUMER), MAX_WITHOUT_CONSUMER)
    weeks = {}
    for owner, all_theirs in owned.items():
        week = _week(all_theirs, states, happened, longest, unattended)
        if week["queues"] or week["happened"]:
            weeks[owner] = week
    return weeks


def _states(there: Any) -> Mapping[Ownership, Mapping[str, int]]:
    """Return the number of queues in each state, and of those without a consumer, by whose they are."""
    unattended = Count("id", filter=WITHOUT_CONSUMER)
    rows = there.values_list("pulse_user", "owner", "state").annotate(queues=Count("id"), unattended=unattended)
    found: dict[Ownership, dict[str, int]] = {}
    for account, owner, state, queues, unattended_ones in rows:
        of_them = found.setdefault(Ownership(account, owner), {"unattended": 0})
        of_them[state] = queues
        of_them["unattended"] += unattended_ones
    return found


def _happened(these: Q, now: datetime) -> dict[Ownership, list[Line]]:
    """Return the warnings and deletions of the week, as one line for each of these queues, by whose they are."""
    kinds = {QueueEvent.Kind.WARNED.value: "warnings", QueueEvent.Kind.DELETED.value: "deletions"}
    events = QueueEvent.objects.filter(queue__isnull=False, at__gt=now - WEEK, at__lte=now, kind__in=list(kinds))
    whose = ("queue__pulse_user", "queue__owner")
    rows = events.values(*whose, "queue__name", "kind").filter(these).order_by("queue__name")
    found: dict[Ownership, dict[str, Line]] = {}
    for row in rows.annotate(times=Count("id")):
        lines = found.setdefault(Ownership(*(row[name] for name in whose)), {})
        line = lines.setdefault(row["queue__name"], {"queue": row["queue__name"], "warnings": 0, "deletions": 0})
        line[kinds[row["kind"]]] += row["times"]
    return {owned: list(lines.values()) for owned, lines in found.items()}


def _first(queues: Any, number: int) -> dict[Ownership, list[Line]]:
    """Return so many of the longest of these queues, by whose they are."""
    length = F("ready") + F("unacknowledged")
    whose = ("pulse_user", "owner")
    place = Window(RowNumber(), partition_by=whose, order_by=[length.desc(nulls_last=True), "name"])
    rows = queues.annotate(length_now=length, place=place).filter(place__lte=number).order_by(*whose, "place")
    found: dict[Ownership, list[Line]] = {}
    for account, owner, name, messages in rows.values_list(*whose, "name", "length_now"):
        found.setdefault(Ownership(account, owner), []).append({"queue": name, "length": messages})
    return found


def _week(
    theirs: Sequence[Ownership],
    states: Mapping[Ownership, Mapping[str, int]],
    happened: Mapping[Ownership, list[Line]],
    longest: Mapping[Ownership, list[Line]],
    unattended: Mapping[Ownership, list[Line]],
) -> Week:
    """Return what there is to tell the owner whose queues these are."""

    def number(what: str) -> int:
        return sum(states.get(whose, {}).get(what, 0) for whose in theirs)

    def lines(by_whose: Mapping[Ownership, list[Line]]) -> list[Line]:
        return [line for whose in theirs for line in by_whose.get(whose, [])]

    worst_first = sorted(lines(happened), key=lambda line: (-line["deletions"], -line["warnings"], line["queue"]))
    long = sorted((line for line in lines(longest) if line["length"]), key=lambda line: -line["length"])
    lonely = lines(unattended)[:MAX_WITHOUT_CONSUMER]
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
        "unattended": lonely,
        "more_unattended": number("unattended") - len(lonely),
    }
