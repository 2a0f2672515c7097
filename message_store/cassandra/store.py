"""The message store in Apache Cassandra.

Every read is of one partition of a table, or of a bounded number. ``buckets.py`` says how messages are divided into
buckets. The index of buckets has two entries for each, by its first and by its last time, so that a reader in either
direction finds the next bucket with messages in one read, however long the queue was idle. Each entry of the index is
written before its bucket's first message, and expires after its last. A reader that finds a bucket empty removes it
from the index, so the tombstones of deleted messages are read once.

The time of messages is the cluster's. Messages are hidden from reads for ``delay`` seconds. Within two thirds of this
time a push is stored, or fails, and the clocks of the nodes may differ by the last third. So messages become readable
in the order of their ids, and a reader that continues after its last message misses none.

Queues and positions are changed by lightweight transactions, and all else without. The driver doesn't repeat a
lightweight transaction: the second would find the changes of the first.
"""

import heapq
import logging
import random
import threading
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from cassandra import ConsistencyLevel
from cassandra.policies import FallthroughRetryPolicy
from cassandra.query import BoundStatement

from guardian_store.ids import MAX_REST, MAX_TICKS, MIN_TICKS, TICKS_PER_SECOND, Place, id_of, place, random_rests
from message_store.cassandra import buckets, cql
from message_store.cassandra.buckets import Bucket, bucket_of
from message_store.cassandra.cluster import ERRORS, Connection, Rows, batch, boot_seconds, connections, translated
from message_store.cassandra.cql import END, START
from message_store.cassandra.reading import LEVELS, SIGNED_OFFSET, Entry, Reading, entries_of
from message_store.store import (
    BatchTooLarge,
    MessageStore,
    NewMessage,
    NoQueue,
    PositionsChanged,
    QueueExists,
    StoredMessage,
    StoredQueue,
    StoreUnavailable,
)

logger = logging.getLogger(__name__)

PUSH_SHARE = 2 / 3
"""The part of the delay within which a push is stored or fails."""

PUSH_SECONDS = 5.0
"""The same without a delay."""

MAX_BATCH_BYTES = 12 * 1024 * 1024
"""The size of a batch's bodies. Cassandra accepts requests of 16 MiB."""

QUORUM_SECONDS = 1.0
"""How long a quorum may take to find a queue, before one replica is asked whether the queue needs a quorum."""

SETTLED_SECONDS = 60
"""After this time, no push writes to a bucket that is full or past."""

SHARDS = 16
"""The partitions of a list of names."""

MEASURED_MESSAGES, MEASURED_BUCKETS = 20_000, 16
"""At least so many messages of a queue, in at least so many buckets, are counted. Of more, the number is estimated.

Buckets have very different sizes. In a simulation of four deep queues, 16 buckets estimated at most 3.3 times the
number, and in 95 % of cases at most twice.
"""

MAX_ATTEMPTS = 20
"""Tries of a lightweight transaction that others forestall."""

NAMES_PER_READ = 100

CONCURRENT_READS = 16

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_Changes = Mapping[int, uuid.UUID | None]
_Change = Callable[[dict[int, uuid.UUID]], _Changes]


class _Row(NamedTuple):
    """A queue's row. ``version`` changes with each update, ``listing`` with each change of the principals."""

    queue: StoredQueue
    version: int
    listing: uuid.UUID


