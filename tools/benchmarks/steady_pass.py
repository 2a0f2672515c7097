"""Passes over 2,000 and 10,000 queues with two bindings each, compared to their listings."""

from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.load import filled_vhost
from tools.benchmarks.services import Services

ROUNDS = {2_000: 3, 10_000: 15}
"""First passes by number of queues. Counts must be the same for both sizes; the targets of times and memory are for the
larger."""

MAX_RATIO_CHANGED = 1.35
MAX_RATIO_UNCHANGED = 1.35
MAX_RATIO_FIRST = 2.0
MAX_MEGABYTES = 250


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. A pass's floor is its listing; a count's is that of the smaller size."""
    figures: list[Figure] = []
    smallest: dict[str, dict[str, Any]] = {}
    for queues, rounds in ROUNDS.items():
        with filled_vhost(services, queues) as vhost:
            for database in services.databases:
                services.say(f"passes over {queues:,} queues on {database}")
                measured = services.measure("tools.benchmarks.passes", database, vhost, queues=queues, rounds=rounds)
                smallest.setdefault(database, measured)
                figures += _figures(f"{queues:,} queues, {database}", measured, smallest[database])
    return figures


def _figures(where: str, measured: dict[str, Any], smallest: dict[str, Any]) -> list[Figure]:
    changed, unchanged, first = measured["changed"], measured["unchanged"], measured["first"]
    is_judged = measured is not smallest
    passes = [
        ("1 in 10 changed", changed, MAX_RATIO_CHANGED),
        ("nothing changed", unchanged, MAX_RATIO_UNCHANGED),
        ("all of them new", first, MAX_RATIO_FIRST),
    ]
    figures = [
        Figure(where, what, "s", found["pass"], found["listing"], most if is_judged else None)
        for what, found, most in passes
    ]
    figures.append(Figure(where, "without its listing", "s", changed["own"], changed["listing"]))
    for name, what in (("statements", "SQL statements"), ("requests", "HTTP requests")):
        floor = smallest[name] if is_judged else []
        figures.append(Figure(where, what, "", measured[name], floor, limit=1 if is_judged else None, exact=True))
    peak = Figure(where, "peak memory", "MB", [measured["peak_mb"]], limit=MAX_MEGABYTES if is_judged else None)
    return [*figures, peak]
