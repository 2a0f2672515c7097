"""The message store in Django's database: SQLite or PostgreSQL.

Messages refer to their queue by ``contents``, a number in the queue's row. Every statement looks it up there, so a
deleted queue has no messages. A background task deletes the messages of its number, and again after
``SECOND_SWEEP_SECONDS``: a concurrent push may have added some.

The row of a partition gives each id its time. A push locks this row until its commit. So ids always increase and become
visible in order, whatever the clocks say.
"""

import itertools
import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from django.db import IntegrityError, connection, transaction
from django.db.backends.utils import CursorWrapper
from django.db.models import BooleanField, Count, F, OuterRef, QuerySet, Subquery, Sum, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Length

from guardian_store._ids import MIN_TICKS, TICKS_PER_SECOND, Place, id_of, now, place, random_rests
from message_store.database.dialects import (
    CONTENTS_OF_QUEUE,
    DIALECTS,
    Dialect,
    as_store_errors,
    open_cursor,
)
from message_store.models import Discarded, MessageRow, Position, PrincipalRow, QueueRow
from message_store.store import (
    DEFAULT_SETTINGS,
    MAX_SECONDS_AHEAD,
    MESSAGE_OVERHEAD,
    SIGNED_OFFSET,
    MessageStore,
    NewMessage,
    NoQueue,
    PositionsChanged,
    QueueExists,
    QueueSettings,
    StoredMessage,
    StoredQueue,
    StoreUnavailable,
    time_of,
)

SECOND_SWEEP_SECONDS = 3600
"""Longer than any push takes."""

DISCARDED_BATCH = 500


