"""The message store on three Cassandra nodes: a million queues, ten million messages in a queue, and batches."""

from pathlib import Path
from typing import Any

from tools.benchmarks.figures import Figure
from tools.benchmarks.services import Services
from tools.cassandra import PrivateRing

FEW, MANY = 1_000, 1_000_000
MESSAGES_EACH = 3
DEEP = 10_000_000
BYTES = 100
"""The size of a message."""

BATCH = 100
ROUNDS = 200

MAX_GROWTH = 1.2
"""The limit for the ratio of the time with very many queues or messages to that with a thousand."""

MAX_PUSH = 2
"""The limit for the ratio of the time of a push to that of the same statements with the bare driver."""

JOIN_SECONDS = 900
"""How long a node may take to copy the data of the first one."""


def measure(services: Services) -> list[Figure]:
    """Fill one node, let two others join and copy its data, and measure on all three."""
    ring = PrivateRing(copies_data=True)
    try:
        first = ring.nodes[0]
        settings = {
            "MESSAGE_STORE": "cassandra",
            "CASSANDRA_HOSTS": first.hosts,
            "CASSANDRA_REPLICATION": "1",
            "MESSAGE_STORE_DELAY_SECONDS": "30",  # a busy node takes seconds
        }
        first.start(JOIN_SECONDS)
        services.say(f"filling Cassandra: {MANY:,} queues, and one of {DEEP:,} messages")
        services.measure(
            "tools.benchmarks.message_store_cassandra_fill",
            "SQLite",
            "/",
            settings=settings,
            few=FEW,
            many=MANY,
            each=MESSAGES_EACH,
            deep=DEEP,
            size=BYTES,
        )
        services.say("two more nodes join")
        ring.start(JOIN_SECONDS)
        services.say("measuring")
        measured = services.measure(
            "tools.benchmarks.message_store_cassandra_child",
            "SQLite",
            "/",
            settings=settings | {"CASSANDRA_HOSTS": ring.hosts, "CASSANDRA_REPLICATION": "3"},
            few=FEW,
            many=MANY,
            each=MESSAGES_EACH,
            batch=BATCH,
            size=BYTES,
            rounds=ROUNDS,
        )
        copy = ring.nodes[1].directory / "data"
        return [*_times(measured), *_sizes(copy)]
    finally:
        ring.stop()


def _times(measured: dict[str, Any]) -> list[Figure]:
    queues, deep = measured["queues"], measured["deep"]
    where = f"{MANY:,} queues of {MESSAGES_EACH} messages on Cassandra (floor: {FEW:,})"
    figures = [
        Figure(where, what, "µs", queues["many"][what], queues["few"][what], limit=MAX_GROWTH)
        for what in ("create", "post", "read")
    ]
    where = f"{BATCH} of {DEEP:,} messages in a queue on Cassandra (floor: of {FEW:,})"
    figures += [
        Figure(where, f"read {what}", "µs", times, deep["few"], limit=MAX_GROWTH)
        for what, times in deep["many"].items()
    ]
    where = f"{BATCH} messages of {BYTES} bytes on Cassandra (floor: the bare driver)"
    return [*figures, Figure(where, "push", "µs", measured["push"]["push"], measured["push"]["bare"], limit=MAX_PUSH)]


def _sizes(data: Path) -> list[Figure]:
    """Return the disk space of one replica."""

    def of(keyspace: str, *tables: str) -> int:
        files = (file for table in tables for file in (data / keyspace).glob(f"{table}-*/*") if file.is_file())
        return sum(file.stat().st_size for file in files)

    of_queues = of("many", "queues", "names", "buckets")
    of_messages, of_deep = of("many", "messages"), of("deep", "messages", "buckets")
    where = "disk space of a replica, with messages of random bytes"
    return [
        Figure(where, "a queue, without its messages", "bytes", [of_queues / MANY]),
        Figure(where, f"a message of {BYTES} bytes in a queue of {MESSAGES_EACH}", "bytes",
               [of_messages / (MANY * MESSAGES_EACH)]),
        Figure(where, f"a message of {BYTES} bytes in a queue of {DEEP:,}", "bytes", [of_deep / DEEP]),
    ]  # fmt: skip
