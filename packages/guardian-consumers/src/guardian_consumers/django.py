"""Callbacks that write to Django's database: work, commit, publish, acknowledge, in this order.

    @in_transaction
    def ship(message): …

runs the work in a transaction. ``message.publish`` collects messages, which are published after the commit. Once the
broker has confirmed all of them, the callback returns and the message is acknowledged. After a crash at any point the
message is redelivered, and nothing is lost:

- Before the commit, nothing was done or published.
- After the commit, the work is repeated. So make it idempotent: delete and insert rows with `rewrite`.
- Or use `once` instead of `in_transaction`. It inserts a row of ``guardian_consumers.processed`` in the transaction of
  the work, with the messages to publish. A redelivery finds the row and only publishes the messages that may be
  unpublished, with the same message ids, so that consumers with `once` drop duplicates.

Each callback gets a fresh database connection, in any thread.
"""

import base64
import hashlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import pika
from asgiref.sync import sync_to_async
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

from guardian_consumers._errors import NotPublished
from guardian_consumers._handler import is_coroutine_function, require_function, require_result
from guardian_consumers._message import Message
from guardian_consumers._outcomes import Retry, TimeLimitExceeded
from guardian_consumers._publisher import Publication
from guardian_consumers._retries import GENERATED_ID_PREFIX

__all__ = ["in_transaction", "once", "rewrite", "with_fresh_connections"]

if TYPE_CHECKING:
    from guardian_consumers.processed.models import Processed

logger = logging.getLogger(__name__)

Work = Callable[[Message], object]
Row = TypeVar("Row", bound=models.Model)

PRUNE_INTERVAL_SECONDS = 3600
"""The interval of deleting old rows of processed messages."""

MAX_ID_LENGTH = 255
"""Longer ids are stored as digests."""


class TransactionMessage(Message):
    """The message in a transaction: ``publish`` collects messages, and ``ack`` is automatic after the commit."""

    __slots__ = ("_message", "publications")

    def __init__(self, message: Message) -> None:
        super().__init__(message._consumer, message._delivery, message.body)
        self._message = message
        self.publications: list[Publication] = []

    @property
    def settled(self) -> bool:
        """Whether the message is settled, for instance by its time limit."""
        return self._message.settled

    def ack(self) -> bool:
        """Raise RuntimeError: after an ack before the commit, a crash would lose the work."""
        raise RuntimeError("do not call ack() in a transaction: the message is acknowledged after the commit")

    def publish(self, body: Any, routing_key: str, **options: Any) -> None:
        """Publish another message after the commit; the options are those of `Publisher.prepare`.

        A message that can't be encoded raises here, before the commit.
        """
        publication = self._consumer.publisher.prepare(body, routing_key, **options)
        publication.properties.encode()
        self.publications.append(publication)


