"""A worker of the message store with batches of 100, compared to a bare loop over the store."""

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

BATCH = 100
MESSAGES = 40_000
BYTES = 1000
ROUNDS = 15

MAX_RATIO = 1 / 0.8
"""Of the time per message: the inverse of the minimum speed."""


def measure(services: Services) -> list[Figure]:
    """Run both alternately on each database, from a queue's first message to its last.

    The bare loop reads batches and calls an empty function. The worker also plans shares, checks its leases before each
    message, and records its position every second.
    """
    figures: list[Figure] = []
    for database in services.databases:
        services.say(f"handling {MESSAGES:,} messages on {database}")
        measured = services.measure(
            "tools.benchmarks.message_store_worker_child",
            database,
            "/",
            rounds=ROUNDS,
            messages=MESSAGES,
            size=BYTES,
            batch=BATCH,
        )
        where = f"{MESSAGES:,} messages of {BYTES} bytes, batch {BATCH}, {database}"
        took = {kind: [seconds / MESSAGES * 1_000_000 for seconds in measured[kind]] for kind in ("worker", "bare")}
        speeds = {kind: [1_000_000 / one for one in times] for kind, times in took.items()}
        figures += [
            Figure(where, "one message, ≥ 0.8 of bare", "µs", took["worker"], took["bare"], MAX_RATIO),
            Figure(where, "messages a second", "", speeds["worker"], speeds["bare"]),
        ]
    return figures
