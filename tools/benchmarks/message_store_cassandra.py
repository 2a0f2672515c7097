"""The message store on three Cassandra nodes: a million queues, ten million messages in a queue, and batches."""

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from cassandra import ConsistencyLevel
from cassandra.query import BatchStatement, BatchType
from django.test import override_settings

from guardian_store._ids import TICKS_PER_SECOND, Place, message_id, now, place, random_rests
from message_store.cassandra import buckets, cql, setup
from message_store.cassandra.cluster import ERRORS, batch, open_cluster
from message_store.cassandra.store import CassandraStore
from message_store.store import SIGNED_OFFSET, NewMessage, StoredQueue, StoreUnavailable
from tools.benchmarks.figures import Figure, in_turn, seconds
from tools.benchmarks.running import size
from tools.cassandra import PrivateRing
from tools.processes import happens

FEW, MANY = 1_000, size(1_000_000, 2_000)
"""Queues, or messages in a queue."""

DEEP = size(10_000_000, 20_000)
MESSAGES_EACH = 3
BATCH = 100
BYTES = 100
"""The size of a message."""

ROUNDS = size(200, 5)
WARM_UPS = size(50, 1)
CALLS = 3
"""Calls per measurement, of which the fastest counts, to reduce the noise of other load."""

MAX_GROWTH = 1.2
MAX_PUSH_RATIO = 2

DAY_SECONDS = 24 * 3600
TTL = 30 * DAY_SECONDS
DEEP_TICKS = 10 * DAY_SECONDS * TICKS_PER_SECOND
"""The time in which the messages of the deep queue came."""

QUEUES_PER_REQUEST, REQUESTS = 30, 32
MESSAGES_PER_PUSH, PUSHES = 100, 8
"""The second of each is how many are in flight."""

ATTEMPTS = 10

JOIN_SECONDS = 900
"""How long a node may take to copy the data of the first one."""

COMPACTION_SECONDS = 600
"""How long to wait at most until the nodes compact nothing."""


def message_store_cassandra() -> list[Figure]:
    """Fill one node, let two others join and copy its data, and measure on all three."""
    ring = PrivateRing(copies_data=True)
    try:
        first = ring.nodes[0]
        first.start(JOIN_SECONDS)
        with override_settings(CASSANDRA_HOSTS=[first.hosts], CASSANDRA_REPLICATION="1"):
            fill()
        print("two more nodes join", flush=True)
        ring.start(JOIN_SECONDS)
        with override_settings(CASSANDRA_HOSTS=ring.hosts.split(","), MESSAGE_STORE_DELAY_SECONDS=30):
            return [*times(), *sizes(ring.nodes[1].directory / "data")]
    finally:
        ring.stop()


def using(keyspace: str) -> Any:
    return override_settings(CASSANDRA_KEYSPACE=keyspace)


def fill() -> None:
    """Write the rows that the store writes. Each keyspace then wants three replicas.

    ``few`` and ``many`` have queues of three messages, ``deep`` a small and a large queue. Queues are created without
    lightweight transactions, and many in a request.
    """
    for keyspace in ("few", "many", "deep"):
        print(f"filling the keyspace {keyspace}", flush=True)
        with using(keyspace):
            list(setup.set_up())
            if keyspace == "deep":
                push_in_the_past("small", FEW)
                push_in_the_past("large", DEEP)
            else:
                add_queues(FEW if keyspace == "few" else MANY)
            CassandraStore()._connection.session.execute(
                f"ALTER KEYSPACE {keyspace} WITH replication = {{'class': 'NetworkTopologyStrategy', 'datacenter1': 3}}"
            )


