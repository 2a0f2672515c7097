"""The page that a visitor sees first: what needs attention, and what happened."""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.models import F, QuerySet
from django.urls import reverse

from accounts.access import vouching
from accounts.models import Owner, PulseUser
from agents.models import AgentIdentity
from core.formatting import counted, duration
from queues.actions import limit_requests
from queues.actions.endings import describe_event
from queues.models import Archive, Queue, QueueEvent, Watch
from queues.pages.queue_list import Row, rows_of
from queues.rules.conditions import soonest_to_fill
from queues.rules.freshness import Freshness, freshness_of_list
from queues.rules.listing import Counts, add_up, count_by_state, nearest_to_limit, needs_attention
from queues.rules.states import PREDICTED_SECONDS, Level
from rabbit.names import readable

QUEUES_SHOWN = 10
QUEUES_COMPARED = 50
"""The most urgent queues are found among this many of those that need attention."""

DELETED_SHOWN = 10
DELETED_SHOWN_FOR = timedelta(days=1)
EVENTS_SHOWN = 10
REQUESTS_SHOWN = 10


class Happened(NamedTuple):
    """An event of a queue: ``what`` in words, with details in ``more``, and ``who`` caused it."""

    event: QueueEvent
    name: str
    what: str
    more: str
    who: str


class Deleted(NamedTuple):
    """A queue that Guardian deleted: the event, and the archive of its messages if there is one."""

    event: QueueEvent
    name: str
    archive: Archive | None


class Step(NamedTuple):
    """What a visitor can do next about a queue: the words of a button, and its link."""

    words: str
    url: str


class Dashboard(NamedTuple):
    """The content of the page. ``queues`` are the most urgent of those that need attention, each with the next step.

    ``trouble`` are sentences about the broker. Requests are those that operators have to decide: none for owners.
    """

    counts: Counts
    deleted: Sequence[Deleted]
    more_deleted: int
    queues: Sequence[tuple[Row, Step]]
    events: Sequence[Happened]
    pulse_users: int
    agents: int
    freshness: Freshness
    trouble: Sequence[str]
    nodes: int
    limit_requests: Sequence[QueueEvent]
    access_requests: Sequence[Owner]

    @property
    def headline(self) -> str:
        total, attention = self.counts.total, self.counts.attention
        deleted = len(self.deleted) + self.more_deleted
        parts = [f"{counted(deleted, 'queue')} deleted"] if deleted else []
        if attention:
            parts.append(f"{attention:,} of {counted(total, 'queue')} need{'s' if attention == 1 else ''} attention")
        elif total:
            parts.append(f"{counted(total, 'queue')}, {'all ' if total > 1 else ''}healthy")
        return "; ".join(parts) or f"You have no queue{'' if self.counts.gone else ' yet'}"

    @property
    def more(self) -> int:
        return self.counts.attention - len(self.queues)


def dashboard(visitor: Owner, now: datetime) -> Dashboard:
    """Return the content of the page of an owner; an operator sees everything. The broker is not queried."""
    mine = Queue.objects.seen_by(visitor)
    watch = Watch.current()
    freshness = freshness_of_list(watch)
    soon = soonest_to_fill(mine, freshness.now)
    shown = mine.select_related("pulse_user", "owner", "acknowledged_by").prefetch_related("pulse_user__owners")
    worst = nearest_to_limit(shown.filter(needs_attention(soon)), soon)[:QUEUES_COMPARED]
    rows = sorted(rows_of(worst, freshness.now, visitor), key=_urgency)[:QUEUES_SHOWN]
    requested = limit_requests.open_requests().filter(queue__in=[row.queue for row in rows if row.is_filling])
    asked = {} if visitor.is_staff else {event.queue_id: event.details["wanted"] for event in requested}
    return Dashboard(
        add_up(count_by_state(mine, soon)),
        *_deleted(visitor, mine, now),
        [(row, next_step(row, visitor, asked.get(row.queue.pk))) for row in rows],
        _events(visitor),
        PulseUser.objects.seen_by(visitor).count(),
        AgentIdentity.objects.seen_by(visitor).count(),
        freshness,
        _trouble(watch, now, names_nodes=visitor.is_staff),
        len(watch.nodes),
        list(limit_requests.open_requests()[:REQUESTS_SHOWN]) if visitor.is_staff else [],
        list(vouching.open_requests()[:REQUESTS_SHOWN]) if visitor.is_staff else [],
    )


