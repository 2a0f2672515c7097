"""What a store of queues and messages can do: the interface that every store fits, and which one is in use.

It is kept small enough for a store without joins, without transactions over several queues and with counters that may
be wrong after a fault, such as Cassandra. The rules (who may, how many partitions, which texts) stand above it.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.conf import settings
from django.utils.module_loading import import_string

from guardian_store.ids import Place


class StoreError(Exception):
    """What a store could not do."""


class StoreUnavailable(StoreError):
    """The store can't be reached, or failed. Nothing of the call is stored, or it isn't known whether it is."""


class NoQueue(StoreError):
    """There is no such queue: it never was, or it was removed, perhaps since it was found."""


class QueueExists(StoreError):
    """There is a queue of this name already."""


@dataclass(frozen=True, slots=True)
class StoredQueue:
    """A queue, as the store knows it. ``key`` is the store's own, and means nothing elsewhere."""

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
    """A message to be stored: in this partition (from 1), for ``ttl`` seconds."""

    body: bytes
    partition: int
    ttl: int
    content_type: str


class StoredMessage(NamedTuple):
    """A message as it is read. Its time is that of its id."""

    id: uuid.UUID
    partition: int
    body: bytes
    content_type: str


class MessageStore(ABC):
    """Queues and their messages.

    Within a partition messages are in the order of their ids (``guardian_store.ids.place``), and a message that is
    pushed has an id after those of all that were readable in its partition before: whoever has read up to one misses
    none, except where ``delay`` says otherwise. A message past its ttl is in no answer.

    Every method may raise ``StoreUnavailable``. All of them may be called by many threads and processes at once.
    """

    delay: float = 0
    """Seconds for which a message isn't to be shown after it was written: so long a store may need until all of it
    agrees what came before. 0 where a write is seen at once by all. What reads obeys it; the store doesn't."""

    # Queues

    @abstractmethod
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
        """Make a queue, from now on.

        Raises:
            QueueExists: the application has one of this name; it is left as it is.
        """

    @abstractmethod
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
        """Change what is given, and return the queue as it is then. Of two numbers of partitions the larger stays.

        Raises:
            NoQueue: there is none of this name.
        """

    @abstractmethod
    def find(self, application: str, name: str) -> StoredQueue:
        """Return a queue.

        Raises:
            NoQueue: there is none of this name.
        """

    @abstractmethod
    def queues(self, application: str, *, start: str = "", limit: int | None = None) -> list[StoredQueue]:
        """Return the application's queues whose name is ``start`` or comes after it, by name (in bytes), this many."""

    @abstractmethod
    def queues_for_principal(
        self, principal: str, *, start: tuple[str, str] = ("", ""), limit: int | None = None
    ) -> list[StoredQueue]:
        """Return the queues of any application whose principals have this one among them, this many.

        They come by application, then by name (both in bytes), from ``start`` on, which is such a pair. However many
        queues there are, only those that are returned cost anything.
        """

    @abstractmethod
    def remove(self, application: str, name: str) -> None:
        """Remove a queue with its messages and positions: from reads at once, from the disk by and by.

        Raises:
            NoQueue: there is none of this name.
        """

    # Messages. ``queue`` is one that ``find``, ``register``, ``update`` or ``queues`` gave.

    @abstractmethod
    def push(self, queue: StoredQueue, messages: Sequence[NewMessage]) -> list[uuid.UUID]:
        """Store messages, all or none, and return their ids in the same order.

        Raises:
            NoQueue: it was removed since it was found.
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
        descending: bool = False,
    ) -> list[StoredMessage]:
        """Return the messages of a partition, at most ``limit``, in order of their place, or against it.

        ``start`` is the first place that is looked at (the last one, against the order), and counts itself;
        ``before`` leaves out messages of these ticks since 1970 and younger.
        """

    @abstractmethod
    def read_ids(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> list[StoredMessage]:
        """Return the messages with these partitions and ids, in the order asked; those that aren't there left out."""

    @abstractmethod
    def overwrite(self, queue: StoredQueue, message_id: uuid.UUID, message: NewMessage) -> None:
        """Store a message with this id, in place of the one that has it in that partition, or as a new one.

        It stands where the id says, before what was read already or in the future: a reader may miss it.

        Raises:
            NoQueue: it was removed since it was found.
        """

    @abstractmethod
    def delete(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> None:
        """Remove the messages with these partitions and ids. One that isn't there is no error."""

    @abstractmethod
    def count(self, queues: Sequence[StoredQueue]) -> list[int]:
        """Return how many messages each of these queues has. An estimate where the store can't do better."""

    @abstractmethod
    def truncate(self, queue: StoredQueue) -> None:
        """Remove all messages of a queue that are stored by now: from reads at once, from the disk by and by.

        Its positions stay: ids only go forward.

        Raises:
            NoQueue: it was removed since it was found.
        """

    @abstractmethod
    def remove_expired(self, limit: int) -> int:
        """Remove from the disk at most so many messages that no read shows any more, and return how many those were.

        Short statements, so that nobody waits for it. Called again and again by a task in the background.
        """

    # Positions: how far a consumer, known by a name of its own choice, has processed each partition.

    @abstractmethod
    def positions(self, queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
        """Return the id of the last message that the consumer has processed, by partition."""

    @abstractmethod
    def set_positions(self, queue: StoredQueue, consumer: str, positions: Mapping[int, uuid.UUID]) -> None:
        """Set the positions of these partitions, and leave those of the others.

        Raises:
            NoQueue: it was removed since it was found.
        """

    @abstractmethod
    def advance_positions(
        self, queue: StoredQueue, consumer: str, moves: Mapping[int, tuple[uuid.UUID | None, uuid.UUID]]
    ) -> set[int]:
        """Set the positions of these partitions from one message to another, and return the partitions that were set.

        Only where the position still is the first of the two (None: there is none yet), by a conditional statement: so
        of two workers that both believe that they have a partition, none takes the other's work back.

        Raises:
            NoQueue: it was removed since it was found.
        """

    @abstractmethod
    def delete_positions(self, queue: StoredQueue, consumer: str) -> None:
        """Forget how far the consumer is."""

    @abstractmethod
    def consumers(self, queue: StoredQueue) -> Iterable[str]:
        """Return the names of the consumers that have positions, in order."""


STORES = {"database": "message_store.database.DatabaseStore"}
"""The class of each store, by its name in the setting ``MESSAGE_STORE``."""


@lru_cache(maxsize=1)
def _create(name: str) -> MessageStore:
    created: MessageStore = import_string(STORES[name])()
    return created


def store() -> MessageStore:
    """Return the store that the setting ``MESSAGE_STORE`` names, one for the process."""
    return _create(settings.MESSAGE_STORE)
