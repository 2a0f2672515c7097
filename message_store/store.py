"""The interface of message stores, and the store in use.

The interface also suits a store such as Cassandra: without joins, without transactions over several queues, and with
counters that may be wrong after a fault. ``queues.py`` has limits and error texts, ``principals.py`` permissions.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict, Unpack

from django.conf import settings
from django.utils.module_loading import import_string

from guardian_store import _ids as ids
from guardian_store._ids import TICKS_PER_SECOND, Place

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TICKS_PER_MICROSECOND = TICKS_PER_SECOND // 1_000_000

SIGNED_OFFSET = 1 << 63
"""Subtracted from the rest of an id, since integers in databases are signed."""

MAX_SECONDS_AHEAD = 60
"""How far a client's message id may be in the future, to allow for its clock."""

MESSAGE_OVERHEAD = 100
"""Bytes that count for a message besides its body and content type. Its row and indexes take about as many."""


class StoreUnavailable(Exception):
    """The store is unreachable or failed. The call's changes may or may not be stored."""


class NoQueue(Exception):
    """The queue does not exist, or was deleted after it was found."""


class PositionsChanged(Exception):
    """The positions are no longer those that the caller read."""


class BatchTooLarge(Exception):
    """The messages of one push are more than the store can store as a whole. None is stored."""


class QueueExists(Exception):
    """The application has a queue of this name."""


class QueueSettings(TypedDict, total=False):
    """The settings of a queue, or some of them."""

    partitions: int
    type: str
    consistency: str
    principals: Sequence[str]


DEFAULT_SETTINGS = QueueSettings(partitions=1, type="user", consistency="strong", principals=())


