"""A store that lies in memory, for tests: one process has it, and it is gone with that."""

import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from threading import RLock
from typing import NamedTuple

from message_store.ids import FIRST, TICKS, Place, place, rests
from message_store.ids import message_id as message_id_at
from message_store.ids import now as ticks_now
from message_store.store import MessageStore, NewMessage, NoQueue, QueueExists, StoredMessage, StoredQueue


class _Kept(NamedTuple):
    """What is kept of a message under its place."""

    body: bytes
    content_type: str
    expires: int


@dataclass
class _Partition:
    """The messages of a partition, and their places in order."""

    last: int = FIRST
    places: list[Place] = field(default_factory=list)
    messages: dict[Place, _Kept] = field(default_factory=dict)

    def put(self, at: Place, message: _Kept) -> None:
        if at not in self.messages:
            insort(self.places, at)
        self.messages[at] = message

    def drop(self, at: Place) -> None:
        if self.messages.pop(at, None) is not None:
            del self.places[bisect_left(self.places, at)]


@dataclass
class _Queue:
    """A queue, its messages by partition, and the positions by consumer."""

    stored: StoredQueue
    partitions: dict[int, _Partition] = field(default_factory=dict)
    positions: dict[str, dict[int, uuid.UUID]] = field(default_factory=dict)


