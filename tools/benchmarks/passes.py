"""Passes of the monitor, alternating with their listing requests. Runs in ``tools.benchmarks.child``."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from django.db import connection
from django.test.utils import CaptureQueriesContext

from accounts.models import PulseUser
from core import broker
from queues.guard.monitor import run_pass
from queues.guard.pass_run import Report
from queues.models import Queue, QueueSample
from rabbit import snapshot
from rabbit.amqp import Session
from rabbit.fetching import Fetch
from rabbit.http import Answer, PooledClient
from rabbit.management import Management
from rabbit.snapshot import COLUMNS, TOTALS
from tools.benchmarks.load import MAX_QUEUES_PER_VHOST, publish_one_each, queue_name, user_name, wait_for_messages

T = TypeVar("T")

CHANGE_EVERY = 10
"""A tenth of the queues change between two passes."""

WARM_UPS = 2
COUNTED = 3
"""Passes whose statements and requests are counted. They are not timed, since counting takes time."""

CHANGED_FACTOR = 2
UNCHANGED_FACTOR = 4
"""Steady passes per first pass: more where the results are close to the target."""


class GuardedVhosts:
    """Guarded vhosts with stored queues, whose lengths grow on demand.

    Each vhost but the last has ``MAX_QUEUES_PER_VHOST`` queues.
    """

    def __init__(self, vhosts: Sequence[str], queues: int) -> None:
        self.vhosts = vhosts
        self.queues = queues
        self.management: Management = broker.management()
        params = {**TOTALS, "columns": "name,vhost,messages_ready"}
        rows = [row for vhost in vhosts for row in self.management.list_queues(vhost, params)]
        self._messages = sum(row["messages_ready"] for row in rows)
        self._turn = 0

    def change(self) -> None:
        """Publish a message to every tenth queue, to others each time, and wait until the broker lists them."""
        self._turn += 1
        for number, vhost in enumerate(self.vhosts):
            first, end = number * MAX_QUEUES_PER_VHOST, min((number + 1) * MAX_QUEUES_PER_VHOST, self.queues)
            names = [queue_name(one) for one in range(first + self._turn % CHANGE_EVERY, end, CHANGE_EVERY)]
            publish_one_each(broker.amqp_url(), vhost, names)
            self._messages += len(names)
        wait_for_messages(self.management, *self.vhosts, queues=self.queues, messages=self._messages)

    def run_pass(self, *, new: int = 0, changed: int = 0) -> tuple[float, Report]:
        """Run a pass, check its report, and return its seconds and report."""
        seconds, report = timed(run_pass)
        found = (report.queues, report.new, report.changed, report.gone, report.unknown, report.warned)
        if report.another_pass or report.errors or found != (self.queues, new, changed, 0, 0, 0):
            raise AssertionError(f"unexpected report of a pass: {report}")
        return seconds, report

    def list(self) -> float:
        """Return the seconds of a pass's listing requests, sent in the same way."""
        return timed(
            lambda: list(snapshot.iter_lists(self.management, self.vhosts, {**TOTALS, "columns": COLUMNS}, {}))
        )[0]


def measure(vhost: str, queues: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of first and steady passes, of the listings between them, and counts.

    ``first``: no queue was stored; ``changed``: a tenth of the queues had another length than in the pass before;
    ``unchanged``: none had. For each, ``pass`` and ``listing`` are alternating seconds in the order of measurement, and
    ``own`` the time of passes without their listings. ``statements`` and ``requests`` are counts of a ``changed`` pass.
    """
    users = dict.fromkeys(user_name(number) for number in range(queues))
    PulseUser.objects.bulk_create(PulseUser(username=name, ready=True) for name in users)
    guarded = GuardedVhosts([vhost], queues)
    guarded.run_pass(new=queues)
    first = _alternate(guarded, rounds, new=queues)
    _vacuum()
    changing = queues // CHANGE_EVERY
    for _ in range(WARM_UPS):
        guarded.change()
        guarded.list()
        guarded.run_pass(changed=changing)
    changed = _alternate(guarded, CHANGED_FACTOR * rounds, changed=changing)
    unchanged = _alternate(guarded, UNCHANGED_FACTOR * rounds)
    statements, requests = [], []
    for _ in range(COUNTED):
        guarded.change()
        with CaptureQueriesContext(connection) as captured, counted_requests() as sent:
            guarded.run_pass(changed=changing)
        statements.append(len(captured))
        requests.append(len(sent))
    return {
        "first": first,
        "changed": changed,
        "unchanged": unchanged,
        "statements": statements,
        "requests": requests,
    }


def _vacuum() -> None:
    """Vacuum the dead rows of the first passes, as PostgreSQL's autovacuum does over time."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")


def _alternate(guarded: GuardedVhosts, rounds: int, *, new: int = 0, changed: int = 0) -> dict[str, list[float]]:
    passes, listings, own = [], [], []
    for number in range(rounds):
        if new:
            QueueSample.objects.all()._raw_delete("default")
            Queue.objects.all()._raw_delete("default")
        if changed:
            guarded.change()
        if number % 2:
            listings.append(guarded.list())
        seconds, report = guarded.run_pass(new=new, changed=changed)
        passes.append(seconds)
        own.append(seconds - report.listing_seconds)
        if not number % 2:
            listings.append(guarded.list())
    return {"pass": passes, "listing": listings, "own": own}


def timed(do: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds and the result of a call."""
    gc.collect()  # so that no call pays for the garbage of an earlier one
    began = time.perf_counter()
    result = do()
    return time.perf_counter() - began, result


@contextmanager
def counted_requests() -> Iterator[list[str]]:
    """Yield a list of the requests to the management API, as method and path, and of deletions over AMQP."""
    sent: list[str] = []
    send = PooledClient.send
    delete = Session.delete_queue

    def recorded(client: PooledClient, method: str, target: str, *arguments: Any, **options: Any) -> Answer:
        sent.append(f"{method} {target.partition('?')[0]}")
        return send(client, method, target, *arguments, **options)

    delete_fetched = Fetch.delete_queue

    def recorded_deletion(session: Session, name: str, **conditions: bool) -> int:
        sent.append(f"DELETE {name} in {session.vhost}")
        return delete(session, name, **conditions)

    def recorded_archived_deletion(fetch: Fetch) -> int:
        sent.append(f"DELETE {fetch.name} in {fetch.vhost}")
        return delete_fetched(fetch)

    with (
        mock.patch.object(PooledClient, "send", recorded),
        mock.patch.object(Session, "delete_queue", recorded_deletion),
        mock.patch.object(Fetch, "delete_queue", recorded_archived_deletion),
    ):
        yield sent
