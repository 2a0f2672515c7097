"""A steady pass beside the listing that it makes, at 1,000 to 50,000 queues: what it costs, and how that grows.

No vhost has more than 10,000 of them, as the broker's own list of one vhost grows with the square in the end.
Twice as many in one are measured too. The queues of the first one belong to Pulse users, as there is but one vhost
where they can.
"""

import time
from functools import cache
from typing import Any, NamedTuple

from rabbit.snapshot import COLUMNS, TOTALS
from tools.benchmarks.figures import Figure
from tools.benchmarks.load import MAX_QUEUES_PER_VHOST, REST_SECONDS, fill_vhost
from tools.benchmarks.services import Services, with_separate_broker

ROUNDS = {1_000: 5, 2_000: 5, 5_000: 5, 10_000: 9, 20_000: 3, 50_000: 9}
"""The rounds at each number of queues: more where it is judged."""

LISTINGS = 9
"""Of the vhost with twice as many queues, and of one that is as full as any."""

NEW_QUEUES_PER_LIST = 1_500
"""Queues just made for each list that lets the broker settle. Where 30,000 were made, those of all 50,000 took twice as
long, 4 to 7 s, for some two minutes; where it was left alone for three, the first two or three still did."""

MAX_GROWTH = 5.5
"""A pass over 50,000 queues may take so many times as long as one over 10,000."""


class Grown(NamedTuple):
    """What passes over so many queues took, by their number and the database; and the seconds of listings.

    ``few`` are those of a vhost as full as any, ``many`` those of one with twice as many queues.
    """

    passes: dict[tuple[int, str], dict[str, Any]]
    few: list[float]
    many: list[float]


def measure(services: Services) -> list[Figure]:
    """Measure it on each database. The floor of a pass is its listing."""
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
    """Have a broker get more and more queues, and measure in between. It is done once in a run."""
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
