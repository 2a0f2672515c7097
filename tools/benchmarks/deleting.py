"""500 deletions in one pass over 10,000 queues, compared to the bare requests."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from django.test import override_settings

from accounts.models import Owner, PulseUser
from core import broker
from queues.guard.once import run_once
from rabbit import amqp
from rabbit.snapshot import COLUMNS, TOTALS
from tools.benchmarks import load
from tools.benchmarks.figures import Figure, in_turn, seconds, timed
from tools.benchmarks.passes import REST_SECONDS
from tools.benchmarks.running import size

QUEUES = size(10_000, 200)
EXCESS = size(500, 20)
"""Fewer than a quarter of all: the brake does not block them."""

ROUNDS = size(9, 2)
MAX_RATIO = 1.2

THREADS = 8
MESSAGES = 3
"""The length of a queue to delete, one more than the limit."""


@override_settings(GUARDIAN_WARN_QUEUE_LENGTH=1, GUARDIAN_MAX_QUEUE_LENGTH=2)
def deleting() -> list[Figure]:
    """Measure passes that delete queues with an owner to notify, and queues without.

    The floor is parallel deletions, the listing, and passive declares. With owners it includes the parallel requests
    for their mails: consumers, bindings and arguments.
    """
    load.declare_queues("/", range(QUEUES))
    load.wait_for_messages("/", queues=QUEUES, messages=0)
    owner = Owner.objects.create_user("owner@example.org", vouched=True)
    PulseUser.objects.create(username="owned", ready=True).owners.add(owner)
    PulseUser.objects.create(username="unowned", ready=True)
    run_once()
    surroundings: list[float] = []
    found = in_turn(
        ROUNDS,
        owned=lambda: delete_by_pass(create_queues("owned")),
        unowned=lambda: delete_by_pass(create_queues("unowned")),
        bare=lambda: delete_bare(create_queues("nobody"), surroundings),
    )
    with_mails = [sum(both) for both in zip(found["bare"], surroundings[-ROUNDS:], strict=True)]
    where = f"{EXCESS} of {QUEUES:,} queues, deleted in one pass"
    return [
        Figure(where, "no owner to notify", "s", found["unowned"], found["bare"], MAX_RATIO),
        Figure(where, "owners notified", "s", found["owned"], with_mails, MAX_RATIO),
    ]


def create_queues(user: str) -> list[str]:
    """Declare and store a Pulse user's queues, fill them over their limit, and let the broker rest."""
    names = [f"queue/{user}/{time.monotonic_ns()}-{number}" for number in range(EXCESS)]
    in_parallel(partial(broker.management().declare_queue, "/", arguments={}), names)
    run_once()
    for _ in range(MESSAGES):
        load.publish_one_each("/", names)
    load.wait_for_messages("/", queues=QUEUES + EXCESS, messages=MESSAGES * EXCESS)
    time.sleep(REST_SECONDS)
    return names


def in_parallel(do: Callable[[str], Any], names: Sequence[str]) -> None:
    """Call ``do`` with each name."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(do, names))


def delete_by_pass(names: Sequence[str]) -> float:
    """Return the seconds of a pass that deletes these queues."""
    took, report = timed(run_once)
    if report.errors or (report.deleted, report.queues) != (len(names), QUEUES + EXCESS):
        raise AssertionError(f"unexpected report of a pass: {report}")
    return took


def delete_bare(names: Sequence[str], surroundings: list[float]) -> float:
    """Return the seconds of the bare requests. Append those of the requests for mails to ``surroundings``."""
    management, url = broker.management(), broker.amqp_url()
    asked = [("/", name) for name in names]

    def for_mails() -> None:
        with ThreadPoolExecutor(1) as beside:
            consumers = beside.submit(amqp.declare_passively, url, asked)
            in_parallel(partial(management.queue_bindings, "/"), names)
            in_parallel(partial(management.queue_arguments, "/"), names)
            assert len(consumers.result()) == len(names)

    surroundings.append(seconds(for_mails))
    listing = seconds(lambda: management.list_queues("/", {**TOTALS, "columns": COLUMNS}))
    declares = seconds(lambda: amqp.declare_passively(url, asked))
    with amqp.Sessions(url) as sessions:
        deletes = seconds(lambda: in_parallel(lambda name: sessions.of("/").delete_queue(name), names))
    return listing + declares + deletes
