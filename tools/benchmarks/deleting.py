"""500 deletions in one pass over 10,000 queues, compared to the bare requests."""

from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.load import filled_vhost
from tools.benchmarks.services import Services

QUEUES = 10_000
EXCESS = 500
ROUNDS = 9

MAX_RATIO = 1.2


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor is bare parallel DELETEs, the listing, and passive declares.

    With notifications to owners, the floor includes the parallel requests for their mails: bindings, consumers and
    arguments. The brake does not block: 500 are fewer than a quarter of all.
    """
    figures: list[Figure] = []
    settings = {"GUARDIAN_WARN_QUEUE_LENGTH": "1", "GUARDIAN_MAX_QUEUE_LENGTH": "2"}
    with filled_vhost(services, QUEUES) as vhost:
        for database in services.databases:
            services.say(f"passes that delete {EXCESS} of {QUEUES:,} queues on {database}")
            told = {"queues": QUEUES, "excess": EXCESS, "rounds": ROUNDS}
            measured = services.measure("tools.benchmarks.deleting_child", database, vhost, settings=settings, **told)
            figures += _figures(f"{EXCESS} of {QUEUES:,} queues, {database}", measured)
    return figures


def _figures(where: str, measured: dict[str, Any]) -> list[Figure]:
    bare = measured["bare"]
    to_be_told = [one + more for one, more in zip(bare, measured["surroundings"], strict=True)]
    return [
        Figure(where, "a pass, no owner to notify", "s", measured["unowned"], bare, MAX_RATIO),
        Figure(where, "a pass, with owners to notify", "s", measured["notified"], to_be_told, MAX_RATIO),
        Figure(where, "the same, against DELETEs, list and declares only", "s", measured["notified"], bare),
        Figure(where, "bare: the DELETEs alone", "s", measured["deletes"]),
        Figure(where, "bare: the listing alone", "s", measured["listing"]),
        Figure(where, "bare: the passive declares alone", "s", measured["declares"]),
        Figure(where, "bare: consumers, bindings and arguments, for the mails", "s", measured["surroundings"]),
        Figure(where, "SQL statements", "", [measured["statements"]]),
        Figure(where, "HTTP requests", "", [measured["requests"]]),
    ]