@overload
def in_transaction(work: Work) -> Work: ...
@overload
def in_transaction(*, using: str = ...) -> Callable[[Work], Work]: ...
def in_transaction(work: Work | None = None, *, using: str = DEFAULT_DB_ALIAS) -> Work | Callable[[Work], Work]:
    """Decorate a callback to work in a transaction, commit, publish its messages, and acknowledge.

    ``using`` is the database's alias. An exception rolls back, publishes nothing, and has its usual outcome. An
    unreachable or lost database (OperationalError, InterfaceError) is a `Retry`, whatever the policy's default, unless
    ``by_error`` names it. A message that isn't published after the commit is a `Retry`, too.
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
    """Decorate a callback as `in_transaction` does, and commit the work of each message only once.

    Needs ``guardian_consumers.processed`` in INSTALLED_APPS. Two messages of one logical queue are the same if they
    have the same id or the same ``key(message)``. Without a ``key``, messages without an id are processed at each
    delivery: two equal messages may be distinct. ``keep`` is how long rows are kept; it must exceed the time that
    messages spend in delay and parking queues.
    """
    guard = _Deduplication(key, keep, using)
    if work is None:
        return partial(_decorated, using=using, guard=guard)
    return _decorated(work, using, guard)


def rewrite(old: models.QuerySet[Row], new: Iterable[Row]) -> None:
    """Replace the rows that a message's work may have written before, so that the work is idempotent.

    Against concurrent work on the same message, add a unique constraint: one of the two then fails and is retried.
    """
    with transaction.atomic(using=old.db):
        old.delete()
        old.model._default_manager.using(old.db).bulk_create(new)


def with_fresh_connections(work: Work) -> Work:
    """Decorate a callback to close stale database connections before and after it, as Django does for requests.

    Stale are connections that failed or are older than CONN_MAX_AGE.
    """

    if is_coroutine_function(work):
        # Django's asynchronous ORM has its connections in one thread.
        close = sync_to_async(close_old_connections)

        @wraps(work)
        async def handle_in_task(message: Message) -> object:
            await close()
            try:
                return await cast(Awaitable[object], work(message))
            finally:
                await close()

        return handle_in_task

    require_function(work)

    @wraps(work)
    def handle(message: Message) -> object:
        close_old_connections()
        try:
            return work(message)
        finally:
            close_old_connections()

    return handle


class _Deduplication:
    """Detects processed messages by rows of ``guardian_consumers.processed``."""

    def __init__(self, key: Callable[[Message], str] | None, keep: timedelta, using: str) -> None:
        from guardian_consumers.processed.models import Processed  # only `once` needs the app

        self._rows = Processed.objects.using(using)
        self._key = key
        self._keep = keep
        self._using = using
        self._pruning = threading.Lock()
        self._prune_at = 0.0

    def claim(self, message: Message) -> "tuple[Processed | None, bool]":
        """Return the message's row, or None if it has no id, and whether this transaction created the row.

        The unique constraint blocks a concurrent transaction until the first one has committed or rolled back.
        """
        if self._key is not None:
            key = self._key(message)
        elif message.id.startswith(GENERATED_ID_PREFIX):
            if message.redelivered:
                logger.warning("%r has no id, so its work may be repeated.", message)
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
        """Clear the row's publications, and occasionally delete old rows.

        Errors are only logged: the work is committed, and its messages are published.
        """
        try:
            if row.publications is not None:
                self._rows.filter(pk=row.pk).update(publications=None)
            self._prune()
        except (DatabaseError, InterfaceError) as error:  # neither is a subclass of the other
            logger.warning("Could not clean up the processed messages: %s", error)

    def _prune(self) -> None:
        from guardian_consumers.processed.models import BATCH

        with self._pruning:
            if time.monotonic() < self._prune_at:
                return
            self._prune_at = time.monotonic() + PRUNE_INTERVAL_SECONDS
        if self._rows.prune(self._keep) >= BATCH:
            self._prune_at = 0.0


def _decorated(work: Work, using: str, guard: _Deduplication | None) -> Work:
    require_function(work)

    @wraps(work)
    def handle(message: Message) -> None:
        try:
            row, publications = _commit(work, message, using, guard)
        except (OperationalError, InterfaceError) as error:
            if isinstance(error, tuple(message._consumer.settings.policy.by_error)):
                raise
            # If the connection was lost during the commit, the next attempt finds out whether it succeeded.
            raise Retry(f"the database is unreachable, or the connection was lost: {error}") from error
        for publication in publications:
            try:
                message._send(publication)
            except NotPublished as error:
                raise Retry(f"the work is committed, but one of its messages is not published: {error}") from error
        if guard is not None and row is not None:
            guard.mark_published(row)

    return with_fresh_connections(handle)


def _commit(
    work: Work, message: Message, using: str, guard: _Deduplication | None
) -> "tuple[Processed | None, Sequence[Publication]]":
    """Do and commit the work unless it was done before. Return its row, if any, and the messages to publish."""
    with transaction.atomic(using=using, durable=True):
        row, is_new = (None, True) if guard is None else guard.claim(message)
        if row is not None and not is_new:
            return row, [_deserialize(publication) for publication in row.publications or ()]
        transaction_message = TransactionMessage(message)
        require_result(work(transaction_message))
        if message.settled:
            raise TimeLimitExceeded("the message was settled during its work, which is rolled back")
        if row is not None and transaction_message.publications:
            row.publications = [_serialize(publication) for publication in transaction_message.publications]
            row.save(using=using, update_fields=["publications"])
        else:
            # PostgreSQL silently rolls back at the commit if the work caught a database error. This statement fails
            # then.
            with connections[using].cursor() as cursor:
                cursor.execute("SELECT 1")
        return row, transaction_message.publications


def _storable_key(key: str) -> str:
    """Return the key, or its digest if the column can't store the key."""
    if len(key) <= MAX_ID_LENGTH and "\0" not in key:
        return key
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _serialize(publication: Publication) -> dict[str, Any]:
    """Return a message for a JSON field, with its properties in AMQP's encoding."""
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
