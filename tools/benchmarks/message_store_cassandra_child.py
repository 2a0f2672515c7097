"""Use the queues of ``message_store_cassandra_fill.py`` on three nodes. Runs in ``tools.benchmarks.child``."""

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cassandra import ConsistencyLevel
from cassandra.query import BatchStatement, BatchType
from django.conf import settings
from django.test import override_settings

from guardian_store.ids import Place, now, place, random_rests
from message_store.cassandra.cluster import open_cluster
from message_store.cassandra.cql import ADD_MESSAGE
from message_store.cassandra.reading import SIGNED_OFFSET
from message_store.cassandra.store import CassandraStore
from message_store.store import NewMessage, StoredQueue
from tools.benchmarks.message_store_batches import ATTEMPTS, quickest

WARM_UPS = 50
SEED = 9
TTL = 3600

COMPACTION_SECONDS = 600
"""How long to wait at most until the nodes compact nothing."""


def measure(vhost: str, few: int, many: int, each: int, batch: int, size: int, rounds: int) -> dict[str, Any]:
    """Return microseconds of alternating calls.

    ``queues``: of creating a queue, posting a message and reading a queue, with ``few`` and ``many`` queues of ``each``
    messages; finding the queue by name is included. ``deep``: of reading ``batch`` messages from the beginning of a
    queue of ``few``, and at different places of one of very many. ``push``: of pushing ``batch`` messages, and of the
    same statements with the bare driver.
    """
    store = CassandraStore()
    _wait_for_compactions(store)
    return {
        "queues": _queues(store, {"few": few, "many": many}, each, size, rounds),
        "deep": _deep(store, batch, rounds),
        "push": _push(store, batch, size, rounds),
    }


@contextmanager
def _keyspace(name: str) -> Iterator[None]:
    with override_settings(CASSANDRA_KEYSPACE=name):
        yield


def _wait_for_compactions(store: CassandraStore) -> None:
    until = time.monotonic() + COMPACTION_SECONDS
    with _keyspace("few"):
        session = store._connection.session
    hosts = session.cluster.metadata.all_hosts()
    tasks = "SELECT task_id FROM system_views.sstable_tasks"
    while any(session.execute(tasks, host=host).one() for host in hosts):
        if time.monotonic() > until:
            raise TimeoutError("The nodes don't end their compactions.")
        time.sleep(1)


def _queues(
    store: CassandraStore, sizes: dict[str, int], each: int, size: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    drawn = random.Random(SEED)
    message = NewMessage(os.urandom(size), 1, TTL, "text/plain")
    times: dict[str, dict[str, list[float]]] = {name: {"create": [], "post": [], "read": []} for name in sizes}
    for turn in range(WARM_UPS + rounds):
        for keyspace, queues in sizes.items():
            names = [f"queue-{drawn.randrange(queues)}" for _ in range(2 * ATTEMPTS)]
            read: list[Any] = []

            def post(number: int, names: list[str] = names) -> None:
                store.push(store.find("bench", names[number]), [message])

            def read_one(number: int, names: list[str] = names, read: list[Any] = read) -> None:
                read.extend(store.read(store.find("bench", names[ATTEMPTS + number]), 1, limit=each))

            with _keyspace(keyspace):
                took = {
                    "create": quickest(lambda _: store.register("bench", uuid.uuid4().hex)),
                    "post": quickest(post),
                    "read": quickest(read_one),
                }
            assert len(read) == ATTEMPTS * each
            if turn >= WARM_UPS:
                for what, one in took.items():
                    times[keyspace][what].append(one)
    return times


def _deep(store: CassandraStore, messages: int, rounds: int) -> dict[str, Any]:
    drawn = random.Random(SEED)
    places = ("at the beginning", "at the end", "in the middle", "by time", "by time, going back")
    times: dict[str, list[float]] = {place: [] for place in places}
    floor: list[float] = []
    with _keyspace("deep"):
        small, large = store.find("bench", "small"), store.find("bench", "large")
        first, last = (
            place(store.read(large, 1, limit=1, descending=descending)[0].id).ticks for descending in (False, True)
        )
        margin = (last - first) // 100

        def read(queue: StoredQueue, *asked: dict[str, Any]) -> float:
            found: list[Any] = []
            took = quickest(
                lambda number: found.extend(store.read(queue, 1, limit=messages, **asked[number % len(asked)]))
            )
            assert len(found) == ATTEMPTS * messages
            return took

        def somewhere(make: Callable[[Place], Place] = lambda at: at, **asked: Any) -> list[dict[str, Any]]:
            times = [Place(drawn.randrange(first + margin, last - margin), 0) for _ in range(ATTEMPTS)]
            return [{"start": make(at), **asked} for at in times]

        def message_after(at: Place) -> Place:
            return place(store.read(large, 1, start=at, limit=1)[0].id)

        for turn in range(WARM_UPS + rounds):
            took = [
                read(large, {}),
                read(large, {"descending": True, "before": store.now()}),
                read(large, *somewhere(message_after)),
                read(large, *somewhere(before=store.now())),
                read(large, *somewhere(descending=True)),
            ]
            bare = read(small, {})
            if turn >= WARM_UPS:
                floor.append(bare)
                for where, one in zip(places, took, strict=True):
                    times[where].append(one)
    return {"few": floor, "many": times}


def _push(store: CassandraStore, messages: int, size: int, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"push": [], "bare": []}
    with _keyspace("few"):
        queue = store.register("bench", uuid.uuid4().hex)
        batch = [NewMessage(os.urandom(size), 1, TTL, "text/plain") for _ in range(messages)]
        cluster = open_cluster()
        try:
            session = cluster.connect()
            insert = session.prepare(ADD_MESSAGE.replace("keyspace.", f"{settings.CASSANDRA_KEYSPACE}."))
            key = uuid.uuid1()

            def bare(_: int) -> None:
                statement = BatchStatement(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.LOCAL_QUORUM)
                at = now()
                for step, rest in enumerate(random_rests(messages)):
                    values = [key, 1, 0, 0, at + step, rest - SIGNED_OFFSET, batch[step].body, "text/plain", at, size]
                    statement.add(insert.bind([*values, TTL]))
                session.execute(statement)

            for turn in range(WARM_UPS + rounds):
                took = {"push": quickest(lambda _: store.push(queue, batch)), "bare": quickest(bare)}
                if turn >= WARM_UPS:
                    for what, one in took.items():
                        times[what].append(one)
        finally:
            cluster.shutdown()
    return times
