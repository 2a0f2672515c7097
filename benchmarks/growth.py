"""A steady pass beside the listing that it makes, at 1,000 to 50,000 queues: what it costs, and how that grows."""

from functools import cache
from typing import Any

from benchmarks.figures import Figure
from benchmarks.load import filled_vhost
from benchmarks.services import Services

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
ROUNDS = 9

MOST_TIMES = 5.5
"""A pass over 50,000 queues may take so many times as long as one over 10,000."""


def measure(services: Services) -> list[Figure]:
    """Measure it on each database. The floor of a pass is its listing."""
    figures: list[Figure] = []
    for queues in SIZES:
        for database, measured in passes_over(services, queues).items():
            where = f"{queues:,} queues, {database}"
            figures.append(Figure(where, "1 in 10 changed", "s", measured["pass"], measured["listing"]))
            figures.append(Figure(where, "the first pass, all new", "s", [measured["first"]], measured["listing"]))
    for database in services.databases:
        many, fewer = (passes_over(services, queues)[database]["pass"] for queues in (50_000, 10_000))
        figures.append(Figure(f"50,000 queues against 10,000, {database}", "a pass", "s", many, fewer, MOST_TIMES))
    return figures


@cache
def passes_over(services: Services, queues: int) -> dict[str, dict[str, Any]]:
    """Return what passes over so many queues took, by the database. It is measured once in a run."""
    found = {}
    with filled_vhost(services, queues) as vhost:
        for database in services.databases:
            services.say(f"passes over {queues:,} queues on {database}")
            found[database] = services.measure("benchmarks.growth_child", database, vhost, queues=queues, rounds=ROUNDS)
    return found
