"""Deleting a subscription with all its queues, compared to the bare deletions on the broker."""

from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

SIZES = (100, 500)
"""Numbers must be the same for both sizes; the target of times is for the larger."""

ROUNDS = 9

MAX_RATIO = 1.5


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor of the statements is their number for the smaller size."""
    figures: list[Figure] = []
    smallest: dict[str, dict[str, Any]] = {}
    vhost = "bench-cascade"
    services.management.create_vhost(vhost)
    try:
        for queues in SIZES:
            for database in services.databases:
                services.say(f"deleting subscriptions with {queues} queues on {database}")
                measured = services.measure(
                    "tools.benchmarks.cascade_child", database, vhost, queues=queues, rounds=ROUNDS
                )
                smallest.setdefault(database, measured)
                figures += _figures(f"{queues} queues, {database}", measured, smallest[database], queues)
    finally:
        services.management.delete_vhost(vhost)
    return figures


def _figures(where: str, measured: dict[str, Any], smallest: dict[str, Any], queues: int) -> list[Figure]:
    floor = [] if measured is smallest else smallest["statements"]
    most = MAX_RATIO if floor else None
    return [
        Figure(where, "deleting a subscription", "s", measured["cascade"], measured["bare"], most),
        Figure(
            where, "its own SQL statements", "", measured["statements"], floor, limit=1 if floor else None, exact=True
        ),
        Figure(where, "all SQL statements", "", measured["all_statements"]),
        Figure(where, "HTTP requests", "", measured["requests"], limit=queues + 1, exact=True),
    ]
