"""Sweeps of orphans, alternating with the listing and as many bare DELETEs. Runs in `child.py`."""

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import Owner
from agents.models import AgentVhost, EventSubscription, Offering, Registration, SubscriptionQueue
from agents.sweeps.sweep import sweep_orphans
from core import broker
from core.removals import MAX_PARALLEL
from queues.models import Queue
from rabbit import snapshot
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from rabbit.management import Management
from rabbit.snapshot import NAMES_ONLY
from tools.benchmarks.orphan_sweep import OFFERINGS, TYPE, queue_name, subscriptions_of
from tools.benchmarks.passes import counted_requests, timed

COUNTED = 3
"""Sweeps whose statements and requests are counted. They are not timed, since counting takes time."""


class Swept:
    """Registered queues and orphans."""

    def __init__(self, vhosts: Sequence[str], queues: int, orphans: int) -> None:
        self.vhosts = vhosts
        self.orphans = orphans
        self.management: Management = broker.management()
        self._queues = queues
        self._turn = 0

    def register(self) -> None:
        """Insert the rows of the registered queues."""
        owners = Owner.objects.bulk_create(
            Owner(uuid=uuid.UUID(vhost), email=f"{vhost}@example.org", vouched=True) for vhost in self.vhosts
        )
        AgentVhost.objects.bulk_create(AgentVhost(owner=owner, name=owner.uuid.hex, ready=True) for owner in owners)
        offerings = Offering.objects.bulk_create(
            Offering(uuid=uuid.UUID(int=number), name=f"offering {number}") for number in range(OFFERINGS)
        )
        subscriptions = EventSubscription.objects.bulk_create(
            EventSubscription(uuid=uuid.UUID(one), owner=owner, password_set=True)
            for owner in owners
            for one in subscriptions_of(owner.uuid.hex, self._queues)
        )
        SubscriptionQueue.objects.bulk_create(
            SubscriptionQueue(
                subscription=subscription,
                offering=offering,
                object_type=TYPE,
                vhost=subscription.owner.uuid.hex,
                queue_name=queue_name(subscription.uuid.hex, number),
                state=Registration.READY,
            )
            for subscription in subscriptions
            for number, offering in enumerate(offerings)
        )

    def create_orphans(self) -> list[tuple[str, str]]:
        """Declare queues without a registration, and insert the monitor's rows for them."""
        self._turn += 1
        names = [
            (self.vhosts[number % len(self.vhosts)], f"subscription_{self._turn:032}_{number}")
            for number in range(self.orphans)
        ]
        with ThreadPoolExecutor(MAX_PARALLEL) as threads:
            make = partial(self.management.declare_queue, arguments=REGISTERED_QUEUE_ARGUMENTS)
            list(threads.map(make, *zip(*names, strict=True)))
        now = timezone.now()
        Queue.objects.bulk_create(
            Queue(
                vhost=vhost, name=name, type="classic", durable=True, auto_delete=False, exclusive=False, ready=0,
                unacknowledged=0, registered=True, first_seen=now, last_seen=now,
            )
            for vhost, name in names
        )  # fmt: skip
        return names

    def sweep(self) -> float:
        """Sweep the orphans and return the seconds. Check the report."""
        self.create_orphans()
        return self._sweep()

    def count(self) -> tuple[int, int]:
        """Sweep again, and return the numbers of SQL statements and HTTP requests."""
        self.create_orphans()
        with CaptureQueriesContext(connection) as captured, counted_requests() as sent:
            self._sweep()
        return len(captured), len(sent)

    def _sweep(self) -> float:
        seconds, report = timed(sweep_orphans)
        found = (report.found, report.deleted, report.kept, report.repaired, report.logins)
        if report.another_sweep or report.errors or found != (self.orphans, self.orphans, 0, 0, 0):
            raise AssertionError(f"unexpected report of a sweep: {report}")
        return seconds

    def bare(self) -> tuple[float, float]:
        """Return the seconds of a sweep's listing, and of listing and as many DELETEs from as many threads."""
        names = self.create_orphans()
        listing, _ = timed(lambda: list(snapshot.iter_lists(self.management, self.vhosts, NAMES_ONLY, {})))

        def delete_all() -> None:
            with broker.clients() as clients, ThreadPoolExecutor(MAX_PARALLEL) as threads:
                list(
                    threads.map(lambda name: clients.sessions.of(name[0]).delete_queue(name[1], if_unused=True), names)
                )

        deletes, _ = timed(delete_all)
        return listing, listing + deletes


def measure(vhost: str, vhosts: list[str], queues: int, orphans: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of alternating sweeps and bare requests, and the counts of a sweep.

    ``sweep`` and ``bare`` are seconds in the order of measurement; ``listing`` is the listing's part of the second.
    ``statements`` and ``requests`` are counts of a sweep.
    """
    swept = Swept(vhosts, queues, orphans)
    swept.register()
    swept.bare()
    swept.sweep()
    sweeps, bare = [], []
    for number in range(rounds):
        if number % 2:
            bare.append(swept.bare())
        sweeps.append(swept.sweep())
        if not number % 2:
            bare.append(swept.bare())
    counts = [swept.count() for _ in range(COUNTED)]
    return {
        "sweep": sweeps,
        "bare": [both for _, both in bare],
        "listing": [listing for listing, _ in bare],
        "statements": [statements for statements, _ in counts],
        "requests": [requests for _, requests in counts],
    }