class CassandraStore(MessageStore):
    """Queues and messages in Apache Cassandra."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def now(self) -> int:
        with translated():
            return self._connection.clock.now()

    @property
    def _connection(self) -> Connection:
        return connections.get()

    # Queues

    def register(
        self,
        application: str,
        name: str,
        *,
        partitions: int = 1,
        type: str = "user",  # noqa: A002 - what the API calls it
        consistency: str = "strong",
        principals: Sequence[str] = (),
    ) -> StoredQueue:
        with translated():
            if self._row(application, name) is not None:
                raise QueueExists(name)
            key, listing = self._new_id(), self._new_id()
            queue = StoredQueue(application, name, _time_of(key), partitions, type, consistency, tuple(principals), key)
            self._connection.execute_all(
                [self._name_row(cql.ADD_NAME, queue), *self._principal_rows(cql.ADD_PRINCIPAL, queue, listing)]
            )
            values = [application, name, key, partitions, type, consistency, list(principals), listing]
            if not self._transact(self._connection.bind(cql.CREATE_QUEUE, values)):
                self._connection.execute_later(
                    [
                        self._name_row(cql.DELETE_NAME, queue),
                        *self._principal_rows(cql.DELETE_PRINCIPAL, queue, listing),
                    ]
                )
                raise QueueExists(name)
        return queue

    def update(
        self,
        application: str,
        name: str,
        *,
        partitions: int | None = None,
        type: str | None = None,  # noqa: A002 - what the API calls it
        consistency: str | None = None,
        principals: Sequence[str] | None = None,
    ) -> StoredQueue:
        with translated():
            for _ in range(MAX_ATTEMPTS):
                row = self._existing_row(application, name)
                old, listing = row.queue, row.listing
                new = replace(
                    old,
                    partitions=max(partitions or 0, old.partitions),
                    type=type or old.type,
                    consistency=consistency or old.consistency,
                    principals=old.principals if principals is None else tuple(principals),
                )
                if new == old:
                    return old
                if new.principals != old.principals:
                    listing = self._new_id()
                    self._connection.execute_all(self._principal_rows(cql.ADD_PRINCIPAL, new, listing))
                settings = [new.partitions, new.type, new.consistency, list(new.principals), listing]
                values = [row.version + 1, *settings, application, name, old.key, row.version]
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

    def queues(self, application: str, *, start: str = "", limit: int | None = None) -> list[StoredQueue]:
        with translated():
            names = self._merged(cql.LIST_NAMES, [application], [start], limit)
            return self._listed(names, limit, lambda row: row.queue.key)

    def queues_for_principal(
        self, principal: str, *, start: tuple[str, str] = ("", ""), limit: int | None = None
    ) -> list[StoredQueue]:
        with translated():
            names = self._merged(cql.LIST_PRINCIPAL, [principal], list(start), limit)
            return self._listed(names, limit, lambda row: row.listing)

    def remove(self, application: str, name: str) -> None:
        with translated():
            row = self._deleted_row(application, name)
            # If a statement below fails, what stays is invisible, because the queue's row is gone.
            queue, bind = row.queue, self._connection.bind
            partitions = range(1, queue.partitions + 1)
            self._connection.execute_all(bind(cql.MARK_REMOVED, [queue.key, partition]) for partition in partitions)
            self._connection.execute_all(
                [
                    self._name_row(cql.DELETE_NAME, queue),
                    *self._principal_rows(cql.DELETE_PRINCIPAL, queue, row.listing),
                ]
            )
            consumers = self._connection.execute(bind(cql.LIST_CONSUMERS, [queue.key]))
            self._connection.execute_all(bind(cql.DELETE_POSITIONS, [queue.key, consumer]) for (consumer,) in consumers)
            self._connection.execute(bind(cql.DELETE_CONSUMERS, [queue.key]))
            self._delete_messages(queue)
            self._connection.execute_all(bind(cql.DELETE_ENTRIES, [queue.key, partition]) for partition in partitions)

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

    def _merged(self, statement: str, key: list[str], start: list[str], limit: int | None) -> Iterator[Any]:
        """Return the sorted rows of all shards of a list of names, which are read page by page."""
        page = 10 + 2 * (NAMES_PER_READ if limit is None else limit) // SHARDS
        bind = self._connection.bind
        shards = [bind(statement, [*key, shard, *start], fetch=page) for shard in range(SHARDS)]
        return heapq.merge(*self._connection.execute_all(shards))

    def _listed(
        self, names: Iterator[Any], limit: int | None, mark_of: Callable[[_Row], uuid.UUID]
    ) -> list[StoredQueue]:
        """Return the queues of a list of applications, names and marks, without those that a failure left behind."""
        found: list[StoredQueue] = []
        bind = self._connection.bind
        while limit is None or len(found) < limit:
            some = list(islice(names, NAMES_PER_READ if limit is None else min(NAMES_PER_READ, limit - len(found))))
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

    # Messages

    def push(self, queue: StoredQueue, messages: Sequence[NewMessage]) -> list[uuid.UUID]:
        if not messages:
            return []
        size = sum(len(message.body) for message in messages)
        if size > MAX_BATCH_BYTES:
            raise BatchTooLarge(f"{size} bytes are more than {MAX_BATCH_BYTES}")
        seconds = self.delay * PUSH_SHARE or PUSH_SECONDS
        begun = boot_seconds()
        with translated():
            first = self._draw(len(messages))
            by_partition: defaultdict[int, list[int]] = defaultdict(list)
            for number, message in enumerate(messages):
                by_partition[message.partition].append(number)
            targets, full = self._targets(queue, first, messages, by_partition)
            ids = [
                id_of(first + number, buckets.with_level(rest, targets[message.partition].level))
                for number, (message, rest) in enumerate(zip(messages, random_rests(len(messages)), strict=True))
            ]
            level = LEVELS[queue.consistency]
            now = self.now()
            statements = [
                self._message(queue, message_id, message, now, level)
                for message_id, message in zip(ids, messages, strict=True)
            ]
            whole = batch(statements, level, logged=len(targets) > 1) if len(statements) > 1 else statements[0]
            left = begun + seconds - boot_seconds()
            if left > 0:
                self._connection.execute(whole, left)
                self._connection.execute_later(full)
        if left <= 0 or boot_seconds() - begun > seconds:
            # Readers may have passed the place of the messages.
            raise StoreUnavailable(f"Storing took longer than {seconds:.1f} s")
        return ids

    def _targets(
        self,
        queue: StoredQueue,
        ticks: int,
        messages: Sequence[NewMessage],
        by_partition: Mapping[int, Sequence[int]],
    ) -> tuple[dict[int, Bucket], list[BoundStatement]]:
        """Return the bucket of each partition, which is in the index, and statements that mark some as full.

        Raises:
            NoQueue: the queue was removed.
        """
        level = LEVELS[queue.consistency]
        reads = [self._covering(queue, partition, ticks, level) for partition in by_partition]
        targets, entries, full = {}, [], []
        for (partition, numbers), rows in zip(by_partition.items(), self._connection.execute_all(reads), strict=True):
            known = list(entries_of(queue, rows))
            # Readers mark only full buckets as empty, but in a weak queue this replica may miss the first mark.
            full_ones = {entry.bucket for entry in known if entry.full is not None or entry.is_empty}
            bucket = buckets.choose(ticks, full_ones)
            lifetime = buckets.lifetime(max(messages[number].ttl for number in numbers))
            if not any(entry.bucket == bucket and entry.lifetimes[-1] >= lifetime for entry in known):
                entries.append(batch(self._entry_rows(queue, partition, bucket, lifetime, ticks, level), level))
            if buckets.fills(bucket, len(numbers), sum(len(messages[number].body) for number in numbers)):
                values = [
                    *(_seconds_in_index(bucket, lifetime, ticks), ticks, queue.key, partition, bucket.start),
                    *(bucket.level, lifetime),
                ]
                full.append(self._connection.bind(cql.MARK_FULL, values, level))
            targets[partition] = bucket
        self._connection.execute_all(entries)
        return targets, full

    def _covering(self, queue: StoredQueue, partition: int, ticks: int, level: int) -> BoundStatement:
        starts = [bucket.start for bucket in buckets.covering(ticks)]
        return self._connection.bind(cql.COVERING, [queue.key, partition, *starts], level)

    def _entry_rows(
        self, queue: StoredQueue, partition: int, bucket: Bucket, lifetime: int, ticks: int, level: int
    ) -> list[BoundStatement]:
        """Return the statements that add a bucket to the index, of one partition: a batch of them is one write."""
        seconds = _seconds_in_index(bucket, lifetime, ticks)
        return [
            self._connection.bind(
                cql.ADD_ENTRY, [queue.key, partition, kind, edge, bucket.level, lifetime, seconds], level
            )
            for kind, edge in ((START, bucket.start), (END, bucket.end))
        ]

    def _message(
        self, queue: StoredQueue, message_id: uuid.UUID, message: NewMessage, now: int, level: int
    ) -> BoundStatement:
        ticks, rest = place(message_id)
        bucket = bucket_of(Place(ticks, rest))
        values = [
            *(queue.key, message.partition, bucket.level, bucket.start, ticks, rest - SIGNED_OFFSET, message.body),
            *(message.content_type, now + message.ttl * TICKS_PER_SECOND, len(message.body)),
            max(message.ttl, 0) + 1,  # Cassandra's TTL is in whole seconds
        ]
        return self._connection.bind(cql.ADD_MESSAGE, values, level)

    def read(
        self,
        queue: StoredQueue,
        partition: int,
        *,
        start: Place | None = None,
        before: int | None = None,
        limit: int,
        descending: bool = False,
    ) -> list[StoredMessage]:
        lower, upper = Place(MIN_TICKS, 0), Place(MAX_TICKS + 1 if before is None else before, 0)
        if start is not None:
            if descending:
                upper = min(upper, _place_after(start))
            else:
                lower = max(lower, start)
        if lower >= upper or limit < 1:
            return []
        reading = Reading(self._connection, queue, partition, lower, upper, limit, descending)
        found = []
        with translated():
            now = self.now()
            for ticks, rest, expires, body, content_type in reading.messages():
                if expires > now:
                    found.append(StoredMessage(id_of(ticks, rest + SIGNED_OFFSET), partition, body, content_type))
                    if len(found) == limit:
                        break
            if reading.empty:
                self._tidy(queue, partition, reading.empty, now)
        return found

    def waiting(
        self, queue: StoredQueue, starts: Mapping[int, Place | None], *, before: int | None = None
    ) -> list[int]:
        def has_message(partition: int) -> bool:
            return bool(self.read(queue, partition, start=starts[partition], before=before, limit=1))

        with ThreadPoolExecutor(CONCURRENT_READS) as threads:
            return [one for one, found in zip(starts, threads.map(has_message, starts), strict=True) if found]

    def read_ids(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> list[StoredMessage]:
        with translated():
            found = self._connection.execute_all(self._at(cql.READ_ONE, queue, ids))
            now = self.now()
            return [
                StoredMessage(message_id, partition, row[3], row[4])
                for (partition, message_id), rows in zip(ids, found, strict=True)
                if (row := rows.one()) is not None and row[2] > now
            ]

    def overwrite(self, queue: StoredQueue, message_id: uuid.UUID, message: NewMessage) -> None:
        level = LEVELS[queue.consistency]
        at = place(message_id)
        with translated():
            self._require(queue, level)
            now, bucket, lifetime = self.now(), bucket_of(at), buckets.lifetime(message.ttl)
            entry = self._entry_rows(queue, message.partition, bucket, lifetime, now, level)
            self._connection.execute(batch(entry, level))
            self._connection.execute(self._message(queue, message_id, message, now, level))

    def delete(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> None:
        with translated():
            self._connection.execute_all(self._at(cql.DELETE_MESSAGE, queue, ids))

    def _at(self, statement: str, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> Iterator[BoundStatement]:
        """Yield a statement for each of these messages."""
        for partition, message_id in ids:
            at = place(message_id)
            bucket = bucket_of(at)
            values = [queue.key, partition, bucket.level, bucket.start, at.ticks, at.rest - SIGNED_OFFSET]
            yield self._connection.bind(statement, values, LEVELS[queue.consistency])

    def count(self, queues: Sequence[StoredQueue]) -> list[int]:
        return [number for number, _ in self._sizes(queues)]

    def stored_bytes(self, queues: Sequence[StoredQueue]) -> int:
        return sum(size for _, size in self._sizes(queues))

    def _sizes(self, queues: Sequence[StoredQueue]) -> list[tuple[int, int]]:
        with translated(), ThreadPoolExecutor(CONCURRENT_READS) as threads:
            return list(threads.map(self._measure, queues))

    def _measure(self, queue: StoredQueue) -> tuple[int, int]:
        """Return the number and the bytes of a queue's messages, estimated if they are many."""
        found = self._buckets(queue)
        random.shuffle(found)
        number = size = rows = measured = 0
        now = self.now()
        while measured < len(found) and (rows < MEASURED_MESSAGES or measured < MEASURED_BUCKETS):
            some = found[measured : measured + 1 + measured // 2]
            reads = [
                self._connection.bind(cql.MEASURE, [queue.key, *bucket], LEVELS[queue.consistency]) for bucket in some
            ]
            for result in self._connection.execute_all(reads):
                for expires, bytes_ in result:
                    rows += 1
                    if expires > now:
                        number, size = number + 1, size + bytes_
            measured += len(some)
        share = len(found) / measured if measured else 0
        return round(number * share), round(size * share)

    def _buckets(self, queue: StoredQueue) -> list[tuple[int, int, int]]:
        """Return the partition, level and start of the buckets in the index, or nothing if the queue was removed."""
        level = LEVELS[queue.consistency]
        if self._is_removed(queue, level):
            return []
        return [
            (partition, entry.bucket.level, entry.bucket.start)
            for partition, entry in self._entries(queue, level)
            if not entry.is_empty
        ]

    def _entries(self, queue: StoredQueue, level: int = ConsistencyLevel.LOCAL_QUORUM) -> Iterator[tuple[int, Entry]]:
        """Yield the entries of the index of all partitions."""
        partitions, every = range(1, queue.partitions + 1), [-SIGNED_OFFSET, SIGNED_OFFSET - 1]
        reads = (self._connection.bind(cql.FOLLOWING, [queue.key, number, *every], level) for number in partitions)
        for partition, rows in zip(partitions, self._connection.execute_all(reads), strict=True):
            for entry in entries_of(queue, rows):
                yield partition, entry

    def _delete_messages(self, queue: StoredQueue) -> None:
        """Delete the messages, but not the index: a push may have found its bucket there."""
        self._connection.execute_all(
            self._connection.bind(cql.DELETE_BUCKET, [queue.key, partition, bucket.level, bucket.start])
            for partition, (bucket, *_) in self._entries(queue)
        )

    def remove_expired(self, limit: int) -> int:
        return 0  # Cassandra does

    def _tidy(self, queue: StoredQueue, partition: int, entries: Iterable[Entry], read_at: int) -> None:
        """Remove buckets from the index in which a reader found nothing from the ticks ``read_at`` on.

        No push may write to the bucket any more. The time of the removal is before the read, so that it doesn't hide an
        entry that somebody wrote meanwhile. One bucket follows the other: a failure leaves the rest to the next read.
        """
        bind, level = self._connection.bind, ConsistencyLevel.ALL
        settled = read_at - round((SETTLED_SECONDS + self.delay) * TICKS_PER_SECOND)
        at = read_at // 10 - SETTLED_SECONDS * 1_000_000
        key = [queue.key, partition]
        try:
            for bucket, full, _, lifetimes in entries:
                if bucket.end >= settled and (full is None or full >= settled):
                    continue
                # A message of a weak queue may be on a replica that the reader didn't ask.
                any_left = bind(cql.FIND_ANY, [*key, bucket.level, bucket.start], level)
                if queue.consistency == "weak" and self._connection.execute(any_left).one() is not None:
                    continue
                changes = []
                for kind, edge in ((START, bucket.start), (END, bucket.end)):
                    where = [*key, kind, edge, bucket.level]
                    if bucket.end < settled:
                        changes.append(bind(cql.DELETE_ENTRY, [at, *where], level))
                    else:
                        changes += [
                            bind(
                                cql.MARK_EMPTY,
                                [_seconds_in_index(bucket, lifetime, read_at), at, *where, lifetime],
                                level,
                            )
                            for lifetime in lifetimes
                        ]
                self._connection.execute_all(changes)
        except ERRORS as error:
            logger.info("Empty buckets stay in the index until the next read: %s", error)

    # Positions

    def positions(self, queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
        with translated():
            if self._is_removed(queue):
                return {}
            return self._positions(queue, consumer)[1]

    def set_positions(
        self,
        queue: StoredQueue,
        consumer: str,
        positions: Mapping[int, uuid.UUID],
        *,
        unchanged: Mapping[int, uuid.UUID] | None = None,
    ) -> None:
        def change(known: dict[int, uuid.UUID]) -> _Changes:
            if unchanged is not None and known != unchanged:
                raise PositionsChanged
            return positions

        if positions:
            with translated():
                self._require(queue)
                self._change_positions(queue, consumer, change)

    def advance_positions(
        self, queue: StoredQueue, consumer: str, moves: Mapping[int, tuple[uuid.UUID | None, uuid.UUID]]
    ) -> set[int]:
        def change(known: dict[int, uuid.UUID]) -> _Changes:
            return {partition: to for partition, (at, to) in moves.items() if known.get(partition) == at}

        if not moves:
            return set()
        with translated():
            self._require(queue)
            return set(self._change_positions(queue, consumer, change))

    def delete_positions(self, queue: StoredQueue, consumer: str) -> None:
        with translated():
            self._change_positions(queue, consumer, lambda known: dict.fromkeys(known))

    def consumers(self, queue: StoredQueue) -> Iterator[str]:
        with translated():
            if self._is_removed(queue):
                return
            for (consumer,) in self._connection.execute(self._connection.bind(cql.LIST_CONSUMERS, [queue.key])):
                if self._positions(queue, consumer)[1]:
                    yield consumer

    def _positions(self, queue: StoredQueue, consumer: str) -> tuple[uuid.UUID | None, dict[int, uuid.UUID]]:
        """Return the version of a consumer's positions, and the positions."""
        rows = list(self._connection.execute(self._connection.bind(cql.GET_POSITIONS, [queue.key, consumer])))
        version = rows[0][0] if rows else None
        return version, {partition: message_id for _, partition, message_id in rows if message_id is not None}

    def _change_positions(self, queue: StoredQueue, consumer: str, change: _Change) -> _Changes:
        """Make the changes that ``change`` returns for the current positions; None deletes one. Return them."""
        bind, key = self._connection.bind, [queue.key, consumer]
        for _ in range(MAX_ATTEMPTS):
            version, known = self._positions(queue, consumer)
            changes = change(known)
            if not changes:
                return changes
            if not known:
                self._connection.execute(bind(cql.ADD_CONSUMER, key))
            statements = [bind(cql.CHANGE_VERSION, [self._new_id(), *key, version])]
            for partition, message_id in changes.items():
                if message_id is None:
                    statements.append(bind(cql.DELETE_POSITION, [*key, partition]))
                else:
                    statements.append(bind(cql.SET_POSITION, [message_id, *key, partition]))
            if self._transact(batch(statements, ConsistencyLevel.LOCAL_QUORUM)):
                return changes
        raise StoreUnavailable(f"Others keep changing the positions of {consumer}.")

    # Helpers

    def _transact(self, statement: Any) -> bool:
        """Execute a lightweight transaction, and return whether it was applied."""
        statement.serial_consistency_level = ConsistencyLevel.SERIAL
        statement.is_idempotent = False
        statement.retry_policy = FallthroughRetryPolicy()
        return self._connection.execute(statement).was_applied

    def _is_removed(self, queue: StoredQueue, level: int = ConsistencyLevel.LOCAL_QUORUM) -> bool:
        return self._connection.execute(self._connection.bind(cql.IS_REMOVED, [queue.key], level)).one() is not None

    def _require(self, queue: StoredQueue, level: int = ConsistencyLevel.LOCAL_QUORUM) -> None:
        """Make sure that the queue was not removed.

        Raises:
            NoQueue: it was.
        """
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


def _seconds_in_index(bucket: Bucket, lifetime: int, ticks: int) -> int:
    """Return the TTL of an entry of the index that is written now: its bucket's rest, and that of the last message."""
    rest = min(max(bucket.end - ticks, 0), 2 * buckets.WIDTHS[0])  # a client's id may be in the far future
    return rest // TICKS_PER_SECOND + lifetime + SETTLED_SECONDS


def _row_or_none(application: str, rows: Rows) -> _Row | None:
    row = rows.one()
    return None if row is None else _row_of(application, row)


def _row_of(application: str, row: Sequence[Any]) -> _Row:
    name, key, version, partitions, type_, consistency, principals, listing = row
    named = tuple(principals or ())
    queue = StoredQueue(application, name, _time_of(key), partitions, type_, consistency, named, key)
    return _Row(queue, version, listing)


def _time_of(key: uuid.UUID) -> datetime:
    return _EPOCH + timedelta(microseconds=place(key).ticks // 10)


def _place_after(at: Place) -> Place:
    return Place(at.ticks, at.rest + 1) if at.rest < MAX_REST else Place(at.ticks + 1, 0)


def _shard(name: str) -> int:
    return zlib.crc32(name.encode()) % SHARDS
