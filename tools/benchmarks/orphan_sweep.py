"""The sweep of 100 orphans beside 1,000 and 10,000 registered queues."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rabbit.arguments import DEAD_LETTER_QUEUE_ARGUMENTS, REGISTERED_QUEUE_ARGUMENTS
from rabbit.names import DEAD_LETTER_QUEUE, subscription_queue
from rabbit.permissions import for_subscription
from tools.benchmarks.figures import Figure
from tools.benchmarks.load import import_definitions
from tools.benchmarks.services import Services

SIZES = (1_000, 10_000)
ORPHANS = 100
ROUNDS = 21

OWNERS = 10
"""Each owner has a vhost, and the queues are distributed over them."""

OFFERINGS = 10
"""Each subscription has a queue for each offering."""

TYPE = "order"

MAX_RATIO = 1.6


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. The floor is the listing and as many bare DELETEs from as many threads."""
    figures: list[Figure] = []
    smallest: dict[str, dict[str, Any]] = {}
    for queues in SIZES:
        with _registered(services, queues) as vhosts:
            for database in services.databases:
                services.say(f"sweeps over {queues:,} queues on {database}")
                told: dict[str, Any] = {"vhosts": vhosts, "queues": queues, "orphans": ORPHANS, "rounds": ROUNDS}
                measured = services.measure("tools.benchmarks.orphan_sweep_child", database, "/", **told)
                smallest.setdefault(database, measured)
                most = MAX_RATIO if queues == SIZES[-1] else None
                figures += _figures(f"{queues:,} queues, {database}", measured, smallest[database], most)
    return figures


def subscriptions_of(vhost: str, queues: int) -> list[str]:
    """Return the hex UUIDs of an owner's subscriptions, where ``queues`` is the total of all owners."""
    return [uuid.uuid5(uuid.UUID(vhost), str(number)).hex for number in range(queues // OWNERS // OFFERINGS)]


def queue_name(subscription: str, offering: int) -> str:
    """Return the name of a subscription's queue for the offering of this number."""
    return subscription_queue(subscription, uuid.UUID(int=offering).hex, TYPE)


@contextmanager
def _registered(services: Services, queues: int) -> Iterator[list[str]]:
    """Create agents' queues with their users, and delete all of them afterwards."""
    services.say(f"declaring {queues:,} agents' queues in {OWNERS} vhosts")
    vhosts = [uuid.uuid4().hex for _ in range(OWNERS)]
    subscriptions = [(vhost, one) for vhost in vhosts for one in subscriptions_of(vhost, queues)]
    names = [(vhost, queue_name(one, offering)) for vhost, one in subscriptions for offering in range(OFFERINGS)]
    try:
        for vhost in vhosts:
            services.management.create_vhost(vhost)
            services.management.declare_queue(vhost, DEAD_LETTER_QUEUE, DEAD_LETTER_QUEUE_ARGUMENTS)
        import_definitions(
            services,
            {
                "users": [{"name": one, "password_hash": "", "tags": ""} for _, one in subscriptions],
                "permissions": [
                    {"user": one, "vhost": vhost, **for_subscription(one)._asdict()} for vhost, one in subscriptions
                ],
                "queues": [
                    {
                        "vhost": vhost,
                        "name": name,
                        "durable": True,
                        "auto_delete": False,
                        "arguments": dict(REGISTERED_QUEUE_ARGUMENTS),
                    }
                    for vhost, name in names
                ],
            },
        )
        yield vhosts
    finally:
        services.say(f"deleting {queues:,} queues")
        for vhost in vhosts:
            services.management.delete_vhost(vhost)
        for _, subscription in subscriptions:
            services.management.delete_user(subscription)


def _figures(where: str, measured: dict[str, Any], smallest: dict[str, Any], limit: float | None) -> list[Figure]:
    figures = [
        Figure(where, f"{ORPHANS} orphans", "s", measured["sweep"], measured["bare"], limit),
        Figure(where, "the listing alone", "s", measured["listing"]),
    ]
    for name, what in (("statements", "SQL statements"), ("requests", "HTTP requests")):
        floor = [] if measured is smallest else smallest[name]
        figures.append(Figure(where, what, "", measured[name], floor, limit=1 if floor else None, exact=True))
    return figures
