"""Import which queues are unbounded, including queues that no pass has listed yet."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from accounts import audit
from accounts.importing.adoption import EXISTS, LEFT_OUT, Step
from core import broker, bulk, leases
from core.leases import LeaseTaken
from queues.guard.monitor import LEASE
from queues.models import Queue, QueueEvent
from queues.rules.temporary_limits import limits_of
from rabbit.names import is_amqp_name

MAKE_UNBOUNDED = "make unbounded"

LEASE_TIMEOUT_SECONDS = 60.0
"""How long to wait for a running pass."""

POLL_SECONDS = 0.2

T = TypeVar("T")


def plan(names: Iterable[str]) -> list[Step]:
    """Return the steps that make the queues of these names unbounded. Nothing is changed.

    The names come without a vhost, so each stands for every queue of that name, on the broker or stored. If there is
    none, it stands for a future queue in the Pulse users' vhost.
    """
    wanted = list(dict.fromkeys(names))
    steps = [
        Step("queue", name, LEFT_OUT, notes=("No queue can have this name: it is empty or longer than 255 bytes.",))
        for name in wanted
        if not _is_possible(name)
    ]
    wanted = [name for name in wanted if _is_possible(name)]
    if not wanted:
        return steps
    rows = Queue.objects.filter(name__in=wanted).order_by()
    stored = {(vhost, name): unbounded for vhost, name, unbounded in rows.values_list("vhost", "name", "unbounded")}
    listed = broker.management().list_queues(None, {"disable_stats": "true", "columns": "name,vhost"})
    vhosts: dict[str, set[str]] = {name: set() for name in wanted}
    for vhost, name in [*stored, *((row["vhost"], row["name"]) for row in listed)]:
        if name in vhosts:
            vhosts[name].add(vhost)
    on_broker = {(row["vhost"], row["name"]) for row in listed}
    for name in wanted:
        for vhost in sorted(vhosts[name]) or [settings.GUARDIAN_PULSE_VHOST]:
            if stored.get((vhost, name)):
                steps.append(Step("queue", name, EXISTS, vhost=vhost))
                continue
            notes = (
                ()
                if (vhost, name) in on_broker
                else ("It isn't on the broker now; it will be unbounded when it is declared.",)
            )
            steps.append(Step("queue", name, MAKE_UNBOUNDED, notes=notes, vhost=vhost))
    return steps


def _is_possible(name: str) -> bool:
    return bool(name) and is_amqp_name(name)


def apply(steps: Sequence[Step], command: str) -> None:
    """Make the queues of these steps unbounded, all or none. ``command`` is recorded in their events.

    A queue without a row gets one; see ``unlisted_rows``. Raises the errors of ``between_passes``.
    """
    wanted = [(step.vhost, step.name) for step in steps if step.do == MAKE_UNBOUNDED]
    if wanted:
        between_passes(lambda: _set(wanted, command))


def between_passes(do: Callable[[], T]) -> T:
    """Call ``do`` in a transaction while no pass runs, and return its result.

    Raises LeaseTaken if a pass runs for more than a minute, and LeaseLost if this process was suspended. Then nothing
    was changed.
    """
    deadline = time.monotonic() + LEASE_TIMEOUT_SECONDS
    while True:
        try:
            with leases.lease(LEASE) as lease, transaction.atomic():
                lease.renew()
                return do()
        except LeaseTaken:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def unlisted_rows(names: Iterable[tuple[str, str]], **limits: Any) -> list[Queue]:
    """Create the rows of queues that no pass has listed yet, given as (vhost, name), with these limits.

    They are in the state gone. The first pass that lists such a queue finds the row, so it knows the limits before it
    judges the queue. Call it between passes: they could insert the same row.
    """
    now = timezone.now()
    return Queue.objects.bulk_create(
        Queue(
            vhost=vhost, name=name, type="classic", durable=True, auto_delete=False, exclusive=False,
            state=Queue.State.GONE, first_seen=now, last_seen=now, **limits,
        )
        for vhost, name in names
    )  # fmt: skip


def _set(wanted: Sequence[tuple[str, str]], command: str) -> None:
    selected = bulk.among(Queue, ("vhost", "name"), wanted)
    stored = list(Queue.objects.select_for_update().filter(selected).order_by("id"))
    bounded = [queue for queue in stored if not queue.unbounded]
    Queue.objects.filter(selected).update(unbounded=True, limits_until=None, limits_before=None, limits_phase="")
    without_row = sorted(set(wanted) - {(queue.vhost, queue.name) for queue in stored})
    created = unlisted_rows(without_row, unbounded=True)
    events = []
    for queue in [*bounded, *created]:
        before, after = ({**limits_of(queue), "unbounded": value} for value in (False, True))
        events.append(queue.new_event(QueueEvent.Kind.ADJUSTED, before=before, after=after, command=command))
    QueueEvent.objects.bulk_create(events)
    audit.record(None, "made unbounded", None, queues=[str(event.queue) for event in events])
