"""The growth of a steady pass from 1,000 to 50,000 queues, compared to its listing.

Each vhost has at most 10,000 queues, since the time of the broker's list of a vhost grows quadratically in the end.
Twice as many in one vhost are measured, too. The queues of the first vhost belong to Pulse users, which have one vhost
only.
"""

import time
from functools import cache
from typing import Any, NamedTuple

from rabbit.snapshot import COLUMNS, TOTALS
from tools.benchmarks.figures import Figure
from tools.benchmarks.load import MAX_QUEUES_PER_VHOST, REST_SECONDS, fill_vhost
from tools.benchmarks.services import Services, with_separate_broker

ROUNDS = {1_000: 5, 2_000: 5, 5_000: 5, 10_000: 9, 20_000: 3, 50_000: 9}
"""Rounds by number of queues: more where there is a target."""

LISTINGS = 9
"""Listings of the vhost with twice as many queues, and of another vhost."""

NEW_QUEUES_PER_LIST = 1_500
"""New queues for each list that lets the broker settle. After declaring 30,000 queues, lists of all 50,000 took twice
as long, 4 to 7 s, for about two minutes. After three minutes of rest, the first two or three lists still did."""

MAX_GROWTH = 5.5
"""The limit for the ratio of a pass over 50,000 queues to one over 10,000."""


class Grown(NamedTuple):
    """Results of passes by number of queues and database, and the seconds of listings.

    ``few`` is for a normal vhost, ``many`` for one with twice as many queues.
    """

    passes: dict[tuple[int, str], dict[str, Any]]
    few: list[float]
    many: list[float]


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor of a pass is its listing."""
    grown = grow(services)
    figures: list[Figure] = []
    for queues in ROUNDS:
        for database in services.databases:
            found = grown.passes[queues, database]
            where = f"{queues:,} queues, {database}"
            figures.append(Figure(where, "1 in 10 changed", "s", found["pass"], found["listing"]))
            figures.append(Figure(where, "without its listing", "s", found["own"], found["listing"]))
            figures.append(Figure(where, "the first pass, all new", "s", [found["first"]], found["listing"]))
    for database in services.databases:
        many, fewer = (grown.passes[queues, database]["pass"] for queues in (50_000, 10_000))
        figures.append(Figure(f"50,000 queues against 10,000, {database}", "a pass", "s", many, fewer, MAX_GROWTH))
    where = f"one vhost with {2 * MAX_QUEUES_PER_VHOST:,} queues against one with {MAX_QUEUES_PER_VHOST:,}"
    figures.append(Figure(where, "the list alone", "s", grown.many, grown.few))
    return figures


@cache
def grow(services: Services) -> Grown:
    """Add queues to a broker in steps, and measure after each. This happens once per run."""
    passes = {}
    with with_separate_broker(services) as apart:
        vhosts: list[str] = []
        made = 0
        for queues, rounds in ROUNDS.items():
            new = queues - made
            while made < queues:
                there = made % MAX_QUEUES_PER_VHOST
                if not there:
                    vhosts.append(f"bench-{len(vhosts)}")
                    apart.management.create_vhost(vhosts[-1])
                end = min(queues, len(vhosts) * MAX_QUEUES_PER_VHOST)
                fill_vhost(apart, vhosts[-1], range(made, end), there=there)
                made = end
            _settle(apart, vhosts, new)
            for database in services.databases:
                services.say(f"passes over {queues:,} queues on {database}")
                told = {"vhosts": vhosts, "queues": queues, "rounds": rounds}
                settings = {"GUARDIAN_VHOSTS": ",".join(vhosts)}
                passes[queues, database] = apart.measure(
                    "tools.benchmarks.growth_child", database, vhosts[0], settings=settings, **told
                )
        few = _listings(apart, vhosts[0])
        fill_vhost(apart, vhosts[0], range(made, made + MAX_QUEUES_PER_VHOST), there=MAX_QUEUES_PER_VHOST)
        _settle(apart, vhosts, MAX_QUEUES_PER_VHOST)
        return Grown(passes, few, _listings(apart, vhosts[0]))


def _settle(services: Services, vhosts: list[str], new: int) -> None:
    lists = new // NEW_QUEUES_PER_LIST
    if lists:
        services.say(f"letting the broker settle, where {new:,} queues are new: {lists} lists")
    for _ in range(lists):
        time.sleep(REST_SECONDS)
        for vhost in vhosts:
            _list(services, vhost)


def _listings(services: Services, vhost: str) -> list[float]:
    seconds = []
    for _ in range(LISTINGS):
        began = time.perf_counter()
        _list(services, vhost)
        seconds.append(time.perf_counter() - began)
    return seconds


def _list(services: Services, vhost: str) -> None:
    services.management.list_queues(vhost, {**TOTALS, "columns": COLUMNS})
