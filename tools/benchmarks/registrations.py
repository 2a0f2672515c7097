"""Registrations through the REST API under gunicorn: eight concurrent ones, and one after another."""

from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

QUEUES = 108
ROUNDS = 9

MAX_RATIO = 2
"""Of an empty request followed by a bare PUT."""


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor is an authenticated empty POST plus a bare PUT of the queue."""
    figures: list[Figure] = []
    for database in services.databases:
        services.say(f"registering {ROUNDS * QUEUES} queues, eight concurrently, then one by one, on {database}")
        measured = services.measure("tools.benchmarks.registrations_child", database, "/", queues=QUEUES, rounds=ROUNDS)
        figures += _figures(f"queues of agents, {database}", measured)
    return figures


def _figures(where: str, measured: dict[str, Any]) -> list[Figure]:
    return [
        _figure(where, "a new queue, one after another", measured["one"], limit=MAX_RATIO),
        _figure(where, "a new queue, eight at once", measured["eight"], limit=MAX_RATIO),
        _figure(where, "an existing queue, one after another", measured["again"]),
        Figure(where, "a new agent's subscription and queue", "ms", measured["agents"]),
        Figure(where, "new queues a second, one after another", "", [_a_second(measured["one"])]),
        Figure(where, "new queues a second, eight at once", "", [_a_second(measured["eight"])]),
    ]


def _figure(where: str, what: str, measured: dict[str, list[float]], limit: float | None = None) -> Figure:
    floor = [post + put for post, put in zip(measured["post"], measured["put"], strict=True)]
    return Figure(where, what, "ms", measured["registration"], floor, limit)


def _a_second(measured: dict[str, list[float]]) -> float:
    times = measured["registration"]
    return 1000 * len(times) / sum(times)
