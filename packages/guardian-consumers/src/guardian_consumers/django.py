"""For callbacks that write to Django's database: work, commit, publish, acknowledge, in that order.

    @in_transaction
    def ship(message): …

runs the work in a transaction. What it publishes with ``message.publish`` is collected, and published when the
transaction is committed; when the broker has confirmed all of it the callback returns, and the message is acknowledged.
A crash in any gap brings the message again, and nothing is lost:

- before the commit, nothing was done and nothing published;
- after it, the work is done again. So write it to be done again: delete and write anew, with `rewrite`;
- or have it done once, with `once` in place of `in_transaction`. A row in ``guardian_consumers.processed`` is written
  in the transaction of the work, with what is to be published. A redelivery finds it, and only publishes what may not
  have been published, with the same message ids: readers that are guarded as well drop what came twice.

Each message finds a database connection that isn't stale, in whichever thread.
"""

import base64
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pika
from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    close_old_connections,
    connections,
    models,
    transaction,
)

from guardian_consumers.errors import NotPublished
from guardian_consumers.message import Message
from guardian_consumers.outcomes import Retry, TimeLimitExceeded
from guardian_consumers.publisher import Publication
from guardian_consumers.retries import GENERATED_ID_PREFIX

if TYPE_CHECKING:
    from guardian_consumers.processed.models import Processed

logger = logging.getLogger(__name__)

Work = Callable[[Message], object]
Row = TypeVar("Row", bound=models.Model)

PRUNE_INTERVAL_SECONDS = 3600
"""How often a process looks for rows of processed messages that are old."""

MAX_ID_LENGTH = 255
"""Characters of an id that are kept as they are."""


class TransactionMessage(Message):
    """What the work gets: the message, but ``publish`` collects, and ``ack`` comes after the commit by itself."""

    __slots__ = ("_message", "publications")

    def __init__(self, message: Message) -> None:
        super().__init__(message._consumer, message._delivery, message.body)
        self._message = message
        self.publications: list[Publication] = []

    @property
    def settled(self) -> bool:
        """Whether it was dealt with already, as after its time limit."""
        return self._message.settled

    def ack(self) -> bool:
        """Raise RuntimeError: acknowledged before the commit, a crash would lose the work."""
        raise RuntimeError("in a transaction the message is acknowledged after the commit; it is no place for ack()")

    def publish(self, body: Any, routing_key: str, **options: Any) -> None:
        """Have another message published after the commit; the options are those of `Publisher.prepare`.

        What can't be sent at all raises here, so that the work isn't committed without it.
        """
        publication = self._consumer.publisher.prepare(body, routing_key, **options)
        publication.properties.encode()
        self.publications.append(publication)


@overload
def in_transaction(work: Work) -> Work: ...
@overload
def in_transaction(*, using: str = ...) -> Callable[[Work], Work]: ...
def in_transaction(work: Work | None = None, *, using: str = DEFAULT_DB_ALIAS) -> Work | Callable[[Work], Work]:
    """Decorate a callback: its work in a transaction, then what it published, then the acknowledgement.

    ``using`` is the database's alias. An exception rolls the work back, publishes nothing, and means what it always
    means. A database that is away or lost (OperationalError, InterfaceError) is a `Retry`, whatever the policy's
    default, unless its ``by_error`` names that. So is a message that isn't published after the commit.
    """
    if work is None:
        return partial(_decorated, using=using, guard=None)
    return _decorated(work, using, None)


@overload
def once(work: Work) -> Work: ...
@overload
def once(
    *, key: Callable[[Message], str] | None = ..., keep: timedelta = ..., using: str = ...
) -> Callable[[Work], Work]: ...
def once(
    work: Work | None = None,
    *,
    key: Callable[[Message], str] | None = None,
    keep: timedelta = timedelta(days=30),
    using: str = DEFAULT_DB_ALIAS,
) -> Work | Callable[[Work], Work]:
    """Decorate a callback as `in_transaction` does, and have the work of each message committed once.

    Needs ``guardian_consumers.processed`` in INSTALLED_APPS. Two messages are the same if they have the same id, or the
    same ``key(message)``, and come to the same logical queue. A message without an id can't be told from another one
    like it, which would be lost for the first: it is worked on at each delivery, unless there is a ``key``.
    Rows are kept for so long: longer than a message may lie in a delay or parking queue.
    """
    guard = _Deduplication(key, keep, using)
    if work is None:
        return partial(_decorated, using=using, guard=guard)
    return _decorated(work, using, guard)


def rewrite(old: models.QuerySet[Row], new: Iterable[Row]) -> None:
    """Delete the rows that a message's work may have written before, and write them: doing it twice is doing it once.

    Two at once are only kept apart by a unique constraint, by which one of them fails and is tried again.
    """
    with transaction.atomic(using=old.db):
        old.delete()
        old.model._default_manager.using(old.db).bulk_create(new)


