"""The queues of a store in Cassandra, and lists of their names."""

import heapq
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Unpack

from cassandra import ConsistencyLevel
from cassandra.policies import FallthroughRetryPolicy
from cassandra.query import BoundStatement

from guardian_store._ids import TICKS_PER_SECOND, id_of, place, random_rests
from message_store.cassandra import cql
from message_store.cassandra.cluster import ERRORS, Connection, Rows, connections, translated
from message_store.store import (
    DEFAULT_SETTINGS,
    MessageStore,
    NoQueue,
    QueueExists,
    QueueSettings,
    StoredQueue,
    StoreUnavailable,
    time_of,
)

QUORUM_SECONDS = 1.0
"""How long a quorum may take to find a queue, before one replica is asked whether the queue needs a quorum."""

SHARDS = 16
"""The partitions of a list of names."""

MAX_ATTEMPTS = 20
"""Tries of a lightweight transaction that others forestall."""

NAMES_PER_READ = 100


class _Row(NamedTuple):
    """A queue's row. ``version`` changes with each update, ``listing`` with each change of the principals."""

    queue: StoredQueue
    version: int
    listing: uuid.UUID


class QueueTables(MessageStore):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def now(self) -> int:
        with translated():
            return self._connection.clock.now()

    @property
    def _connection(self) -> Connection:
        return connections.get()

    def register(self, application: str, name: str, **given: Unpack[QueueSettings]) -> StoredQueue:
        with translated():
            if self._row(application, name) is not None:
                raise QueueExists(name)
            key, listing = self._new_id(), self._new_id()
            settings: dict[str, Any] = {**DEFAULT_SETTINGS, **given}
            settings["principals"] = tuple(settings["principals"])
            queue = StoredQueue(application, name, time_of(place(key).ticks), key=key, **settings)
            self._connection.execute_all(
                [self._name_row(cql.ADD_NAME, queue), *self._principal_rows(cql.ADD_PRINCIPAL, queue, listing)]
            )
            values = [application, name, key, *_settings(queue), listing]
            if not self._transact(self._connection.bind(cql.CREATE_QUEUE, values)):
                self._connection.execute_later(
                    [
                        self._name_row(cql.DELETE_NAME, queue),
                        *self._principal_rows(cql.DELETE_PRINCIPAL, queue, listing),
                    ]
                )
                raise QueueExists(name)
        return queue

    def update(self, application: str, name: str, **given: Unpack[QueueSettings]) -> StoredQueue:
        with translated():
            for _ in range(MAX_ATTEMPTS):
                row = self._existing_row(application, name)
                old, listing = row.queue, row.listing
                settings: dict[str, Any] = {"principals": old.principals, **given}
                settings["principals"] = tuple(settings["principals"])
                settings["partitions"] = max(given.get("partitions", 0), old.partitions)
                new = replace(old, **settings)
                if new == old:
                    return old
                if new.principals != old.principals:
                    listing = self._new_id()
                    self._connection.execute_all(self._principal_rows(cql.ADD_PRINCIPAL, new, listing))
                values = [row.version + 1, *_settings(new), listing, application, name, old.key, row.version]
                is_done = self._transact(self._connection.bind(cql.UPDATE_QUEUE, values))
                if listing != row.listing:
                    unused = (old, row.listing) if is_done else (new, listing)
                    self._connection.execute_later(self._principal_rows(cql.DELETE_PRINCIPAL, *unused))
                if is_done:
                    return new
        raise StoreUnavailable(f"Other clients keep changing the queue {name}.")

    def find(self, application: str, name: str) -> StoredQueue:
        with translated():
            found = self._connection.start(self._connection.bind(cql.FIND_QUEUE, [application, name]))
            if not found.arrive_within(QUORUM_SECONDS):
                # A queue of weak consistency is used without a quorum.
                with suppress(*ERRORS):
                    row = self._row(application, name, ConsistencyLevel.ONE)
                    if row is not None and row.queue.consistency == "weak" and not found.arrive_within(0):
                        return row.queue
            row = _row_or_none(application, found.wait())
        if row is None:
            raise NoQueue(name)
        return row.queue

    def queues(self, application: str, *, start: str = "", limit: int = 1000) -> list[StoredQueue]:
        with translated():
            names = self._merged(cql.LIST_NAMES, [application], [start], limit)
            return self._listed(names, limit, lambda row: row.queue.key)

    def queues_for_principal(
        self, principal: str, *, start: tuple[str, str] = ("", ""), limit: int = 1000
    ) -> list[StoredQueue]:
        with translated():
            names = self._merged(cql.LIST_PRINCIPAL, [principal], list(start), limit)
            return self._listed(names, limit, lambda row: row.listing)

    def _deleted_row(self, application: str, name: str) -> _Row:
        for _ in range(MAX_ATTEMPTS):
            row = self._existing_row(application, name)
            values = [application, name, row.queue.key, row.version]
            if self._transact(self._connection.bind(cql.DELETE_QUEUE, values)):
                return row
        raise StoreUnavailable(f"Other clients keep changing the queue {name}.")

    def _row(self, application: str, name: str, level: int = ConsistencyLevel.LOCAL_QUORUM) -> _Row | None:
        bound = self._connection.bind(cql.FIND_QUEUE, [application, name], level)
        return _row_or_none(application, self._connection.execute(bound))

    def _existing_row(self, application: str, name: str) -> _Row:
        row = self._row(application, name)
        if row is None:
            raise NoQueue(name)
        return row

    def _name_row(self, statement: str, queue: StoredQueue) -> BoundStatement:
        return self._connection.bind(statement, [queue.application, _shard(queue.name), queue.name, queue.key])

    def _principal_rows(self, statement: str, queue: StoredQueue, listing: uuid.UUID) -> list[BoundStatement]:
        names = [queue.application, queue.name]
        shard = _shard("/".join(names))
        return [
            self._connection.bind(statement, [principal, shard, *names, listing])
            for principal in dict.fromkeys(queue.principals)
        ]

    def _merged(self, statement: str, key: list[str], start: list[str], limit: int) -> Iterator[Any]:
        """Return the sorted rows of all shards of a list of names, which are read page by page."""
        page = 10 + 2 * limit // SHARDS
        bind = self._connection.bind
        shards = [bind(statement, [*key, shard, *start], fetch=page) for shard in range(SHARDS)]
        return heapq.merge(*self._connection.execute_all(shards))

    def _listed(self, names: Iterator[Any], limit: int, mark_of: Callable[[_Row], uuid.UUID]) -> list[StoredQueue]:
        """Return the queues of a list of applications, names and marks, without those that a failure left behind."""
        found: list[StoredQueue] = []
        bind = self._connection.bind
        while len(found) < limit:
            some = list(islice(names, min(NAMES_PER_READ, limit - len(found))))
            if not some:
                break
            rows = self._connection.execute_all(
                bind(cql.FIND_QUEUE, [application, name]) for application, name, _ in some
            )
            for (application, _, mark), result in zip(some, rows, strict=True):
                row = result.one()
                if row is not None and mark_of(_row_of(application, row)) == mark:
                    found.append(_row_of(application, row).queue)
        return found

    def _transact(self, statement: Any) -> bool:
        statement.serial_consistency_level = ConsistencyLevel.SERIAL
        statement.is_idempotent = False
        statement.retry_policy = FallthroughRetryPolicy()
        return self._connection.execute(statement).was_applied

    def _is_removed(self, queue: StoredQueue, level: int = ConsistencyLevel.LOCAL_QUORUM) -> bool:
        return self._connection.execute(self._connection.bind(cql.IS_REMOVED, [queue.key], level)).one() is not None

    def _require(self, queue: StoredQueue, level: int = ConsistencyLevel.LOCAL_QUORUM) -> None:
        if self._is_removed(queue, level):
            raise NoQueue(queue.name)

    def _draw(self, number: int) -> int:
        """Return the first of consecutive ticks that no other message of this process has, all in one bucket."""
        with self._lock:
            first = max(self._last + 1, self.now())
            last = first + number - 1
            if first // TICKS_PER_SECOND != last // TICKS_PER_SECOND:
                first = last // TICKS_PER_SECOND * TICKS_PER_SECOND
            self._last = first + number - 1
            return first

    def _new_id(self) -> uuid.UUID:
        return id_of(self.now(), random_rests(1)[0])


def _row_or_none(application: str, rows: Rows) -> _Row | None:
    row = rows.one()
    return None if row is None else _row_of(application, row)


def _row_of(application: str, row: Sequence[Any]) -> _Row:
    name, key, version, partitions, type_, consistency, principals, listing = row
    named = tuple(principals or ())
    queue = StoredQueue(application, name, time_of(place(key).ticks), partitions, type_, consistency, named, key)
    return _Row(queue, version, listing)


def _settings(queue: StoredQueue) -> list[Any]:
    return [queue.partitions, queue.type, queue.consistency, list(queue.principals)]


def _shard(name: str) -> int:
    return zlib.crc32(name.encode()) % SHARDS
