"""The message store in Django's database: SQLite or PostgreSQL.

Messages refer to their queue by ``contents``, a number in the queue's row. Every statement looks it up there.
Truncation replaces the number and deletion deletes it, so a stale ``StoredQueue`` finds no old messages. A background
task deletes the messages of the old number, and again after ``SECOND_SWEEP_SECONDS``: a concurrent push may have added
some.

The row of a partition gives each id its time. A push locks this row until its commit. So ids always increase and become
visible in order, whatever the clocks say.

Longer than 500 lines, because its statements rely on each other's locks.
"""

import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import (
    IntegrityError,
    connection,
)
from django.db.backends.utils import CursorWrapper

from guardian_store.ids import MIN_TICKS, TICKS_PER_SECOND, Place, id_of, now, place, random_rests
from message_store.database.dialects import CONTENTS_OF_QUEUE, DIALECTS, EPOCH, SIGNED_OFFSET, Dialect, open_cursor
from message_store.models import Position, QueueRow
from message_store.store import (
    MessageStore,
    NewMessage,
    NoQueue,
    PositionsChanged,
    QueueExists,
    StoredMessage,
    StoredQueue,
    StoreUnavailable,
)

SECOND_SWEEP_SECONDS = 3600
"""Longer than any push takes."""

DISCARDED_BATCH = 500
_QUEUE_COLUMNS = "application, name, created, partitions, type, consistency, principals, id"


