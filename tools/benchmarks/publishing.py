"""Publishing an event to 100 queues, compared to bare pika with confirms on one connection to the same queues."""

from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

QUEUES = 100
ROUNDS = 30

MIN_SPEED = 0.8
MAX_RATIO = 1 / MIN_SPEED
"""Of the time per message: the inverse of the minimum speed."""


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database, with all queues in one vhost and with ten vhosts of ten queues.

    The figures are microseconds per message. The floor is bare pika with the queues of one vhost.
    """
    figures: list[Figure] = []
    for database in services.databases:
        services.say(f"events to {QUEUES} queues on {database}")
        measured = services.measure("tools.benchmarks.publishing_child", database, "/", queues=QUEUES, rounds=ROUNDS)
        figures += _figures(f"an event to {QUEUES} queues, {database}", measured)
    return figures


def _figures(where: str, measured: dict[str, Any]) -> list[Figure]:
    bare = measured["bare"]
    statements = measured["statements"]
    speeds = {name: [1_000_000 / one for one in measured[name]] for name in ("one_vhost", "ten_vhosts", "bare")}
    return [
        Figure(
            where,
            f"one message, ≥ {MIN_SPEED:g} of bare speed",
            "µs",
            measured["one_vhost"],
            bare,
            MAX_RATIO,
        ),
        Figure(where, "one message, ten vhosts of ten queues", "µs", measured["ten_vhosts"], bare),
        Figure(where, "messages a second", "", speeds["one_vhost"], speeds["bare"]),
        Figure(where, "messages a second, ten vhosts", "", speeds["ten_vhosts"], speeds["bare"]),
        Figure(where, "SQL statements, as for 10 queues", "", statements["all"], statements["few"], 1, exact=True),
    ]
