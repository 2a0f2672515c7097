"""The page that a visitor sees first: what needs attention, and what happened."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from accounts.models import Owner, PulseUser
from agents.models import AgentIdentity
from core.formatting import duration
from queues.actions import limit_requests
from queues.models import Queue, QueueEvent, Watch
from queues.pages.queue import describe_event
from queues.pages.queue_list import Row, rows_of
from queues.rules.listing import NEEDS_ATTENTION, Counts, add_up, count_by_state, nearest_to_limit
from rabbit.names import readable

QUEUES_SHOWN = 10
EVENTS_SHOWN = 10
REQUESTS_SHOWN = 10


class Happened(NamedTuple):
    """An event of a queue: ``what`` in words, with details in ``more``, and ``who`` caused it."""

    event: QueueEvent
    name: str
    what: str
    more: str
    who: str


class Dashboard(NamedTuple):
    """The content of the page. ``queues`` are the worst of those that need attention.

    ``trouble`` are sentences about the broker. ``limit_requests`` are the latest that are open: none for owners.
    """

    counts: Counts
    queues: Sequence[Row]
    events: Sequence[Happened]
    pulse_users: int
    agents: int
    trouble: Sequence[str]
    nodes: int
    limit_requests: Sequence[QueueEvent]

    @property
    def more(self) -> int:
        """The number of queues that need attention and aren't shown."""
        return self.counts.attention - len(self.queues)


def dashboard(visitor: Owner, now: datetime) -> Dashboard:
    """Return the content of the page of an owner; an operator sees everything. The broker is not queried."""
    mine = Queue.objects.seen_by(visitor)
    counts = add_up(count_by_state(mine))
    worst = nearest_to_limit(mine.filter(NEEDS_ATTENTION).select_related("pulse_user", "owner"))[:QUEUES_SHOWN]
    watch = Watch.objects.filter(id=1).first() or Watch()
    return Dashboard(
        counts,
        rows_of(worst, now) if counts.attention else [],
        _events(visitor),
        PulseUser.objects.seen_by(visitor).count(),
        AgentIdentity.objects.seen_by(visitor).count(),
        _trouble(watch, now, names_nodes=visitor.is_staff),
        len(watch.nodes),
        list(limit_requests.open_requests()[:REQUESTS_SHOWN]) if visitor.is_staff else [],
    )


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
