"""A steady pass beside the listing that it makes, at 2,000 and at 10,000 queues with two bindings each."""

from typing import Any

from benchmarks.figures import Figure
from benchmarks.load import filled_vhost
from benchmarks.services import Services

SIZES = (2_000, 10_000)
ROUNDS = 15

MOST_RATIO = 1.6
MOST_MEGABYTES = 400


def measure(services: Services) -> list[Figure]:
    """Measure it on each database. The floor of a pass is its listing; that of a number, the one at the lowest size."""
    figures: list[Figure] = []
    smallest: dict[str, dict[str, Any]] = {}
    for queues in SIZES:
        with filled_vhost(services, queues) as vhost:
            for database in services.databases:
                services.say(f"passes over {queues:,} queues on {database}")
                measured = services.measure("benchmarks.passes", database, vhost, queues=queues, rounds=ROUNDS)
                smallest.setdefault(database, measured)
                figures += _figures(f"{queues:,} queues, {database}", measured, smallest[database])
    return figures


def _figures(where: str, measured: dict[str, Any], smallest: dict[str, Any]) -> list[Figure]:
    changed, unchanged = measured["changed"], measured["unchanged"]
    figures = [
        Figure(where, "1 in 10 changed", "s", changed["pass"], changed["listing"], MOST_RATIO),
        Figure(where, "nothing changed", "s", unchanged["pass"], unchanged["listing"], MOST_RATIO),
        Figure(where, "without its listing", "s", changed["own"], changed["listing"]),
    ]
    for name, what in (("statements", "SQL statements"), ("requests", "HTTP requests")):
        floor = [] if measured is smallest else smallest[name]
        figures.append(Figure(where, what, "", measured[name], floor, most=1 if floor else None, exactly=True))
    return [*figures, Figure(where, "peak memory", "MB", [measured["peak_mb"]], most=MOST_MEGABYTES)]
