"""A worker of the message store, at batch 100, beside a bare loop over the store that does the same work."""

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

BATCH = 100
MESSAGES = 40_000
BYTES = 1000
ROUNDS = 15

MAX_RATIO = 1 / 0.8
"""Of the time for one message, which is the least speed turned over."""


def measure(services: Services) -> list[Figure]:
    """Measure both on each database, by turns, from a queue's first message to its last.

    The bare loop reads batches one after the other and calls a function that does nothing. The worker shares out,
    makes sure before each message that it still holds its partition, and records how far it is each second.
    """
    figures: list[Figure] = []
    for database in services.databases:
        services.say(f"working through {MESSAGES:,} messages on {database}")
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