class DatabaseStore(MessageStore):
    in_database = True

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
        dialect = _dialect()
        with open_cursor(in_transaction=bool(principals)) as cursor:
            cursor.execute(
                f"""
                INSERT INTO message_store_queuerow
                    (application, name, created, partitions, type, consistency, principals, contents)
                VALUES (%(application)s, %(name)s, {dialect.now}, %(partitions)s, %(type)s, %(consistency)s,
                    %(principals)s, {dialect.new_contents})
                ON CONFLICT (application, name) DO NOTHING
                RETURNING {_QUEUE_COLUMNS}
                """,
                {
                    "application": application,
                    "name": name,
                    "now": now(),
                    "partitions": partitions,
                    "type": type,
                    "consistency": consistency,
                    "principals": json.dumps(list(principals)),
                },
            )
            found = cursor.fetchall()
            if not found:
                raise QueueExists(name)
            created = _queue(found[0])
            if principals:
                _store_principals(cursor, created)
        return created

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
        with open_cursor(in_transaction=principals is not None) as cursor:
            cursor.execute(
                f"""
                UPDATE message_store_queuerow SET
                    partitions = CASE WHEN partitions < %(partitions)s THEN %(partitions)s ELSE partitions END,
                    type = coalesce(%(type)s, type),
                    consistency = coalesce(%(consistency)s, consistency),
                    principals = coalesce(%(principals)s, principals)
                WHERE application = %(application)s AND name = %(name)s
                RETURNING {_QUEUE_COLUMNS}
                """,
                {
                    "application": application,
                    "name": name,
                    "partitions": partitions or 0,
                    "type": type,
                    "consistency": consistency,
                    "principals": None if principals is None else json.dumps(list(principals)),
                },
            )
            found = cursor.fetchall()
            if not found:
                raise NoQueue(name)
            updated = _queue(found[0])
            if principals is not None:
                _store_principals(cursor, updated)
        return updated

    def find(self, application: str, name: str) -> StoredQueue:
        with open_cursor() as cursor:
            cursor.execute(
                f"SELECT {_QUEUE_COLUMNS} FROM message_store_queuerow WHERE application = %s AND name = %s",
                [application, name],
            )
            found = cursor.fetchall()
        if not found:
            raise NoQueue(name)
        return _queue(found[0])

    def queues(self, application: str, *, start: str = "", limit: int | None = None) -> list[StoredQueue]:
        with open_cursor() as cursor:
            cursor.execute(
                f"SELECT {_QUEUE_COLUMNS} FROM message_store_queuerow "
                "WHERE application = %s AND name >= %s ORDER BY name" + ("" if limit is None else f" LIMIT {limit:d}"),
                [application, start],
            )
            return [_queue(row) for row in cursor.fetchall()]

    def queues_for_principal(
        self, principal: str, *, start: tuple[str, str] = ("", ""), limit: int | None = None
    ) -> list[StoredQueue]:
        columns = ", ".join(f"queue.{column}" for column in _QUEUE_COLUMNS.split(", "))
        with open_cursor() as cursor:
            cursor.execute(
                f"SELECT {columns} FROM message_store_principalrow AS named "
                "JOIN message_store_queuerow AS queue ON queue.id = named.queue_id "
                "WHERE named.principal = %s AND (named.application, named.name) >= (%s, %s) "
                "ORDER BY named.application, named.name" + ("" if limit is None else f" LIMIT {limit:d}"),
                [principal, *start],
            )
            return [_queue(row) for row in cursor.fetchall()]

    def remove(self, application: str, name: str) -> None:
        with open_cursor(in_transaction=True) as cursor:
            # The lock stops other workers from adding a position between the deletion of positions and of the queue.
            cursor.execute(
                "SELECT id, contents FROM message_store_queuerow WHERE application = %s AND name = %s "
                + _dialect().lock,
                [application, name],
            )
            found = cursor.fetchone()
            if found is None:
                raise NoQueue(name)
            key, contents = found
            _delete_positions(cursor, "queue_id = %s", [key])
            cursor.execute("DELETE FROM message_store_principalrow WHERE queue_id = %s", [key])
            cursor.execute("DELETE FROM message_store_queuerow WHERE id = %s", [key])
            _discard(cursor, contents)

    def push(self, queue: StoredQueue, messages: Sequence[NewMessage]) -> list[uuid.UUID]:
        if not messages:
            return []
        counts: Counter[int] = Counter()
        steps = []
        for message in messages:
            counts[message.partition] += 1
            steps.append(counts[message.partition])
        others = random_rests(len(messages))
        try:
            before = _dialect().push(queue.key, messages, steps, others)
        except IntegrityError as error:
            # Only if an overwrite stored a message under a future id. None of these messages is stored.
            raise StoreUnavailable("a message with this id exists") from error
        if not before:
            raise NoQueue(queue.name)
        return [
            id_of(before[message.partition] + step, other)
            for message, step, other in zip(messages, steps, others, strict=True)
        ]

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
        with open_cursor() as cursor:
            cursor.execute(
                "SELECT ticks, rest, body, content_type FROM message_store_messagerow "
                f"WHERE {conditions} ORDER BY {order} LIMIT %(limit)s",
                parameters,
            )
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

    def overwrite(self, queue: StoredQueue, message_id: uuid.UUID, message: NewMessage) -> None:
        at = place(message_id)
        with open_cursor() as cursor:
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

    def count(self, queues: Sequence[StoredQueue]) -> list[int]:
        if not queues:
            return []
        keys = ", ".join(f"{queue.key:d}" for queue in queues)
        with open_cursor() as cursor:
            cursor.execute(
                f"""
                SELECT id, (
                    SELECT count(*) FROM message_store_messagerow AS message
                    WHERE message.contents = queue.contents AND message.expires + 0 > {_dialect().now}
                ) FROM message_store_queuerow AS queue WHERE id IN ({keys})
                """,
                {"now": now()},
            )
            counts = dict(cursor.fetchall())
        return [counts.get(queue.key, 0) for queue in queues]

    def stored_bytes(self, queues: Sequence[StoredQueue]) -> int:
        if not queues:
            return 0
        keys = ", ".join(f"{queue.key:d}" for queue in queues)
        with open_cursor() as cursor:
            cursor.execute(
                f"""
                SELECT coalesce(sum(length(message.body)), 0) FROM message_store_queuerow AS queue
                JOIN message_store_messagerow AS message ON message.contents = queue.contents
                WHERE queue.id IN ({keys}) AND message.expires + 0 > {_dialect().now}
                """,
                {"now": now()},
            )
            return int(cursor.fetchone()[0])

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

    def positions(self, queue: StoredQueue, consumer: str) -> dict[int, uuid.UUID]:
        with open_cursor():
            return dict(
                Position.objects.filter(queue=queue.key, consumer=consumer).values_list("partition", "message_id")
            )

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
        field = Position._meta.get_field("message_id")
        parameters: list[Any] = []
        for partition in sorted(positions):
            parameters += [partition, field.get_db_prep_value(positions[partition], connection)]
        lines = ", ".join(["(%s, %s)"] * len(positions))
        with open_cursor(in_transaction=unchanged is not None) as cursor:
            if unchanged is not None:
                # Every other writer of positions waits for the queue's row, or is waited for.
                list(QueueRow.objects.select_for_update().filter(id=queue.key))
                held = Position.objects.select_for_update().filter(queue=queue.key, consumer=consumer)
                if dict(held.order_by("partition").values_list("partition", "message_id")) != dict(unchanged):
                    raise PositionsChanged
            cursor.execute(
                f"""
                INSERT INTO message_store_position (queue_id, consumer, partition, message_id)
                WITH given (partition, message_id) AS (VALUES {lines}),
                queue AS (SELECT id FROM message_store_queuerow WHERE id = %s {_dialect().prevent_deletion})
                SELECT queue.id, %s, given.partition, given.message_id FROM queue, given
                WHERE true ORDER BY given.partition
                ON CONFLICT (queue_id, consumer, partition) DO UPDATE SET message_id = excluded.message_id
                """,
                [*parameters, queue.key, consumer],
            )
            written = cursor.rowcount
        if not written:
            raise NoQueue(queue.name)

    def advance_positions(
        self, queue: StoredQueue, consumer: str, moves: Mapping[int, tuple[uuid.UUID | None, uuid.UUID]]
    ) -> set[int]:
        field = Position._meta.get_field("message_id")
        known: list[Any] = []
        new: list[Any] = []
        for partition, (at, to) in sorted(moves.items()):
            to = field.get_db_prep_value(to, connection)
            if at is None:
                new += [partition, to]
            else:
                known += [partition, field.get_db_prep_value(at, connection), to]
        moved: set[int] = set()
        if known:
            lines = ", ".join(["(%s, %s, %s)"] * (len(known) // 3))
            with open_cursor() as cursor:
                cursor.execute(
                    f"""
                    WITH given (number, known, next) AS (VALUES {lines}),
                    found AS (
                        SELECT id, given.next FROM given JOIN message_store_position
                            ON partition = given.number AND message_id = given.known
                        WHERE queue_id = %s AND consumer = %s ORDER BY partition {_dialect().lock}
                    )
                    UPDATE message_store_position AS kept SET message_id = found.next
                    FROM found WHERE kept.id = found.id
                    RETURNING partition
                    """,
                    [*known, queue.key, consumer],
                )
                moved.update(partition for (partition,) in cursor.fetchall())
        if new:
            lines = ", ".join(["(%s, %s)"] * (len(new) // 2))
            with open_cursor() as cursor:
                cursor.execute(
                    f"""
                    WITH given (number, next) AS (VALUES {lines}),
                    queue AS (SELECT id FROM message_store_queuerow WHERE id = %s {_dialect().prevent_deletion})
                    INSERT INTO message_store_position (queue_id, consumer, partition, message_id)
                    SELECT queue.id, %s, given.number, given.next FROM queue, given
                    WHERE true ORDER BY given.number
                    ON CONFLICT (queue_id, consumer, partition) DO NOTHING
                    RETURNING partition
                    """,
                    [*new, queue.key, consumer],
                )
                moved.update(partition for (partition,) in cursor.fetchall())
        if moves and not moved:
            with open_cursor():
                if not QueueRow.objects.filter(id=queue.key).exists():
                    raise NoQueue(queue.name)
        return moved

    def delete_positions(self, queue: StoredQueue, consumer: str) -> None:
        with open_cursor() as cursor:
            _delete_positions(cursor, "queue_id = %s AND consumer = %s", [queue.key, consumer])

    def consumers(self, queue: StoredQueue) -> list[str]:
        with open_cursor():
            return sorted(Position.objects.filter(queue=queue.key).values_list("consumer", flat=True).distinct())


def _remove_discarded(limit: int) -> tuple[int, int]:
    """Delete up to ``limit`` messages of discarded contents.

    Return the number of contents found and the number of messages deleted.
    """
    dialect = _dialect()
    with open_cursor(in_transaction=True) as cursor:
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


def _discard(cursor: CursorWrapper, contents: int) -> None:
    """Mark contents for deletion."""
    cursor.execute(
        f"INSERT INTO message_store_discarded (contents, due, swept) VALUES (%(contents)s, {_dialect().now}, false)",
        {"contents": contents, "now": now()},
    )


def _remove_messages(cursor: CursorWrapper, condition: str, limit: int) -> int:
    """Delete up to ``limit`` messages that match a condition. Return how many."""
    dialect = _dialect()
    query = (
        f"SELECT {dialect.row_id} FROM message_store_messagerow WHERE {condition} LIMIT {limit:d} {dialect.skip_locked}"
    )
    cursor.execute(f"DELETE FROM message_store_messagerow WHERE {dialect.row_in(query)}", {"now": now()})
    removed: int = cursor.rowcount
    return removed


def _matches_ids(ids: Sequence[tuple[int, uuid.UUID]]) -> str:
    """Return a condition that matches the messages with these partitions and ids in the queue ``%(queue)s``."""
    dialect = _dialect()
    places = [(partition, *place(id_)) for partition, id_ in ids]
    lines = ", ".join(f"({partition:d}, {ticks:d}, {rest - SIGNED_OFFSET:d})" for partition, ticks, rest in places)
    return dialect.row_in(
        f"""
        WITH asked (partition, ticks, rest) AS (VALUES {lines})
        SELECT (
            SELECT {dialect.row_id} FROM message_store_messagerow AS message
            WHERE message.contents = {CONTENTS_OF_QUEUE} AND message.partition = asked.partition
            AND message.ticks = asked.ticks AND message.rest = asked.rest
        ) FROM asked
        """
    )


def _queue(row: Sequence[Any]) -> StoredQueue:
    application, name, created, partitions, type_, consistency, principals, key = row
    at = EPOCH + timedelta(microseconds=created // 10)
    return StoredQueue(application, name, at, partitions, type_, consistency, tuple(json.loads(principals)), key)


def _dialect() -> Dialect:
    return DIALECTS[connection.vendor]


def _delete_positions(cursor: CursorWrapper, condition: str, parameters: Sequence[Any]) -> None:
    """Delete the positions that match a condition.

    To avoid deadlocks, every writer of positions locks in the same order: the queue's row if it adds positions, then
    the positions by consumer and partition.
    """
    cursor.execute(
        "DELETE FROM message_store_position WHERE id IN (SELECT id FROM message_store_position "
        f"WHERE {condition} ORDER BY consumer, partition {_dialect().lock})",
        parameters,
    )


def _store_principals(cursor: CursorWrapper, queue: StoredQueue) -> None:
    """Replace the rows of a queue's principals. The caller's transaction has locked the queue's row."""
    cursor.execute("DELETE FROM message_store_principalrow WHERE queue_id = %s", [queue.key])
    cursor.executemany(
        "INSERT INTO message_store_principalrow (queue_id, principal, application, name) VALUES (%s, %s, %s, %s)",
        [(queue.key, principal, queue.application, queue.name) for principal in dict.fromkeys(queue.principals)],
    )
