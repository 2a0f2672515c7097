"""Archiving and replaying a queue, compared to a bare consumer and to bare publishing with confirms."""

import secrets
from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services

CHILD = "tools.benchmarks.archiving_child"

MESSAGES = 10_000
SIZE = 1000
ROUNDS = 7

LARGE_MESSAGES = 20_000
LARGE_SIZE = 64 * 1024

QUEUES = 50
QUEUE_MESSAGES = 8_100
"""A little more than the default deletion limit."""

MAX_ARCHIVE_RATIO = 2.5
MAX_REPLAY_RATIO = 1.5
MAX_MEGABYTES = 150
MAX_PASS_SECONDS = 30


def measure(services: Services) -> list[Figure]:
    """Run the benchmark on each database. Messages are persistent, and queues classic."""
    figures: list[Figure] = []
    for database in services.databases:
        vhost = f"bench-{secrets.token_hex(4)}"
        services.management.create_vhost(vhost)
        try:
            figures += _measure(services, database, vhost)
        finally:
            services.management.delete_vhost(vhost)
    return figures


def _measure(services: Services, database: str, vhost: str) -> list[Figure]:
    def part(name: str, **arguments: Any) -> dict[str, Any]:
        return services.measure(CHILD, database, vhost, part=name, **arguments)

    services.say(f"archiving and replaying {MESSAGES:,} messages on {database}")
    one = part("one_queue", messages=MESSAGES, size=SIZE, rounds=ROUNDS)
    services.say(f"archiving {LARGE_MESSAGES:,} messages of {LARGE_SIZE // 1024} kB on {database}")
    large = part("large_messages", messages=LARGE_MESSAGES, size=LARGE_SIZE)
    services.say(f"passes that archive {QUEUES} queues on {database}")
    passes = part("many_queues", queues=QUEUES, messages=QUEUE_MESSAGES, size=SIZE)
    where = f"{MESSAGES:,} messages of {SIZE:,} bytes, {database}"
    large_where = f"{LARGE_MESSAGES:,} messages of {LARGE_SIZE // 1024} kB, {database}"
    passes_where = f"{QUEUES} queues of {QUEUE_MESSAGES:,} messages over their limit, {database}"
    warned = "queues that the second pass warns about"
    return [
        Figure(where, "archive, and delete the queue", "s", one["archive"], one["consume"], MAX_ARCHIVE_RATIO),
        Figure(where, "replay", "s", one["replay"], one["publish"], MAX_REPLAY_RATIO),
        Figure(large_where, "peak memory", "MB", [large["peak_mb"]], limit=MAX_MEGABYTES),
        Figure(large_where, "messages archived, within 64 MiB", "", [large["archived"]]),
        Figure(passes_where, "the longest pass", "s", [max(passes["seconds"])], limit=MAX_PASS_SECONDS),
        Figure(passes_where, "passes until all are deleted", "", [len(passes["seconds"])]),
        Figure(passes_where, warned, "", [passes["warned"]], limit=1, exact=True),
    ]
