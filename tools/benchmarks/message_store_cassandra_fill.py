"""Fill Cassandra with very many queues, and one of very many messages. Runs in ``tools.benchmarks.child``.

The rows are those that the store writes. Queues are created without lightweight transactions, and many in a request.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cassandra import ConsistencyLevel
from django.test import override_settings

from guardian_store.ids import TICKS_PER_SECOND, Place, message_id, random_rests
from message_store.cassandra import buckets, cql, setup
from message_store.cassandra.cluster import ERRORS, batch
from message_store.cassandra.store import CassandraStore
from message_store.store import NewMessage, StoredQueue, StoreUnavailable

KEYSPACES = ("few", "many", "deep")

QUEUES_PER_REQUEST = 30
REQUESTS = 32
"""Requests in flight."""

MESSAGES_PER_PUSH = 100
PUSHES = 8
"""Pushes at the same time."""

DAYS = 10
"""The time in which the messages of the deep queue came."""

DAY = 86_400
TTL = 30 * DAY
ATTEMPTS = 10

ADD_QUEUE = cql.CREATE_QUEUE.replace("IF NOT EXISTS", "")


def measure(vhost: str, few: int, many: int, each: int, deep: int, size: int) -> dict[str, Any]:
    """Fill the keyspaces, each of which then wants three replicas. Messages have ``size`` random bytes.

    ``few`` and ``many`` have queues of ``each`` messages, ``deep`` a queue of ``few`` and one of ``deep`` messages.
    """
    store = CassandraStore()
    for keyspace in KEYSPACES:
        with override_settings(CASSANDRA_KEYSPACE=keyspace):
            list(setup.set_up())
            if keyspace == "deep":
                _push_in_the_past("small", few, size)
                _push_in_the_past("large", deep, size)
            else:
                _add_queues(store, few if keyspace == "few" else many, each, size)
            store._connection.session.execute(
                f"ALTER KEYSPACE {keyspace} WITH replication = {{'class': 'NetworkTopologyStrategy', 'datacenter1': 3}}"
            )
    return {}


def _add_queues(store: CassandraStore, queues: int, each: int, size: int) -> None:
    connection = store._connection
    connection.prepare(ADD_QUEUE)
    random_bytes = os.urandom(1_000_000)

    def rows_of(number: int) -> Iterator[Any]:
        key, listing, ticks = store._new_id(), store._new_id(), store.now()
        queue = StoredQueue("bench", f"queue-{number}", datetime.now(UTC), 1, "user", "strong", (), key)
        yield connection.bind(ADD_QUEUE, ["bench", queue.name, key, 1, "user", "strong", [], listing])
        yield store._name_row(cql.ADD_NAME, queue)
        bucket = buckets.choose(ticks, ())
        yield from store._entry_rows(queue, 1, bucket, buckets.lifetime(TTL), ticks, ConsistencyLevel.ONE)
        for rest, at in zip(random_rests(each), range(ticks, ticks - each, -1), strict=True):
            begin = rest % (len(random_bytes) - size)
            body = random_bytes[begin : begin + size]
            made = message_id(Place(at, buckets.with_level(rest, bucket.level)))
            yield store._message(queue, made, NewMessage(body, 1, TTL, "text/plain"), ticks, ConsistencyLevel.ONE)

    def request(numbers: Sequence[int]) -> Any:
        return batch((row for number in numbers for row in rows_of(number)), ConsistencyLevel.ONE)

    for begin in range(0, queues, REQUESTS * QUEUES_PER_REQUEST):
        end = min(begin + REQUESTS * QUEUES_PER_REQUEST, queues)
        starts = range(begin, end, QUEUES_PER_REQUEST)
        requests = [request(range(start, min(start + QUEUES_PER_REQUEST, end))) for start in starts]
        _repeated(partial(connection.execute_all, requests))


class _Earlier(CassandraStore):
    """A store whose time can be set."""

    at = 0

    def now(self) -> int:
        return self.at


def _push_in_the_past(name: str, messages: int, size: int) -> None:
    """Create a queue, and push messages that are spread over the last days."""
    store = _Earlier()
    span = DAYS * DAY * TICKS_PER_SECOND
    store.at = begin = CassandraStore().now() - span
    queue = store.register("bench", name)

    def push(_: int) -> None:
        new = [NewMessage(os.urandom(size), 1, TTL, "text/plain") for _ in range(MESSAGES_PER_PUSH)]
        _repeated(partial(store.push, queue, new))

    with ThreadPoolExecutor(PUSHES) as threads:
        for done in range(0, messages, PUSHES * MESSAGES_PER_PUSH):
            store.at = begin + span * done // messages
            pushes = min(PUSHES, (messages - done) // MESSAGES_PER_PUSH)
            list(threads.map(push, range(pushes)))


def _repeated(call: Callable[[], object]) -> None:
    """Call this until it succeeds: a busy node may answer late."""
    for attempt in range(ATTEMPTS):
        try:
            call()
            return
        except (StoreUnavailable, *ERRORS):
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(1)
