"""The message store, compared to bare SQL: batches and reads, a million queues, ten million messages in a queue."""

from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

BATCH = 100
BYTES = 1000
ROUNDS = 200

FEW, MANY = 1_000, 1_000_000
MESSAGES_EACH = 3

DEEP = 10_000_000

MIN_SPEED = {"push": 0.5, "read": 0.4}
"""The minimum speed relative to the bare statement."""

MAX_GROWTH = 1.2
"""The limit for the ratio of the time with very many queues or messages to that with a thousand."""


def measure(services: Services) -> list[Figure]:
    """Run the benchmark of batches and reads on each database, and that of large numbers on PostgreSQL."""
    figures: list[Figure] = []
    for database in services.databases:
        services.say(f"pushing and reading {BATCH} messages of {BYTES} bytes on {database}")
        measured = services.measure(
            "tools.benchmarks.message_store_batches", database, "/", rounds=ROUNDS, messages=BATCH, size=BYTES
        )
        figures += _batches(f"{BATCH} messages of {BYTES} bytes, {database}", measured)
    if services.cluster is not None:
        services.say(f"creating {MANY:,} queues on PostgreSQL, and using them")
        measured = services.measure(
            "tools.benchmarks.message_store_queues",
            "PostgreSQL",
            "/",
            few=FEW,
            many=MANY,
            each=MESSAGES_EACH,
            rounds=ROUNDS,
        )
        figures += _queues(f"{MANY:,} queues of {MESSAGES_EACH} messages (floor: {FEW:,})", measured)
        services.say(f"filling a queue with {DEEP:,} messages on PostgreSQL, and reading in it")
        measured = services.measure(
            "tools.benchmarks.message_store_deep", "PostgreSQL", "/", few=FEW, many=DEEP, messages=BATCH, rounds=ROUNDS
        )
        figures += _deep(f"{BATCH} of {DEEP:,} messages in a queue (floor: of {FEW:,})", measured)
    return figures


def _batches(where: str, measured: dict[str, Any]) -> list[Figure]:
    return [
        Figure(where, what, "µs", measured[what], measured[f"bare {what}"], limit=1 / least)
        for what, least in MIN_SPEED.items()
    ]


def _queues(where: str, measured: dict[str, Any]) -> list[Figure]:
    return [
        Figure(where, what, "µs", measured["many"][what], measured["few"][what], limit=MAX_GROWTH)
        for what in ("create", "post", "read")
    ]


def _deep(where: str, measured: dict[str, Any]) -> list[Figure]:
    return [
        *(
            Figure(where, f"read {what}", "µs", times, measured["few"], limit=MAX_GROWTH)
            for what, times in measured["many"].items()
        ),
        Figure(where, "count all of them", "ms", measured["count"]),
    ]
