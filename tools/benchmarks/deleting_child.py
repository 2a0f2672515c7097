"""Passes that delete many queues, alternating with the bare requests. Runs in ``tools.benchmarks.child``."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext

from accounts.models import Owner, PulseUser
from core import broker
from queues.guard.monitor import run_pass
from rabbit import amqp
from rabbit.management import Management
from rabbit.snapshot import COLUMNS, TOTALS
from tools.benchmarks.load import REST_SECONDS, publish_one_each, wait_for_messages
from tools.benchmarks.passes import counted_requests, timed

THREADS = 8

MESSAGES = 3
"""The length of a queue to delete, one more than the limit."""


class ExcessQueues:
    """A guarded vhost, to which queues over the limit are added."""

    def __init__(self, vhost: str, queues: int, excess: int) -> None:
        self.vhost = vhost
        self.queues = queues
        self.excess = excess
        self.management: Management = broker.management()
        self._turn = 0

    def make(self, user: str) -> list[str]:
        """Declare this Pulse user's empty queues, to be filled and deleted."""
        self._turn += 1
        names = [f"queue/{user}/{self._turn}-{number}" for number in range(self.excess)]
        self._side_by_side(partial(self.management.declare_queue, self.vhost, arguments={}), names)
        return names

    def fill(self, names: list[str]) -> None:
        """Fill the queues over their limit, wait until the broker lists the messages, and let it rest."""
        for _ in range(MESSAGES):
            publish_one_each(broker.amqp_url(), self.vhost, names)
        wanted = {"queues": self.queues + self.excess, "messages": MESSAGES * self.excess}
        wait_for_messages(self.management, self.vhost, **wanted)
        time.sleep(REST_SECONDS)

    def delete_by_pass(self, user: str) -> float:
        """Return the seconds of a pass that deletes the queues. Check that they are stored and all are deleted."""
        names = self.make(user)
        run_pass()
        self.fill(names)
        return self.run_pass()

    def run_pass(self) -> float:
        """Return the seconds of the pass."""
        seconds, report = timed(run_pass)
        if report.errors or (report.deleted, report.queues) != (self.excess, self.queues + self.excess):
            raise AssertionError(f"unexpected report of a pass: {report}")
        return seconds

    def bare(self) -> dict[str, float]:
        """Return the seconds of bare parallel ``deletes``, the ``listing``, and passive ``declares``.

        ``surroundings`` are the parallel requests for notifications: consumers, bindings and arguments.
        """
        names = self.make("nobody")
        self.fill(names)
        params = {**TOTALS, "columns": COLUMNS}
        listing, _ = timed(lambda: self.management.list_queues(self.vhost, params))
        asked = [(self.vhost, name) for name in names]
        declares, depths = timed(lambda: amqp.declare_passively(broker.amqp_url(), asked))
        assert len(depths) == self.excess
        surroundings, _ = timed(lambda: self._surroundings(names))
        with amqp.Sessions(broker.amqp_url()) as sessions:
            deletes, _ = timed(
                lambda: self._side_by_side(lambda name: sessions.of(self.vhost).delete_queue(name), names)
            )
        return {"deletes": deletes, "listing": listing, "declares": declares, "surroundings": surroundings}

    def _surroundings(self, names: list[str]) -> None:
        with ThreadPoolExecutor(1) as beside:
            consumers = beside.submit(amqp.declare_passively, broker.amqp_url(), [(self.vhost, name) for name in names])
            self._side_by_side(partial(self.management.queue_bindings, self.vhost), names)
            self._side_by_side(partial(self.management.queue_arguments, self.vhost), names)
            assert len(consumers.result()) == len(names)

    def _side_by_side(self, do: Any, names: list[str]) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(do, names))


def measure(vhost: str, queues: int, excess: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of alternating passes that delete and bare requests, and the counts of such a pass.

    ``notified``: the queues have an owner to notify; ``unowned``: they have none. ``bare`` is the sum of what both
    need. Each measurement begins after ``REST_SECONDS`` without requests. Otherwise the broker's bursts after earlier
    lists disturb some of them, and bare DELETEs take 0.25 to 0.6 s.
    """
    PulseUser.objects.create(username="notified", ready=True).owners.add(
        Owner.objects.create_user("owner@example.org", vouched=True)
    )
    PulseUser.objects.create(username="unowned", ready=True)
    guarded = ExcessQueues(vhost, queues, excess)
    run_pass()
    for user in ("notified", "unowned"):
        guarded.delete_by_pass(user)
    bare = guarded.bare()
    found: dict[str, list[float]] = {key: [] for key in ("notified", "unowned", "bare", *bare)}
    for _ in range(rounds):
        for user in ("notified", "unowned"):
            found[user].append(guarded.delete_by_pass(user))
        bare = guarded.bare()
        found["bare"].append(bare["deletes"] + bare["listing"] + bare["declares"])
        for key, seconds in bare.items():
            found[key].append(seconds)
    names = guarded.make("notified")
    run_pass()
    guarded.fill(names)
    with CaptureQueriesContext(connection) as captured, counted_requests() as sent:
        guarded.run_pass()
    return {**found, "statements": len(captured), "requests": len(sent)}