def with_fresh_connections(work: Work) -> Work:
    """Return a callback that does this work with database connections that are not stale, in any thread.

    Those that failed, or are older than CONN_MAX_AGE, are closed before and after it. Django does so for requests.
    """

    @wraps(work)
    def handle(message: Message) -> None:
        close_old_connections()
        try:
            work(message)
        finally:
            close_old_connections()

    return handle


class _Deduplication:
    """Knows which messages were processed, by rows of ``guardian_consumers.processed``."""

    def __init__(self, key: Callable[[Message], str] | None, keep: timedelta, using: str) -> None:
        from guardian_consumers.processed.models import Processed  # without it the rest needs no app

        self._rows = Processed.objects.using(using)
        self._key = key
        self._keep = keep
        self._using = using
        self._pruning = threading.Lock()
        self._prune_at = 0.0

    def claim(self, message: Message) -> "tuple[Processed | None, bool]":
        """Return the message's row, and whether this transaction made it; no row where the message has no id.

        Whoever comes second waits here, on the constraint, until the first has committed or rolled back.
        """
        if self._key is not None:
            key = self._key(message)
        elif message.id.startswith(GENERATED_ID_PREFIX):
            if message.redelivered:
                logger.warning("%r has no id: whether its work was done before is not known; it is done.", message)
            return None, True
        else:
            key = message.id
        consumer = message._consumer
        named = {"consumer": consumer.names.queue(consumer.source.key), "message_id": _storable_key(key)}
        try:
            with transaction.atomic(using=self._using):
                return self._rows.create(**named), True
        except IntegrityError:
            return self._rows.get(**named), False

    def mark_published(self, row: "Processed") -> None:
        """Note that there is nothing left to be published, and remove old rows from time to time.

        Neither is worth a failure: the work is committed, and its messages are published.
        """
        try:
            if row.publications is not None:
                self._rows.filter(pk=row.pk).update(publications=None)
            self._prune()
        except (DatabaseError, InterfaceError) as error:  # neither is the other's
            logger.warning("What is processed can't be tidied up: %s", error)

    def _prune(self) -> None:
        from guardian_consumers.processed.models import BATCH

        with self._pruning:
            if time.monotonic() < self._prune_at:
                return
            self._prune_at = time.monotonic() + PRUNE_INTERVAL_SECONDS
        if self._rows.prune(self._keep) >= BATCH:
            self._prune_at = 0.0


def _decorated(work: Work, using: str, guard: _Deduplication | None) -> Work:
    @wraps(work)
    def handle(message: Message) -> None:
        try:
            row, publications = _commit(work, message, using, guard)
        except (OperationalError, InterfaceError) as error:
            if isinstance(error, tuple(message._consumer.settings.policy.by_error)):
                raise
            # Where the connection was lost at the commit, nobody knows whether it is done: the next try finds out.
            raise Retry(f"the database is away, or was lost: {error}") from error
        for publication in publications:
            try:
                message._consumer.publisher.send(*publication)
            except NotPublished as error:
                raise Retry(f"the work is committed, but a message of it is not published: {error}") from error
        if guard is not None and row is not None:
            guard.mark_published(row)

    return with_fresh_connections(handle)


def _commit(
    work: Work, message: Message, using: str, guard: _Deduplication | None
) -> "tuple[Processed | None, Sequence[Publication]]":
    """Do the work, unless it was done, and commit it; return its row, if it has one, and what is to be published."""
    with transaction.atomic(using=using, durable=True):
        row, is_new = (None, True) if guard is None else guard.claim(message)
        if row is not None and not is_new:
            return row, [_deserialize(publication) for publication in row.publications or ()]
        transaction_message = TransactionMessage(message)
        work(transaction_message)
        if message.settled:
            raise TimeLimitExceeded("the message was dealt with in the meantime; its work is rolled back")
        if row is not None and transaction_message.publications:
            row.publications = [_serialize(publication) for publication in transaction_message.publications]
            row.save(using=using, update_fields=["publications"])
        else:
            # After an error that the work caught, PostgreSQL rolls back at the commit, and says nothing of it.
            with connections[using].cursor() as cursor:
                cursor.execute("SELECT 1")
        return row, transaction_message.publications


def _storable_key(key: str) -> str:
    """Return the key, or a digest of one that is too long for its column or that PostgreSQL can't keep."""
    if len(key) <= MAX_ID_LENGTH and "\0" not in key:
        return key
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _serialize(publication: Publication) -> dict[str, Any]:
    """Return a message as JSON has it: its properties as they go over the wire."""
    return {
        "routing_key": publication.routing_key,
        "body": base64.b64encode(publication.body).decode(),
        "properties": base64.b64encode(b"".join(publication.properties.encode())).decode(),
        "mandatory": publication.mandatory,
    }


def _deserialize(dumped: dict[str, Any]) -> Publication:
    properties = pika.BasicProperties()
    properties.decode(base64.b64decode(dumped["properties"]))
    return Publication(dumped["routing_key"], base64.b64decode(dumped["body"]), properties, dumped["mandatory"])