@dataclass(frozen=True, slots=True)
class StoredQueue:
    """A queue in the store. Only the store interprets ``key``."""

    application: str
    name: str
    created: datetime
    partitions: int
    type: str
    consistency: str
    principals: tuple[str, ...]
    key: Any


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to store. Partitions count from 1; ``ttl`` is in seconds."""

    body: bytes
    partition: int
    ttl: int
    content_type: str

    @property
    def size(self) -> int:
        return len(self.body) + len(self.content_type)


class StoredMessage(NamedTuple):
    """A message in the store. Its id contains its time."""

    id: uuid.UUID
    partition: int
    body: bytes
    content_type: str

    @property
    def size(self) -> int:
        return len(self.body) + len(self.content_type)


class MessageStore(ABC):
    """Queues and their messages.

    The messages of a partition are ordered by ``guardian_store._ids.place``. A pushed message gets an id after those of
    all messages that were readable in its partition before. So a reader that continues after its last message misses
    none, unless ``delay`` is set. Expired messages are never returned.

    Every method may raise ``StoreUnavailable``, and one about a queue ``NoQueue`` if it was deleted. The methods are
    safe for concurrent threads and processes.
    """

    in_database: bool = False
    """Whether what a call stores is part of the caller's transaction in Django's database."""

    @property
    def delay(self) -> float:
        """Seconds to hide new messages from reads: how long an eventually consistent store takes to agree on them.

        Callers of ``read`` apply it, the store does not.
        """
        return float(settings.MESSAGE_STORE_DELAY_SECONDS)

    def now(self) -> int:
        """Return the store's time in ticks since 1970. ``delay`` and ids refer to it."""
        return ids.now()

    # Queues

    @abstractmethod
    def register(self, application: str, name: str, **given: Unpack[QueueSettings]) -> StoredQueue:
        """Create a queue and return it. Raises QueueExists for a name that exists; that queue stays unchanged."""

    @abstractmethod
    def update(self, application: str, name: str, **given: Unpack[QueueSettings]) -> StoredQueue:
        """Change the given settings and return the updated queue. A smaller number of partitions is ignored."""

    @abstractmethod
    def find(self, application: str, name: str) -> StoredQueue:
        """Return a queue."""

    @abstractmethod
    def queues(self, application: str, *, start: str = "", limit: int = 1000) -> list[StoredQueue]:
        """Return up to ``limit`` queues of an application, from the name ``start`` on, in byte order of their names."""

    @abstractmethod
    def queues_for_principal(
        self, principal: str, *, start: tuple[str, str] = ("", ""), limit: int = 1000
    ) -> list[StoredQueue]:
        """Return up to ``limit`` queues of all applications that name a principal.

        They are in byte order of application and name, from this pair, ``start``, on. The cost depends on the number of
        returned queues only.
        """

    @abstractmethod
    def remove(self, application: str, name: str) -> None:
        """Delete a queue with its messages and positions. Reads miss them immediately; a task frees the disk space."""

    # Messages. ``queue`` comes from ``find``, ``register``, ``update`` or ``queues``.

    @abstractmethod
    def push(self, queue: StoredQueue, messages: Sequence[NewMessage]) -> list[uuid.UUID]:
        """Store all of the messages or none. Return their ids in the same order.

        Raises BatchTooLarge if they are too large to be stored together.
        """

    @abstractmethod
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
        """Return up to ``limit`` messages of a partition in the order of their places, or in reverse.

        Reading begins at ``start``, inclusive. Messages at or after the ticks ``before`` are omitted. The message with
        which the sizes add up to ``max_bytes`` is the last one. Bodies after it are not fetched.
        """

    @abstractmethod
    def waiting(
        self, queue: StoredQueue, starts: Mapping[int, Place | None], *, before: int | None = None
    ) -> list[int]:
        """Return the partitions that have a message at or after their start, and before the ticks ``before``.

        Workers call this for their idle partitions all the time, so a store should need one statement for it.
        """

    @abstractmethod
    def read_ids(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> list[StoredMessage]:
        """Return the messages with these partitions and ids, in this order, without those that don't exist."""

    @abstractmethod
    def overwrite(self, queue: StoredQueue, message_id: uuid.UUID, message: NewMessage) -> None:
        """Create or replace the message with this id in its partition.

        The id determines its place, so a reader that is past this place misses it.
        """

    @abstractmethod
    def delete(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> None:
        """Delete the messages with these partitions and ids, ignoring those that don't exist."""

    @abstractmethod
    def count(self, queues: Sequence[StoredQueue]) -> list[int]:
        """Return the number of messages of each queue. Some stores only estimate it."""

    @abstractmethod
    def stored_bytes(self, queues: Sequence[StoredQueue]) -> int:
        """Return the sizes of the messages in these queues, with ``MESSAGE_OVERHEAD``. Some stores only estimate it.

        The cost grows with the number of messages.
        """

    @abstractmethod
    def remove_expired(self, limit: int) -> int:
        """Free the disk space of up to ``limit`` expired or deleted messages. Return how many.

        A background task calls this repeatedly. Its statements are short, so that they don't block others.
        """

    # Positions: the last message of each partition that a consumer has processed. Consumers choose their names.

    @abstractmethod
    def positions(self, queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
        """Return the id of the consumer's last processed message by partition."""

    @abstractmethod
    def set_positions(
        self,
        queue: StoredQueue,
        consumer: str,
        positions: Mapping[int, uuid.UUID],
        *,
        unchanged: Mapping[int, uuid.UUID] | None = None,
    ) -> None:
        """Set the positions of these partitions only, if all of the consumer's positions still are ``unchanged``.

        Otherwise raise PositionsChanged, and set none.
        """

    @abstractmethod
    def advance_positions(
        self, queue: StoredQueue, consumer: str, moves: Mapping[int, tuple[uuid.UUID | None, uuid.UUID]]
    ) -> set[int]:
        """Move positions from one message to another, and return the partitions whose positions moved.

        A position moves only if it still is the first of the two ids (None: no position). So if two workers both
        believe that they own a partition, neither reverts the other's progress.
        """

    @abstractmethod
    def delete_positions(
        self, queue: StoredQueue, consumer: str, *, unchanged: Mapping[int, uuid.UUID] | None = None
    ) -> None:
        """Delete a consumer's positions, if all of them still are ``unchanged``. Otherwise raise PositionsChanged."""

    @abstractmethod
    def consumers(self, queue: StoredQueue) -> Iterable[str]:
        """Return the sorted names of the consumers with positions."""


def time_of(ticks: int) -> datetime:
    """Return the time of these ticks, rounded down to microseconds."""
    return EPOCH + timedelta(microseconds=ticks // TICKS_PER_MICROSECOND)


STORES = {
    "database": "message_store.database.store.DatabaseStore",
    "cassandra": "message_store.cassandra.store.CassandraStore",
}


@lru_cache(maxsize=1)
def _create(name: str) -> MessageStore:
    created: MessageStore = import_string(STORES[name])()
    return created


def store() -> MessageStore:
    """Return this process's store, chosen by the setting ``MESSAGE_STORE``."""
    return _create(settings.MESSAGE_STORE)
