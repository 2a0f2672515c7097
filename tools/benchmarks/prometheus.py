"""A steady pass with lengths from the nodes' Prometheus endpoints, compared to the listing that it saves."""

from statistics import median
from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.load import filled_vhost
from tools.benchmarks.services import Services

QUEUES = 10_000
ROUNDS = 11

MAX_RATIO = 0.5

PASSES_PER_MINUTE = 12
"""With a poll interval of five seconds. One of them uses the list."""


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor is the listing that these passes save."""
    figures: list[Figure] = []
    with filled_vhost(services, QUEUES) as vhost:
        for database in services.databases:
            services.say(f"passes with Prometheus over {QUEUES:,} queues on {database}")
            measured = services.measure(
                "tools.benchmarks.prometheus_child",
                database,
                vhost,
                settings={"GUARDIAN_SNAPSHOT": "prometheus"},
                queues=QUEUES,
                rounds=ROUNDS,
            )
            figures += _figures(f"{QUEUES:,} queues, {database}", measured)
    return figures


def _figures(where: str, measured: dict[str, Any]) -> list[Figure]:
    passes, listings = measured["pass"], measured["listing"]
    share = 1 / PASSES_PER_MINUTE
    mean = [(1 - share) * seconds + share * (seconds + median(listings)) for seconds in passes]
    return [
        Figure(where, "1 in 10 changed", "s", passes, listings, MAX_RATIO),
        Figure(where, "the same, and a list each minute", "s", mean, listings),
        Figure(where, "the figures alone", "s", measured["scrape"], listings),
        Figure(where, "SQL statements", "", [measured["statements"]]),
        Figure(where, "HTTP requests", "", [measured["requests"]]),
        Figure(where, "peak memory", "MB", [measured["peak_mb"]]),
    ]