class MemoryStore(MessageStore):
    """Everything in dictionaries, under one lock."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._keys = count(1)
        self._queues: dict[int, _Queue] = {}
        self._names: dict[tuple[str, str], int] = {}

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
        with self._lock:
            if (application, name) in self._names:
                raise QueueExists(name)
            key = self._names[application, name] = next(self._keys)
            stored = StoredQueue(
                application, name, datetime.now(UTC), partitions, type, consistency, tuple(principals), key
            )
            self._queues[key] = _Queue(stored)
            return stored

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
        with self._lock:
            queue = self._named(application, name)
            old = queue.stored
            queue.stored = replace(
                old,
                partitions=max(old.partitions, partitions or 0),
                type=old.type if type is None else type,
                consistency=old.consistency if consistency is None else consistency,
                principals=old.principals if principals is None else tuple(principals),
            )
            return queue.stored

    def find(self, application: str, name: str) -> StoredQueue:
        with self._lock:
            return self._named(application, name).stored

    def queues(self, application: str, *, start: str = "", limit: int | None = None) -> list[StoredQueue]:
        with self._lock:
            # Python has texts in the order of their code points, which is that of their bytes in UTF-8.
            names = sorted(name for of, name in self._names if of == application and name >= start)
            return [self._named(application, name).stored for name in names[:limit]]

    def naming(
        self, principal: str, *, start: tuple[str, str] = ("", ""), limit: int | None = None
    ) -> list[StoredQueue]:
        with self._lock:
            found = (self._queues[self._names[pair]].stored for pair in sorted(self._names) if pair >= start)
            return [stored for stored in found if principal in stored.principals][:limit]

    def remove(self, application: str, name: str) -> None:
        with self._lock:
            self._named(application, name)
            del self._queues[self._names.pop((application, name))]

    def push(self, queue: StoredQueue, messages: Sequence[NewMessage]) -> list[uuid.UUID]:
        with self._lock:
            partitions = self._found(queue).partitions
            now = ticks_now()
            pushed = []
            for message, rest in zip(messages, rests(len(messages)), strict=True):
                partition = partitions.setdefault(message.partition, _Partition())
                partition.last = max(partition.last + 1, now)
                at = Place(partition.last, rest)
                partition.put(at, _kept(message, now))
                pushed.append(message_id_at(at))
            return pushed

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
        with self._lock:
            kept = self._partition(queue, partition)
            places = kept.places
            first, end = 0, len(places)
            if start is not None and descending:
                end = bisect_right(places, start)
            elif start is not None:
                first = bisect_left(places, start)
            if before is not None:
                end = min(end, bisect_left(places, Place(before, 0)))
            found = places[first:end]
            now = ticks_now()
            shown = (at for at in (reversed(found) if descending else found) if kept.messages[at].expires > now)
            return [_stored(at, partition, kept.messages[at]) for at, _ in zip(shown, range(limit), strict=False)]

    def read_ids(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> list[StoredMessage]:
        with self._lock:
            now = ticks_now()
            found = []
            for partition, message_id in ids:
                at = place(message_id)
                message = self._partition(queue, partition).messages.get(at)
                if message is not None and message.expires > now:
                    found.append(_stored(at, partition, message))
            return found

    def overwrite(self, queue: StoredQueue, message_id: uuid.UUID, message: NewMessage) -> None:
        with self._lock:
            partition = self._found(queue).partitions.setdefault(message.partition, _Partition())
            partition.put(place(message_id), _kept(message, ticks_now()))

    def delete(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> None:
        with self._lock:
            for partition, message_id in ids:
                self._partition(queue, partition).drop(place(message_id))

    def count(self, queues: Sequence[StoredQueue]) -> list[int]:
        with self._lock:
            now = ticks_now()
            return [
                sum(message.expires > now for kept in self._partitions(queue) for message in kept.messages.values())
                for queue in queues
            ]

    def truncate(self, queue: StoredQueue) -> None:
        with self._lock:
            for partition in self._found(queue).partitions.values():
                partition.places.clear()
                partition.messages.clear()

    def remove_expired(self, limit: int) -> int:
        with self._lock:
            now = ticks_now()
            expired = [
                (partition, at)
                for queue in self._queues.values()
                for partition in queue.partitions.values()
                for at, message in partition.messages.items()
                if message.expires <= now
            ][:limit]
            for partition, at in expired:
                partition.drop(at)
            return len(expired)

    def positions(self, queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
        with self._lock:
            kept = self._queues.get(queue.key)
            return dict(kept.positions.get(consumer, {})) if kept is not None else {}

    def set_positions(self, queue: StoredQueue, consumer: str, positions: Mapping[int, uuid.UUID]) -> None:
        with self._lock:
            kept = self._found(queue).positions
            if positions:
                kept.setdefault(consumer, {}).update(positions)

    def advance_positions(
        self, queue: StoredQueue, consumer: str, moves: Mapping[int, tuple[uuid.UUID | None, uuid.UUID]]
    ) -> set[int]:
        with self._lock:
            kept = self._found(queue).positions
            known = kept.get(consumer, {})
            moved = {partition: to for partition, (at, to) in moves.items() if known.get(partition) == at}
            if moved:
                kept[consumer] = {**known, **moved}
            return set(moved)

    def remove_positions(self, queue: StoredQueue, consumer: str) -> None:
        with self._lock:
            if queue.key in self._queues:
                self._queues[queue.key].positions.pop(consumer, None)

    def consumers(self, queue: StoredQueue) -> list[str]:
        with self._lock:
            kept = self._queues.get(queue.key)
            return sorted(kept.positions) if kept is not None else []

    def _named(self, application: str, name: str) -> _Queue:
        try:
            return self._queues[self._names[application, name]]
        except KeyError:
            raise NoQueue(name) from None

    def _found(self, queue: StoredQueue) -> _Queue:
        try:
            return self._queues[queue.key]
        except KeyError:
            raise NoQueue(queue.name) from None

    def _partitions(self, queue: StoredQueue) -> list[_Partition]:
        kept = self._queues.get(queue.key)
        return [] if kept is None else list(kept.partitions.values())

    def _partition(self, queue: StoredQueue, partition: int) -> _Partition:
        """Return a partition to read from: an empty one where nothing was pushed, or the queue was removed."""
        kept = self._queues.get(queue.key)
        return _Partition() if kept is None else kept.partitions.get(partition, _Partition())


def _kept(message: NewMessage, now: int) -> _Kept:
    return _Kept(message.body, message.content_type, now + message.ttl * TICKS)


def _stored(at: Place, partition: int, message: _Kept) -> StoredMessage:
    return StoredMessage(message_id_at(at), partition, message.body, message.content_type)
