"""Taking over from elsewhere which queues are never deleted, also of those that no pass has seen yet."""

import time
from collections.abc import Iterable, Sequence

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from accounts import audit
from accounts.adoption import EXISTS, LEFT_OUT, Step
from core import broker, bulk, leases
from core.leases import LeaseTaken
from queues.actions import LIMITS
from queues.models import Queue, QueueEvent
from queues.monitor import LEASE
from rabbit import snapshot

MAKE_UNBOUNDED = "make unbounded"

LEASE_TIMEOUT_SECONDS = 60.0
"""So long a pass that is running is waited for."""

POLL_SECONDS = 0.2


def plan(names: Iterable[str]) -> list[Step]:
    """Return which queues follow from these names that come without a vhost. Nothing is changed.

    A name stands for every queue of this name, on the broker or known here. One that is nowhere is taken for a queue of
    the Pulse users' vhost that comes back some day.

    Raises:
        BrokerError: the broker is away or refused.
    """
    wanted = list(dict.fromkeys(names))
    steps = [
        Step("queue", name, LEFT_OUT, notes=("It is no name that can be kept.",))
        for name in wanted
        if not _is_storable(name)
    ]
    wanted = [name for name in wanted if _is_storable(name)]
    if not wanted:
        return steps
    rows = Queue.objects.filter(bulk.among(Queue, ("name",), [(name,) for name in wanted])).order_by()
    known = {(vhost, name): unbounded for vhost, name, unbounded in rows.values_list("vhost", "name", "unbounded")}
    listed = broker.management().list_queues(None, {"disable_stats": "true", "columns": "name,vhost"})
    vhosts: dict[str, set[str]] = {name: set() for name in wanted}
    for vhost, name in [*known, *((row["vhost"], row["name"]) for row in listed)]:
        if name in vhosts:
            vhosts[name].add(vhost)
    there = {(row["vhost"], row["name"]) for row in listed}
    for name in wanted:
        for vhost in sorted(vhosts[name]) or [settings.GUARDIAN_PULSE_VHOST]:
            if known.get((vhost, name)):
                steps.append(Step("queue", name, EXISTS, vhost=vhost))
                continue
            notes = () if (vhost, name) in there else ("It isn't on the broker now; it is so when it comes back.",)
            steps.append(Step("queue", name, MAKE_UNBOUNDED, notes=notes, vhost=vhost))
    return steps


def _is_storable(name: str) -> bool:
    return bool(name) and "\0" not in name and len(name) <= snapshot.MAX_NAME_LENGTH


def carry_out(steps: Sequence[Step], command: str) -> None:
    """Make the queues that are to be so unbounded; ``command`` is what does it. All of them or none.

    One that no pass has seen gets a row that says it is gone: the pass that sees it takes it for the one that came
    back, and knows that it is unbounded before it judges it. No pass runs meanwhile, which would make the same row.

    Raises:
        LeaseTaken: a pass is running, and doesn't end within a minute.
        LeaseLost: this process was stopped for longer than that. Nothing was done.
    """
    wanted = [(step.vhost, step.name) for step in steps if step.do == MAKE_UNBOUNDED]
    if not wanted:
        return
    until = time.monotonic() + LEASE_TIMEOUT_SECONDS
    while True:
        try:
            with leases.lease(LEASE) as lease, transaction.atomic():
                lease.renew()
                _set(wanted, command)
            return
        except LeaseTaken:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_SECONDS)


def _set(wanted: Sequence[tuple[str, str]], command: str) -> None:
    now = timezone.now()
    these = bulk.among(Queue, ("vhost", "name"), wanted)
    known = list(Queue.objects.select_for_update().filter(these).order_by("id"))
    bounded = [queue for queue in known if not queue.unbounded]
    Queue.objects.filter(these).update(unbounded=True)
    unseen = sorted(set(wanted) - {(queue.vhost, queue.name) for queue in known})
    made = Queue.objects.bulk_create(
        Queue(
            vhost=vhost, name=name, type="classic", durable=True, auto_delete=False, exclusive=False,
            state=Queue.State.GONE, unbounded=True, first_seen=now, last_seen=now,
        )
        for vhost, name in unseen
    )  # fmt: skip
    events = []
    for queue in [*bounded, *made]:
        limits = {name: getattr(queue, name) for name in LIMITS}
        details = {"before": {**limits, "unbounded": False}, "after": {**limits, "unbounded": True}, "command": command}
        kind = QueueEvent.Kind.ADJUSTED
        events.append(
            QueueEvent(queue=queue, vhost=queue.vhost, queue_name=queue.name, kind=kind, at=now, details=details)
        )
    QueueEvent.objects.bulk_create(events)
    audit.note(None, "made unbounded", None, queues=[str(event.queue) for event in events])
