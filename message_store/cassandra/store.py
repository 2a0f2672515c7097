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

import logging
import random
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cassandra import ConsistencyLevel
from cassandra.query import BoundStatement

from guardian_store._ids import MAX_TICKS, MIN_TICKS, TICKS_PER_SECOND, Place, id_of, place, random_rests
from message_store.cassandra import buckets, cql
from message_store.cassandra.buckets import Bucket, bucket_of
from message_store.cassandra.cluster import ERRORS, batch, boot_seconds, translated
from message_store.cassandra.cql import END, START
from message_store.cassandra.positions import PositionTables
from message_store.cassandra.reading import LEVELS, Entry, Reading, entries_of
from message_store.store import (
    MESSAGE_OVERHEAD,
    SIGNED_OFFSET,
    BatchTooLarge,
    NewMessage,
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

SETTLED_SECONDS = 60
"""After this time, no push writes to a bucket that is full or past."""

MEASURED_MESSAGES, MEASURED_BUCKETS = 20_000, 16
"""At least so many messages of a queue, in at least so many buckets, are counted. Of more, the number is estimated.

Buckets have very different sizes. In a simulation of four deep queues, 16 buckets estimated at most 3.3 times the
number, and in 95 % of cases at most twice.
"""

CONCURRENT_READS = 16


class CassandraStore(PositionTables):
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
        """Return the bucket of each partition, which is in the index, and statements that mark some as full."""
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
            *(message.content_type, now + message.ttl * TICKS_PER_SECOND, message.size),
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
        max_bytes: int | None = None,
        descending: bool = False,
    ) -> list[StoredMessage]:
        lower, upper = Place(MIN_TICKS, 0), Place(MAX_TICKS + 1 if before is None else before, 0)
        if start is not None:
            if descending:
                upper = min(upper, start.next)
            else:
                lower = max(lower, start)
        if lower >= upper or limit < 1:
            return []
        found = []
        with translated():
            now = self.now()
            if max_bytes is not None:
                # Pages of rows are fetched, of each bucket at once, so their bodies could be of any size together.
                sizes = Reading(self._connection, queue, partition, lower, upper, limit, descending, sizes_only=True)
                last = _last_within(sizes.messages(), max_bytes, limit, now)
                if last is not None:
                    lower, upper = (last, upper) if descending else (lower, last.next)
            reading = Reading(self._connection, queue, partition, lower, upper, limit, descending)
            for ticks, rest, expires, body, content_type in reading.messages():
                if expires > now:
                    found.append(StoredMessage(id_of(ticks, rest + SIGNED_OFFSET), partition, body, content_type))
                    if len(found) == limit:
                        break
            if reading.empty:
                self._clean_up(queue, partition, reading.empty, now)
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
        for partition, message_id in ids:
            at = place(message_id)
            bucket = bucket_of(at)
            values = [queue.key, partition, bucket.level, bucket.start, at.ticks, at.rest - SIGNED_OFFSET]
            yield self._connection.bind(statement, values, LEVELS[queue.consistency])

    def count(self, queues: Sequence[StoredQueue]) -> list[int]:
        return [number for number, _ in self._sizes(queues)]

    def stored_bytes(self, queues: Sequence[StoredQueue]) -> int:
        return sum(size + number * MESSAGE_OVERHEAD for number, size in self._sizes(queues))

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

    def _clean_up(self, queue: StoredQueue, partition: int, entries: Iterable[Entry], read_at: int) -> None:
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


def _last_within(sizes: Iterable[Any], max_bytes: int, limit: int, now: int) -> Place | None:
    """Return the place of the last message to read, or None if there are fewer, and smaller ones."""
    number = total = 0
    for ticks, rest, expires, size in sizes:
        if expires > now:
            number, total = number + 1, total + size
        if number == limit or total >= max_bytes:
            return Place(ticks, rest + SIGNED_OFFSET)
    return None


def _seconds_in_index(bucket: Bucket, lifetime: int, ticks: int) -> int:
    """Return the TTL of an entry of the index that is written now: its bucket's rest, and that of the last message."""
    rest = min(max(bucket.end - ticks, 0), 2 * buckets.WIDTHS[0])  # a client's id may be in the far future
    return rest // TICKS_PER_SECOND + lifetime + SETTLED_SECONDS