def _urgency(row: Row) -> tuple[bool, bool, float]:
    """Return what rows are sorted by: what is lost, then what will be within a day, then the rest as it comes.

    Those that the visitor muted, or that somebody is on, follow all others.
    """
    is_handled = bool(row.on_it or row.muted_until)
    is_critical, left = row.state.level == Level.CRITICAL, row.seconds_to_max
    soon = left if left is not None and left < PREDICTED_SECONDS else 0 if is_critical else math.inf
    return is_handled, not is_critical, soon


def next_step(row: Row, visitor: Owner, asked: int | None = None) -> Step:
    """Return what the visitor can do about this queue. ``asked`` is the limit of an owner's open request."""
    queue = row.queue
    if queue.is_blocked and visitor.is_staff:
        return Step("Decide", reverse("operate_brake"))
    is_deleting = queue.state == Queue.State.DELETING
    # A higher limit calls off a deletion, unless it is for the queue's name. A request for one comes too late.
    is_too_late = is_deleting and (queue.decided_for == Queue.DecidedFor.NAME or not visitor.is_staff)
    if not is_too_late and not row.spared and (row.is_filling or queue.is_blocked):
        if visitor.is_staff:
            return Step("Raise limit", reverse("queue_limits", args=[queue.uuid]))
        if asked is not None:
            return Step(f"Asked for {asked:,}", reverse("queue", args=[queue.uuid]))
        return Step("Ask for a limit", reverse("queue_limit_request", args=[queue.uuid]))
    return Step("Open", reverse("queue", args=[queue.uuid]))


def _deleted(visitor: Owner, mine: QuerySet[Queue], now: datetime) -> tuple[list[Deleted], int]:
    """Return the queues that Guardian deleted in the last day, the latest first, and the number of further ones.

    A queue is left out once it exists again, and for a visitor who dismissed its deletion.
    """
    gone = QueueEvent.objects.filter(
        kind=QueueEvent.Kind.DELETED,
        at__gt=now - DELETED_SHOWN_FOR,
        at__gte=F("queue__first_seen"),
        queue__in=mine.filter(state=Queue.State.GONE),
    ).exclude(dismissed_by=visitor)
    latest = {event.queue_id: event for event in reversed(gone.select_related("queue")[:DELETED_SHOWN])}
    archives = Archive.objects.seen_by(visitor).of_last_deletion().filter(queue__in=latest).order_by("created")
    archive_of = {archive.queue_id: archive for archive in archives}
    events = sorted(latest.values(), key=lambda event: event.at, reverse=True)
    shown = [Deleted(event, readable(event.queue_name), archive_of.get(event.queue_id)) for event in events]
    return shown, gone.order_by().values("queue").distinct().count() - len(shown)


def _events(visitor: Owner) -> list[Happened]:
    events = QueueEvent.objects.select_related("by", "queue")
    if not visitor.is_staff:
        events = events.filter(queue__in=Queue.objects.seen_by(visitor))
    return [Happened(event, readable(event.queue_name), *describe_event(event)) for event in events[:EVENTS_SHOWN]]


def _trouble(watch: Watch, now: datetime, *, names_nodes: bool) -> list[str]:
    """Return what is wrong with the broker, as the last pass found it. Owners learn of what concerns publishers."""
    found = []
    if watch.outage_since:
        found.append(f"The broker has not answered for {duration((now - watch.outage_since).total_seconds())}.")
    for resource, node, _ in watch.alarms or ():
        if resource != "node":
            lacks = "free disk space" if resource == "disk" else resource
            where = f" on {readable(node)}" if names_nodes else ""
            found.append(f"The broker blocks publishers: too little {lacks}{where}.")
        elif names_nodes:
            found.append(f"The node {readable(node)} is lost.")
    return list(dict.fromkeys(found))
