"""Reading the messages of a partition on Cassandra: from one bucket to the next, in either direction."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cassandra import ConsistencyLevel

from guardian_store._ids import Place
from message_store.cassandra import buckets, cql
from message_store.cassandra.buckets import Bucket
from message_store.cassandra.cluster import Connection
from message_store.cassandra.cql import REMOVED, START
from message_store.store import SIGNED_OFFSET, NoQueue, StoredQueue

LEVELS = {
    "weak": ConsistencyLevel.ONE,
    "strong": ConsistencyLevel.LOCAL_QUORUM,
    "very_strong": ConsistencyLevel.EACH_QUORUM,
}
"""What a queue's consistency means for its messages. Queues and positions always need a quorum."""

BUCKETS_PER_PAGE = 100


class Entry(NamedTuple):
    """A bucket in the index. ``full``: the ticks when it was marked as full."""

    bucket: Bucket
    full: int | None
    is_empty: bool
    lifetimes: tuple[int, ...]


class Reading:
    """One read of a partition: its buckets in order, and their messages merged.

    Buckets of different widths overlap in time. A bucket is opened before the reading reaches its first place.
    """

    def __init__(
        self,
        connection: Connection,
        queue: StoredQueue,
        partition: int,
        lower: Place,
        upper: Place,
        limit: int,
        descending: bool,
        sizes_only: bool = False,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._partition = partition
        self._lower = lower
        self._upper = upper
        self._limit = limit
        self._sign = -1 if descending else 1
        up, down = (cql.SIZE_UP, cql.SIZE_DOWN) if sizes_only else (cql.READ_UP, cql.READ_DOWN)
        self._statement = down if descending else up
        self._level = LEVELS[queue.consistency]
        self._heap: list[Any] = []
        self._opened = 0
        self.empty: list[Entry] = []
        """The buckets without messages, among those that were read as a whole."""

    def messages(self) -> Iterator[Any]:
        at = self._lower.ticks if self._sign > 0 else self._upper.ticks - (self._upper.rest == 0)
        bind, key = self._connection.bind, [self._queue.key, self._partition]
        starts = [bucket.start for bucket in buckets.covering(at)]
        if self._sign > 0:
            beyond = bind(cql.FOLLOWING, [*key, at, self._upper.ticks + 1], self._level, fetch=BUCKETS_PER_PAGE)
        else:
            beyond = bind(cql.PRECEDING, [*key, self._lower.ticks, at], self._level, fetch=BUCKETS_PER_PAGE)
        found, others = self._connection.execute_all([bind(cql.COVERING, [*key, *starts], self._level), beyond])
        try:
            covering = list(entries_of(self._queue, found))
        except NoQueue:
            return
        self._open(covering, at)
        further = entries_of(self._queue, others)
        following = next(further, None)
        while True:
            while following is not None and (not self._heap or self._bound(following.bucket) <= self._heap[0][0]):
                self._open([following], following.bucket.start)
                following = next(further, None)
            if not self._heap:
                return
            _, number, row, rows = heapq.heappop(self._heap)
            yield row
            self._advance(number, rows)

    def _open(self, entries: Sequence[Entry], at: int) -> None:
        """Read buckets that the reading reaches at these ticks, all at once, and put their first messages on the heap.

        Most of the next messages are in the widest bucket that was not full then, or if all were, in the finest: a
        whole page of it is read.
        """
        opened = [entry for entry in entries if not entry.is_empty]
        levels = [entry.bucket.level for entry in opened]
        not_full = [entry.bucket.level for entry in opened if entry.full is None or entry.full > at]
        likely = min(not_full, default=max(levels, default=None))
        reads = [
            self._connection.bind(
                self._statement,
                [
                    *(self._queue.key, self._partition, entry.bucket.level, entry.bucket.start),
                    *(self._lower.ticks, self._lower.rest - SIGNED_OFFSET),
                    *(self._upper.ticks, self._upper.rest - SIGNED_OFFSET),
                ],
                self._level,
                fetch=self._limit if entry.bucket.level == likely else self._limit // 4 + 1,
            )
            for entry in opened
        ]
        for entry, result in zip(opened, self._connection.execute_all(reads), strict=True):
            self._opened += 1
            if not self._advance(self._opened, iter(result)) and self._is_within(entry):
                self.empty.append(entry)

    def _advance(self, number: int, rows: Iterator[Any]) -> bool:
        """Put the next message of a bucket on the heap, and return whether there is one."""
        row = next(rows, None)
        if row is not None:
            heapq.heappush(self._heap, ((self._sign * row[0], self._sign * row[1]), number, row, rows))
        return row is not None

    def _bound(self, bucket: Bucket) -> tuple[int, int]:
        """Return the key of the first place that a message of this bucket may have."""
        return (bucket.start if self._sign > 0 else 1 - bucket.end, -SIGNED_OFFSET)

    def _is_within(self, entry: Entry) -> bool:
        bucket, full = entry.bucket, entry.full
        reaches_end = bucket.end <= self._upper.ticks or (full is not None and full < self._upper.ticks)
        return Place(bucket.start, 0) >= self._lower and reaches_end


def entries_of(queue: StoredQueue, rows: Iterable[Any]) -> Iterator[Entry]:
    for (kind, edge, level), same in groupby(rows, key=lambda row: row[:3]):
        if kind == REMOVED:
            raise NoQueue(queue.name)
        some = list(same)
        bucket = Bucket(edge if kind == START else edge - buckets.WIDTHS[level], level)
        marks = [full for _, _, _, _, full, _ in some if full is not None]
        is_empty = all(empty for *_, empty in some)
        yield Entry(bucket, max(marks, default=None), is_empty, tuple(sorted(row[3] for row in some)))
