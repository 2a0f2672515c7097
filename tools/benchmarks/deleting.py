"""Passes that decide to delete 500 of 10,000 queues, or find 500 that wait, compared to one with none."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from django.test import override_settings

from accounts.models import Owner, PulseUser
from core import broker
from queues.guard import deleter
from queues.guard.monitor import run_pass
from queues.guard.once import run_once
from queues.models import Queue
from tools.benchmarks import load
from tools.benchmarks.figures import Figure, in_turn, timed
from tools.benchmarks.passes import REST_SECONDS
from tools.benchmarks.running import size

QUEUES = size(10_000, 200)
EXCESS = size(500, 20)
"""Fewer than a quarter of all: the brake does not block them."""

ROUNDS = size(5, 2)
MAX_RATIO = 1.2

THREADS = 8
MESSAGES = 3
"""The length of a queue to delete, one more than the limit."""


@override_settings(GUARDIAN_WARN_QUEUE_LENGTH=1, GUARDIAN_MAX_QUEUE_LENGTH=2)
def deleting() -> list[Figure]:
    """Measure passes with and without deletions, and the deletions, with an owner to notify."""
    load.declare_queues("/", range(QUEUES))
    load.wait_for_messages("/", queues=QUEUES, messages=0)
    owner = Owner.objects.create_user("owner@example.org", vouched=True)
    PulseUser.objects.create(username="owned", ready=True).owners.add(owner)
    run_once()
    deletions: list[float] = []

    def none() -> float:
        delete()
        return seconds_of_pass(0)

    def deciding() -> float:
        delete()
        create_queues()
        return seconds_of_pass(EXCESS)

    def waiting() -> float:
        if not Queue.objects.filter(state=Queue.State.DELETING).exists():
            deciding()
        return seconds_of_pass(0)

    def delete() -> None:
        took, outcome = timed(deleter.run)
        if outcome is not None and outcome.deleted:
            deletions.append(took)

    found = in_turn(ROUNDS, none=none, deciding=deciding, waiting=waiting)
    where = f"a pass over {QUEUES:,} queues"
    return [
        Figure(where, f"decides to delete {EXCESS}", "s", found["deciding"], found["none"], MAX_RATIO),
        Figure(where, f"{EXCESS} wait to be deleted", "s", found["waiting"], found["none"], MAX_RATIO),
        Figure("the deleter", f"archives and deletes {EXCESS} queues", "s", deletions),
    ]


def create_queues() -> None:
    """Declare and store queues of the Pulse user, fill them over their limit, and let the broker rest."""
    names: Sequence[str] = [f"queue/owned/{time.monotonic_ns()}-{number}" for number in range(EXCESS)]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda name: broker.management().declare_queue("/", name, arguments={}), names))
    run_once()
    for _ in range(MESSAGES):
        load.publish_one_each("/", names)
    load.wait_for_messages("/", queues=QUEUES + EXCESS, messages=MESSAGES * EXCESS)


def seconds_of_pass(decided: int) -> float:
    """Return the seconds of a pass, and check how many deletions it decided."""
    time.sleep(REST_SECONDS)
    took, report = timed(run_pass)
    if report.errors or len(report.decided) != decided:
        raise AssertionError(f"unexpected report of a pass: {report}")
    return took