def add_queues(queues: int) -> None:
    store = CassandraStore()
    connection = store._connection
    add_queue = cql.CREATE_QUEUE.replace("IF NOT EXISTS", "")
    connection.prepare(add_queue)

    def rows_of(number: int) -> Iterator[Any]:
        key, listing, ticks = store._new_id(), store._new_id(), store.now()
        queue = StoredQueue("bench", f"queue-{number}", datetime.now(UTC), 1, "user", "strong", (), key)
        yield connection.bind(add_queue, ["bench", queue.name, key, 1, "user", "strong", [], listing])
        yield store._name_row(cql.ADD_NAME, queue)
        bucket = buckets.choose(ticks, ())
        yield from store._entry_rows(queue, 1, bucket, buckets.lifetime(TTL), ticks, ConsistencyLevel.ONE)
        for step, rest in enumerate(random_rests(MESSAGES_EACH)):
            made = message_id(Place(ticks - step, buckets.with_level(rest, bucket.level)))
            message = NewMessage(os.urandom(BYTES), 1, TTL, "text/plain")
            yield store._message(queue, made, message, ticks, ConsistencyLevel.ONE)

    def request(start: int) -> Any:
        numbers = range(start, min(start + QUEUES_PER_REQUEST, queues))
        return batch((row for number in numbers for row in rows_of(number)), ConsistencyLevel.ONE)

    for start in range(0, queues, REQUESTS * QUEUES_PER_REQUEST):
        starts = range(start, min(start + REQUESTS * QUEUES_PER_REQUEST, queues), QUEUES_PER_REQUEST)
        repeated(partial(connection.execute_all, [request(start) for start in starts]))


class Earlier(CassandraStore):
    """A store whose time can be set."""

    at = 0

    def now(self) -> int:
        return self.at