class DatabaseStore(MessageStore):
    in_database = True

    @as_store_errors()
    @transaction.atomic
    def register(self, application: str, name: str, **given: Unpack[QueueSettings]) -> StoredQueue:
        row, is_new = QueueRow.objects.get_or_create(
            {**DEFAULT_SETTINGS, **given, "created": now(), "contents": RawSQL(_dialect().new_contents, ())},
            application=application,
            name=name,
        )
        if not is_new:
            raise QueueExists(name)
        if row.principals:
            _store_principals(row)
        return _queue(row)

    @as_store_errors()
    @transaction.atomic
    def update(self, application: str, name: str, **given: Unpack[QueueSettings]) -> StoredQueue:
        row = QueueRow.objects.select_for_update(no_key=True).filter(application=application, name=name).first()
        if row is None:
            raise NoQueue(name)
        given["partitions"] = max(row.partitions, given.get("partitions", 0))
        for field, value in given.items():
            setattr(row, field, value)
        row.save(update_fields=given.keys())
        if "principals" in given:
            _store_principals(row)
        return _queue(row)

    def find(self, application: str, name: str) -> StoredQueue:
        # Raw SQL: each request runs this. With the ORM it takes ten times as long, and longer than a read or a push.
        with open_cursor() as cursor:
            cursor.execute(
                "SELECT id, created, partitions, type, consistency, principals FROM message_store_queuerow "
                "WHERE application = %s AND name = %s",
                [application, name],
            )
            found = cursor.fetchone()
        if found is None:
            raise NoQueue(name)
        key, created, partitions, type_, consistency, principals = found
        at = time_of(created)
        return StoredQueue(application, name, at, partitions, type_, consistency, tuple(json.loads(principals)), key)

    @as_store_errors()
    def queues(self, application: str, *, start: str = "", limit: int = 1000) -> list[StoredQueue]:
        rows = QueueRow.objects.filter(application=application, name__gte=start).order_by("name")
        return [_queue(row) for row in rows[:limit]]

    @as_store_errors()
    def queues_for_principal(
        self, principal: str, *, start: tuple[str, str] = ("", ""), limit: int = 1000
    ) -> list[StoredQueue]:
        columns = "(message_store_principalrow.application, message_store_principalrow.name)"
        from_start = RawSQL(f"{columns} >= (%s, %s)", start, output_field=BooleanField())
        rows = PrincipalRow.objects.filter(from_start, principal=principal).order_by("application", "name")
        return [_queue(row.queue) for row in rows.select_related("queue")[:limit]]

    @as_store_errors()
    @transaction.atomic
    def remove(self, application: str, name: str) -> None:
        # The lock stops other workers from adding a position between the deletion of positions and of the queue.
        row = QueueRow.objects.select_for_update().filter(application=application, name=name).first()
        if row is None:
            raise NoQueue(name)
        _delete_positions(row.positions.all())
        row.delete()
        Discarded.objects.create(contents=row.contents, due=_now())

    def push(self, queue: StoredQueue, messages: Sequence[NewMessage]) -> list[uuid.UUID]:
        if not messages:
            return []
        try:
            return _push(queue, messages)
        except IntegrityError as error:
            # Only if an overwrite stored a message under a future id. None of these messages is stored.
            raise StoreUnavailable("a message with this id exists") from error

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
        # "+ 0" keeps the databases from using the index on expires, after which they would sort.
        conditions = f"contents = {CONTENTS_OF_QUEUE} AND partition = %(partition)s AND expires + 0 > {_dialect().now}"
        parameters = {"queue": queue.key, "partition": partition, "now": now(), "limit": limit}
        if start is not None:
            conditions += f" AND (ticks, rest) {'<=' if descending else '>='} (%(ticks)s, %(rest)s)"
            parameters |= {"ticks": start.ticks, "rest": start.rest - SIGNED_OFFSET}
        if before is not None:
            conditions += " AND ticks < %(before)s"
            parameters["before"] = before
        order = "ticks DESC, rest DESC" if descending else "ticks, rest"
        rows = f"FROM message_store_messagerow WHERE {conditions} ORDER BY {order} LIMIT"
        most = "%(limit)s"
        if max_bytes is not None:  # the databases know the length of a body without reading it
            parameters["max_bytes"] = max_bytes
            most = f"""(
                SELECT count(*) FROM (
                    SELECT sum(size) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - size AS preceding
                    FROM (SELECT ticks, rest, length(body) + length(content_type) AS size {rows} %(limit)s) AS sizes
                ) AS totals WHERE preceding < %(max_bytes)s
            )"""
        with open_cursor() as cursor:
            cursor.execute(f"SELECT ticks, rest, body, content_type {rows} {most}", parameters)
            found = cursor.fetchall()
        new = tuple.__new__  # StoredMessage(…) would take a tenth of the time of a large read
        return [
            new(StoredMessage, (id_of(ticks, rest + SIGNED_OFFSET), partition, bytes(body), content_type))
            for ticks, rest, body, content_type in found
        ]

    def waiting(
        self, queue: StoredQueue, starts: Mapping[int, Place | None], *, before: int | None = None
    ) -> list[int]:
        places = {partition: start or Place(MIN_TICKS, 0) for partition, start in starts.items()}
        lines = ", ".join(f"({one:d}, {ticks:d}, {rest - SIGNED_OFFSET:d})" for one, (ticks, rest) in places.items())
        end = "" if before is None else f"AND ticks < {before:d}"
        with open_cursor() as cursor:
            # The order and the limit make the database look each partition up in the primary key.
            cursor.execute(
                f"""
                WITH asked (number, since, other) AS (VALUES {lines})
                SELECT number, (
                    SELECT 1 FROM message_store_messagerow
                    WHERE contents = {CONTENTS_OF_QUEUE} AND partition = number AND (ticks, rest) >= (since, other)
                    AND expires + 0 > {_dialect().now} {end} ORDER BY ticks, rest LIMIT 1
                ) FROM asked
                """,
                {"queue": queue.key, "now": now()},
            )
            return [number for number, found in cursor.fetchall() if found]

    def read_ids(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> list[StoredMessage]:
        if not ids:
            return []
        with open_cursor() as cursor:
            cursor.execute(
                "SELECT partition, ticks, rest, body, content_type FROM message_store_messagerow "
                f"WHERE {_matches_ids(ids)} AND expires + 0 > {_dialect().now}",
                {"queue": queue.key, "now": now()},
            )
            found = {
                (partition, id_of(ticks, rest + SIGNED_OFFSET)): (bytes(body), content_type)
                for partition, ticks, rest, body, content_type in cursor.fetchall()
            }
        return [
            StoredMessage(id_, partition, *found[partition, id_]) for partition, id_ in ids if (partition, id_) in found
        ]

    @as_store_errors()
    @transaction.atomic(savepoint=False)
    def overwrite(self, queue: StoredQueue, message_id: uuid.UUID, message: NewMessage) -> None:
        at = place(message_id)
        with connection.cursor() as cursor:
            # If the id is a little ahead, the next pushed message gets a later one. Others don't move the clock. The
            # clock of the process that allowed it may be ahead, too.
            ahead = f"{_dialect().now} AND {_dialect().now} + {2 * MAX_SECONDS_AHEAD * TICKS_PER_SECOND}"
            cursor.execute(
                f"""
                INSERT INTO message_store_partitionrow AS known (contents, partition, last)
                SELECT contents, %(partition)s, %(ticks)s FROM message_store_queuerow
                WHERE id = %(queue)s AND %(ticks)s BETWEEN {ahead}
                ON CONFLICT (contents, partition) DO UPDATE SET last = excluded.last WHERE known.last < excluded.last
                """,
                {"partition": message.partition, "ticks": at.ticks, "queue": queue.key, "now": now()},
            )
            cursor.execute(
                f"""
                INSERT INTO message_store_messagerow
                    (contents, partition, ticks, rest, body, content_type, expires)
                SELECT contents, %(partition)s, %(ticks)s, %(rest)s, %(body)s, %(content_type)s,
                    {_dialect().now} + %(ttl)s
                FROM message_store_queuerow WHERE id = %(queue)s
                ON CONFLICT (contents, partition, ticks, rest) DO UPDATE
                SET body = excluded.body, content_type = excluded.content_type, expires = excluded.expires
                """,
                {
                    "partition": message.partition,
                    "ticks": at.ticks,
                    "rest": at.rest - SIGNED_OFFSET,
                    "body": message.body,
                    "content_type": message.content_type,
                    "ttl": message.ttl * TICKS_PER_SECOND,
                    "queue": queue.key,
                    "now": now(),
                },
            )
            stored = cursor.rowcount
        if not stored:
            raise NoQueue(queue.name)

    def delete(self, queue: StoredQueue, ids: Sequence[tuple[int, uuid.UUID]]) -> None:
        if not ids:
            return
        with open_cursor() as cursor:
            cursor.execute(f"DELETE FROM message_store_messagerow WHERE {_matches_ids(ids)}", {"queue": queue.key})

    @as_store_errors()
    def count(self, queues: Sequence[StoredQueue]) -> list[int]:
        messages = _live_messages().filter(contents=OuterRef("contents")).values("contents")
        number = Subquery(messages.annotate(number=Count("*")).values("number"))
        counts = dict(QueueRow.objects.filter(pk__in=[queue.key for queue in queues]).values_list("pk", number))
        return [counts.get(queue.key) or 0 for queue in queues]

    @as_store_errors()
    def stored_bytes(self, queues: Sequence[StoredQueue]) -> int:
        contents = QueueRow.objects.filter(pk__in=[queue.key for queue in queues]).values("contents")
        size = Length("body") + Length("content_type") + MESSAGE_OVERHEAD
        found = _live_messages().filter(contents__in=contents).aggregate(size=Sum(size))
        return found["size"] or 0

    def remove_expired(self, limit: int) -> int:
        dialect = _dialect()
        with open_cursor() as cursor:
            removed = _remove_messages(cursor, f"expires <= {dialect.now} ORDER BY expires", limit)
        while removed < limit:
            found, gone = _remove_discarded(limit - removed)
            removed += gone
            if not found:
                break
        return removed

    @as_store_errors()
    def positions(self, queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
        return dict(_positions(queue, consumer).values_list("partition", "message_id"))

    @as_store_errors()
    @transaction.atomic
    def set_positions(
        self,
        queue: StoredQueue,
        consumer: str,
        positions: Mapping[int, uuid.UUID],
        *,
        unchanged: Mapping[int, uuid.UUID] | None = None,
    ) -> None:
        if not positions:
            return
        _lock_queue(queue)
        before = _lock_positions(_positions(queue, consumer))
        if unchanged is not None and before != dict(unchanged):
            raise PositionsChanged
        _write_positions(queue, consumer, positions)

    @as_store_errors()
    @transaction.atomic
    def advance_positions(
        self, queue: StoredQueue, consumer: str, moves: Mapping[int, tuple[uuid.UUID | None, uuid.UUID]]
    ) -> set[int]:
        if any(at is None for at, _ in moves.values()):
            _lock_queue(queue)
        before = _lock_positions(_positions(queue, consumer).filter(partition__in=moves))
        moved = {partition: to for partition, (at, to) in moves.items() if before.get(partition) == at}
        _write_positions(queue, consumer, moved)
        if moves and not moved and not QueueRow.objects.filter(pk=queue.key).exists():
            raise NoQueue(queue.name)
        return set(moved)

    @as_store_errors()
    @transaction.atomic
    def delete_positions(
        self, queue: StoredQueue, consumer: str, *, unchanged: Mapping[int, uuid.UUID] | None = None
    ) -> None:
        if unchanged is not None:
            _lock_queue(queue)
            if _lock_positions(_positions(queue, consumer)) != dict(unchanged):
                raise PositionsChanged
        _delete_positions(_positions(queue, consumer))

    @as_store_errors()
    def consumers(self, queue: StoredQueue) -> list[str]:
        return sorted(Position.objects.filter(queue=queue.key).values_list("consumer", flat=True).distinct())


@as_store_errors()
@transaction.atomic(savepoint=False)
def _push(queue: StoredQueue, messages: Sequence[NewMessage]) -> list[uuid.UUID]:
    clock, numbers = _dialect().now, Counter(message.partition for message in messages)
    pushed = ", ".join(f"({partition:d}, {number:d})" for partition, number in numbers.items())
    with connection.cursor() as cursor:
        # It locks the partitions' rows in order, so that two batches can't deadlock.
        cursor.execute(
            f"""
            WITH pushed (partition, number) AS (VALUES {pushed})
            INSERT INTO message_store_partitionrow AS known (contents, partition, last)
            SELECT queue.contents, pushed.partition, {clock} - 1 + pushed.number
            FROM message_store_queuerow AS queue, pushed WHERE queue.id = %(queue)s ORDER BY pushed.partition
            ON CONFLICT (contents, partition) DO UPDATE
            SET last = excluded.last + CASE WHEN known.last >= {clock} THEN known.last + 1 - {clock} ELSE 0 END
            RETURNING contents, partition, last, {clock}
            """,
            {"queue": queue.key, "now": now()},
        )
        found = cursor.fetchall()
        if not found:
            raise NoQueue(queue.name)
        contents, at = found[0][0], found[0][3]
        ticks = {partition: itertools.count(last - numbers[partition] + 1) for _, partition, last, _ in found}
        ids: list[uuid.UUID] = []
        values: list[Any] = []
        for message, rest in zip(messages, random_rests(len(messages)), strict=True):
            tick = next(ticks[message.partition])
            ids.append(id_of(tick, rest))
            values += (contents, message.partition, tick, rest - SIGNED_OFFSET, message.body, message.content_type)
            values.append(at + message.ttl * TICKS_PER_SECOND)
        rows = ", ".join(["(%s, %s, %s, %s, %s, %s, %s)"] * len(messages))
        columns = "contents, partition, ticks, rest, body, content_type, expires"
        cursor.execute(f"INSERT INTO message_store_messagerow ({columns}) VALUES {rows}", values)
    return ids


@as_store_errors()
@transaction.atomic
def _remove_discarded(limit: int) -> tuple[int, int]:
    """Delete up to ``limit`` messages of discarded contents.

    Return the number of contents found and the number of messages deleted.
    """
    dialect = _dialect()
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT contents FROM message_store_discarded WHERE due <= {dialect.now} ORDER BY due "
            f"LIMIT {DISCARDED_BATCH} {dialect.skip_locked}",
            {"now": now()},
        )
        found = [contents for (contents,) in cursor.fetchall()]
        if not found:
            return 0, 0
        these = f"contents IN ({', '.join(f'{contents:d}' for contents in found)})"
        removed = _remove_messages(cursor, these, limit)
        if removed < limit:
            cursor.execute(f"DELETE FROM message_store_partitionrow WHERE {these}")
            cursor.execute(f"DELETE FROM message_store_discarded WHERE {these} AND swept")
            cursor.execute(
                f"UPDATE message_store_discarded SET swept = true, due = {dialect.now} + %(wait)s WHERE {these}",
                {"now": now(), "wait": SECOND_SWEEP_SECONDS * TICKS_PER_SECOND},
            )
        return len(found), removed


def _remove_messages(cursor: CursorWrapper, condition: str, limit: int) -> int:
    dialect = _dialect()
    query = (
        f"SELECT {dialect.row_id} FROM message_store_messagerow WHERE {condition} LIMIT {limit:d} {dialect.skip_locked}"
    )
    cursor.execute(f"DELETE FROM message_store_messagerow WHERE {dialect.row_in.format(query)}", {"now": now()})
    removed: int = cursor.rowcount
    return removed


def _matches_ids(ids: Sequence[tuple[int, uuid.UUID]]) -> str:
    """Return a condition that matches the messages with these partitions and ids in the queue ``%(queue)s``."""
    dialect = _dialect()
    places = [(partition, *place(id_)) for partition, id_ in ids]
    lines = ", ".join(f"({partition:d}, {ticks:d}, {rest - SIGNED_OFFSET:d})" for partition, ticks, rest in places)
    return dialect.row_in.format(
        f"""
        WITH asked (partition, ticks, rest) AS (VALUES {lines})
        SELECT (
            SELECT {dialect.row_id} FROM message_store_messagerow AS message
            WHERE message.contents = {CONTENTS_OF_QUEUE} AND message.partition = asked.partition
            AND message.ticks = asked.ticks AND message.rest = asked.rest
        ) FROM asked
        """
    )


def _queue(row: QueueRow) -> StoredQueue:
    return StoredQueue(
        application=row.application,
        name=row.name,
        created=time_of(row.created),
        partitions=row.partitions,
        type=row.type,
        consistency=row.consistency,
        principals=tuple(row.principals),
        key=row.pk,
    )


def _dialect() -> Dialect:
    return DIALECTS[connection.vendor]


def _now() -> RawSQL | Value:
    return RawSQL(_dialect().now, ()) if connection.vendor == "postgresql" else Value(now())


def _live_messages() -> QuerySet[MessageRow]:
    return MessageRow.objects.alias(until=F("expires") + 0).filter(until__gt=_now())  # "+ 0": as in ``read``


# To avoid deadlocks, every writer of positions locks in the same order: the queue's row if it adds positions, then the
# positions by consumer and partition.


def _positions(queue: StoredQueue, consumer: str) -> QuerySet[Position]:
    return Position.objects.filter(queue=queue.key, consumer=consumer)


def _lock_queue(queue: StoredQueue) -> None:
    if not list(QueueRow.objects.select_for_update(no_key=True).filter(pk=queue.key).values_list("pk")):
        raise NoQueue(queue.name)


def _lock_positions(positions: QuerySet[Position]) -> dict[int, uuid.UUID]:
    rows = positions.select_for_update().order_by("partition")
    return dict(rows.values_list("partition", "message_id"))


def _write_positions(queue: StoredQueue, consumer: str, positions: Mapping[int, uuid.UUID]) -> None:
    rows = [
        Position(queue_id=queue.key, consumer=consumer, partition=partition, message_id=message_id)
        for partition, message_id in positions.items()
    ]
    unique = ["queue", "consumer", "partition"]
    Position.objects.bulk_create(rows, update_conflicts=True, unique_fields=unique, update_fields=["message_id"])


def _delete_positions(positions: QuerySet[Position]) -> None:
    locked = positions.select_for_update().order_by("consumer", "partition")
    Position.objects.filter(pk__in=locked.values("pk")).delete()


def _store_principals(queue: QueueRow) -> None:
    """Replace the rows of a queue's principals. The caller's transaction has locked the queue's row."""
    queue.principal_rows.all().delete()
    PrincipalRow.objects.bulk_create(
        PrincipalRow(queue=queue, principal=principal, application=queue.application, name=queue.name)
        for principal in dict.fromkeys(queue.principals)
    )
