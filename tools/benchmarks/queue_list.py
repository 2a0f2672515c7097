"""The page with the list of 10,000 queues and its refresh, for an owner of 500 queues and for an operator."""

from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

QUEUES = 10_000
ROUNDS = 100

MAX_MILLISECONDS = {"list": 100, "search": 100, "refresh": 100}
MAX_STATEMENTS = 10


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor of a request is the time of its bare SQL statements."""
    figures: list[Figure] = []
    for database in services.databases:
        services.say(f"the list of {QUEUES:,} queues on {database}")
        measured = services.measure("tools.benchmarks.queue_list_child", database, "/", queues=QUEUES, rounds=ROUNDS)
        for visitor in ("owner", "operator"):
            figures += _figures(f"{QUEUES:,} queues, {visitor}, {database}", measured[visitor])
    return figures


def _figures(where: str, measured: dict[str, Any]) -> list[Figure]:
    figures: list[Figure] = []
    for what, most in MAX_MILLISECONDS.items():
        found = measured[what]
        figures += [
            Figure(where, what, "ms", found["request"], found["database"]),
            Figure(where, f"{what}, 95th percentile", "ms", [found["p95"]], limit=most),
            Figure(where, f"{what}, SQL statements", "", [found["statements"]], limit=MAX_STATEMENTS),
        ]
    return figures
