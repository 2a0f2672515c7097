"""The statements in which PostgreSQL and SQLite differ."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    ProgrammingError,
    connection,
    transaction,
)
from django.db.backends.utils import CursorWrapper

from guardian_store._ids import TICKS_PER_SECOND, now
from message_store.store import SIGNED_OFFSET, NewMessage, StoreUnavailable

CONTENTS_OF_QUEUE = "(SELECT contents FROM message_store_queuerow WHERE id = %(queue)s)"


class Dialect(ABC):
    """SQL that differs between the databases."""

    now: str
    """The current ticks since 1970. SQLite needs the parameter ``now``, so every statement passes it."""

    new_contents: str
    """An unused number for ``contents``."""

    row_id: str
    """The database's own identifier of a row, valid within one statement."""

    skip_locked: str
    """Suffix of a query that locks its rows and omits locked ones."""

    @abstractmethod
    def row_in(self, query: str) -> str:
        """Return a condition that matches the rows whose ``row_id`` a query returns.

        It makes the database run the query once and fetch only these rows, whatever its statistics say.
        """

    @abstractmethod
    def push(
        self, key: int, messages: Sequence[NewMessage], steps: Sequence[int], others: Sequence[int]
    ) -> dict[int, int]:
        """Store messages and return each partition's last ticks before them, or an empty dict if the queue is gone.

        ``steps``: each message's 1-based number within its partition. ``others``: the rest of each id.
        """


class _PostgreSQL(Dialect):
    """Use the database's clock, so that the clocks of several machines don't matter."""

    now = f"(SELECT (extract(epoch FROM statement_timestamp()) * {TICKS_PER_SECOND})::bigint)"
    new_contents = "nextval(pg_get_serial_sequence('message_store_queuerow', 'id'))"
    row_id = "ctid"
    skip_locked = "FOR UPDATE SKIP LOCKED"

    def row_in(self, query: str) -> str:
        return f"ctid = ANY (ARRAY({query}))"

    def push(
        self, key: int, messages: Sequence[NewMessage], steps: Sequence[int], others: Sequence[int]
    ) -> dict[int, int]:
        # It locks the partitions' rows in order, so that two batches can't deadlock.
        sql = f"""
            WITH clock AS MATERIALIZED (SELECT {self.now} AS now),
            target AS (
                INSERT INTO message_store_partitionrow AS known (contents, partition, last)
                SELECT queue.contents, pushed.partition, clock.now - 1 + pushed.number
                FROM message_store_queuerow AS queue, clock,
                    unnest(%(partitions)s::smallint[], %(numbers)s::bigint[]) AS pushed (partition, number)
                WHERE queue.id = %(queue)s
                ORDER BY pushed.partition
                ON CONFLICT (contents, partition) DO UPDATE
                SET last = EXCLUDED.last + greatest(known.last + 1 - (SELECT now FROM clock), 0)
                RETURNING contents, partition, last
            ),
            stored AS (
                INSERT INTO message_store_messagerow
                    (contents, partition, ticks, rest, body, content_type, expires)
                SELECT target.contents, target.partition, target.last - message.behind, message.rest, message.body,
                    message.content_type, clock.now + message.ttl * {TICKS_PER_SECOND}
                FROM clock, target JOIN unnest(
                    %(of)s::smallint[], %(behind)s::bigint[], %(rests)s::bigint[], %(bodies)s::bytea[],
                    %(types)s::text[], %(ttls)s::bigint[]
                ) AS message (partition, behind, rest, body, content_type, ttl) ON message.partition = target.partition
            )
            SELECT partition, last FROM target
        """
        numbers = Counter(message.partition for message in messages)
        parameters: dict[str, Any] = {
            "queue": key,
            "partitions": list(numbers),
            "numbers": list(numbers.values()),
            "of": [message.partition for message in messages],
            "behind": [numbers[message.partition] - step for message, step in zip(messages, steps, strict=True)],
            "rests": [other - SIGNED_OFFSET for other in others],
            "bodies": [message.body for message in messages],
            "types": [message.content_type for message in messages],
            "ttls": [message.ttl for message in messages],
        }
        with open_cursor() as cursor:
            cursor.execute(sql, parameters)
            return {partition: last - numbers[partition] for partition, last in cursor.fetchall()}


class _SQLite(Dialect):
    """Use this machine's clock: SQLite's is too coarse, and all its processes run on one machine."""

    now = "%(now)s"
    # SQLite has only one writer at a time, so the number stays unused.
    new_contents = """(SELECT 1 + max(
        coalesce((SELECT max(contents) FROM message_store_queuerow), 0),
        coalesce((SELECT max(contents) FROM message_store_discarded), 0)
    ))"""
    row_id = "rowid"
    skip_locked = ""

    def row_in(self, query: str) -> str:
        return f"rowid IN ({query})"

    def push(
        self, key: int, messages: Sequence[NewMessage], steps: Sequence[int], others: Sequence[int]
    ) -> dict[int, int]:
        at = now()
        numbers = Counter(message.partition for message in messages)
        pushed = ", ".join(f"({partition}, {number})" for partition, number in numbers.items())
        with open_cursor(in_transaction=True) as cursor:
            cursor.execute(
                f"""
                WITH pushed (partition, number) AS (VALUES {pushed})
                INSERT INTO message_store_partitionrow AS known (contents, partition, last)
                SELECT queue.contents, pushed.partition, %(now)s - 1 + pushed.number
                FROM message_store_queuerow AS queue, pushed WHERE queue.id = %(queue)s
                ON CONFLICT (contents, partition) DO UPDATE
                SET last = excluded.last + max(known.last + 1 - %(now)s, 0)
                RETURNING contents, partition, last
                """,
                {"queue": key, "now": at},
            )
            found = cursor.fetchall()
            if not found:
                return {}
            contents = found[0][0]
            before = {partition: last - numbers[partition] for _, partition, last in found}
            cursor.executemany(
                "INSERT INTO message_store_messagerow (contents, partition, ticks, rest, body, content_type, expires) "
                "VALUES (%s, %s, %s, %s, %s, %s, %s)",
                [
                    (
                        contents,
                        message.partition,
                        before[message.partition] + step,
                        other - SIGNED_OFFSET,
                        message.body,
                        message.content_type,
                        at + message.ttl * TICKS_PER_SECOND,
                    )
                    for message, step, other in zip(messages, steps, others, strict=True)
                ],
            )
        return before


DIALECTS: dict[str, Dialect] = {"postgresql": _PostgreSQL(), "sqlite": _SQLite()}


@contextmanager
def as_store_errors() -> Iterator[None]:
    """Raise ``StoreUnavailable`` for errors of the database that are not the statement's fault."""
    try:
        yield
    except (DataError, IntegrityError, NotSupportedError, ProgrammingError):
        raise
    except (DatabaseError, InterfaceError) as error:
        if not connection.in_atomic_block:
            connection.close()  # the next call opens a new one
        raise StoreUnavailable(f"the database query failed: {type(error).__name__}") from error


@contextmanager
def open_cursor(*, in_transaction: bool = False) -> Iterator[CursorWrapper]:
    with as_store_errors(), transaction.atomic() if in_transaction else nullcontext(), connection.cursor() as cursor:
        yield cursor