def push_in_the_past(name: str, messages: int) -> None:
    """Create a queue, and push messages that are spread over the last days."""
    store = Earlier()
    store.at = begin = CassandraStore().now() - DEEP_TICKS
    queue = store.register("bench", name)

    def push(_: int) -> None:
        new = [NewMessage(os.urandom(BYTES), 1, TTL, "text/plain") for _ in range(MESSAGES_PER_PUSH)]
        repeated(partial(store.push, queue, new))

    with ThreadPoolExecutor(PUSHES) as threads:
        for done in range(0, messages, PUSHES * MESSAGES_PER_PUSH):
            store.at = begin + DEEP_TICKS * done // messages
            list(threads.map(push, range(min(PUSHES, (messages - done) // MESSAGES_PER_PUSH))))


def repeated(call: Callable[[], object]) -> None:
    """Call this until it succeeds: a busy node may answer late."""
    for _ in range(ATTEMPTS - 1):
        try:
            call()
            return
        except (StoreUnavailable, *ERRORS):
            time.sleep(1)
    call()


def times() -> list[Figure]:
    """Measure once the nodes compact nothing."""
    store = CassandraStore()
    with using("few"):
        session = store._connection.session
    tasks, hosts = "SELECT task_id FROM system_views.sstable_tasks", session.cluster.metadata.all_hosts()
    if not happens(lambda: not any(session.execute(tasks, host=host).one() for host in hosts), COMPACTION_SECONDS, 1):
        raise TimeoutError("The nodes don't end their compactions.")
    figures = many_queues(store)
    with using("deep"):
        figures += deep_queue(store)
    with using("few"):
        return [*figures, *pushes(store)]


def many_queues(store: CassandraStore) -> list[Figure]:
    """Measure calls with ``many`` queues, and with ``few`` as the floor. Finding a queue by its name is included."""
    message = NewMessage(b"x" * BYTES, 1, 3600, "text/plain")
    queues = {"few": FEW, "many": MANY}

    def any_queue(keyspace: str) -> StoredQueue:
        return store.find("bench", f"queue-{random.randrange(queues[keyspace])}")

    calls: dict[str, Callable[[str], Any]] = {
        "create a queue": lambda _: store.register("bench", uuid.uuid4().hex),
        "post a message": lambda keyspace: store.push(any_queue(keyspace), [message]),
        "read a queue": lambda keyspace: store.read(any_queue(keyspace), 1, limit=MESSAGES_EACH),
    }

    def measured(what: str, keyspace: str) -> float:
        with using(keyspace):
            return fastest(partial(calls[what], keyspace))

    measurements = {f"{what} {keyspace}": partial(measured, what, keyspace) for what in calls for keyspace in queues}
    found = in_turn(ROUNDS, warm_ups=WARM_UPS, **measurements)
    where = f"{MANY:,} queues of {MESSAGES_EACH} messages"
    return [Figure(where, what, "µs", found[f"{what} many"], found[f"{what} few"], MAX_GROWTH) for what in calls]


def fastest(do: Callable[[], Any]) -> float:
    return min(seconds(do) for _ in range(CALLS)) * 1e6


def deep_queue(store: CassandraStore) -> list[Figure]:
    """Measure reads of a batch at different places of the queue ``large``, and of ``small`` as the floor."""
    small, large = store.find("bench", "small"), store.find("bench", "large")
    first, last = (
        place(store.read(large, 1, limit=1, descending=descending)[0].id).ticks for descending in (False, True)
    )
    margin = (last - first) // 100

    def somewhere() -> Place:
        return Place(random.randrange(first + margin, last - margin), 0)

    def message() -> Place:
        return place(store.read(large, 1, start=somewhere(), limit=1)[0].id)

    def read(queue: StoredQueue, start: Callable[[], Place | None] = lambda: None, **asked: Any) -> float:
        places = iter([start() for _ in range(CALLS)])
        found: list[Any] = []
        took = fastest(lambda: found.extend(store.read(queue, 1, start=next(places), limit=BATCH, **asked)))
        assert len(found) == CALLS * BATCH
        return took

    measurements = {
        "floor": lambda: read(small),
        "from the beginning": lambda: read(large),
        "at the end": lambda: read(large, descending=True, before=store.now()),
        "in the middle, from a message": lambda: read(large, message),
        "by time": lambda: read(large, somewhere, before=store.now()),
        "by time, going back": lambda: read(large, somewhere, descending=True),
    }
    found = in_turn(ROUNDS, warm_ups=WARM_UPS, **measurements)
    floor = found.pop("floor")
    where = f"{BATCH} messages from a queue of {DEEP:,}"
    return [Figure(where, what, "µs", times, floor, MAX_GROWTH) for what, times in found.items()]


def pushes(store: CassandraStore) -> list[Figure]:
    """Measure a push of a batch. The floor is the same statements with the bare driver."""
    queue = store.register("bench", uuid.uuid4().hex)
    messages = [NewMessage(os.urandom(BYTES), 1, TTL, "text/plain") for _ in range(BATCH)]
    cluster = open_cluster()
    try:
        session = cluster.connect()
        insert = session.prepare(cql.ADD_MESSAGE.replace("keyspace.", "few."))
        found = in_turn(
            ROUNDS,
            warm_ups=WARM_UPS,
            push=lambda: fastest(lambda: store.push(queue, messages)),
            bare=lambda: fastest(lambda: bare_push(session, insert, messages)),
        )
    finally:
        cluster.shutdown()
    where = f"messages of {BYTES} bytes"
    return [Figure(where, f"push {BATCH}", "µs", found["push"], found["bare"], MAX_PUSH_RATIO)]


def bare_push(session: Any, insert: Any, messages: Sequence[NewMessage]) -> None:
    statement = BatchStatement(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.LOCAL_QUORUM)
    key, at = uuid.uuid1(), now()
    for step, (message, rest) in enumerate(zip(messages, random_rests(len(messages)), strict=True)):
        values = [key, 1, 0, 0, at + step, rest - SIGNED_OFFSET, message.body, "text/plain", at, BYTES, TTL]
        statement.add(insert.bind(values))
    session.execute(statement)


def sizes(data: Path) -> list[Figure]:
    def stored(keyspace: str, *tables: str) -> int:
        files = (file for table in tables for file in (data / keyspace).glob(f"{table}-*/*") if file.is_file())
        return sum(file.stat().st_size for file in files)

    where = "disk space of a replica, with messages of random bytes"
    of_queues, of_messages = stored("many", "queues", "names", "buckets"), stored("many", "messages")
    of_deep = stored("deep", "messages", "buckets")
    message = f"a message of {BYTES} bytes in a queue of"
    return [
        Figure(where, "a queue, without its messages", "bytes", [of_queues / MANY]),
        Figure(where, f"{message} {MESSAGES_EACH}", "bytes", [of_messages / (MANY * MESSAGES_EACH)]),
        Figure(where, f"{message} {DEEP:,}", "bytes", [of_deep / DEEP]),
    ]
