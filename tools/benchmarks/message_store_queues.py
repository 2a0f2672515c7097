"""The message store with few and with very many queues. Runs in ``tools.benchmarks.child``.

The few queues are in a schema of their own, so that both can be measured alternately over the same connection.
"""

import random
import uuid
from typing import Any

from django.db import connection

from message_store.database.store import DatabaseStore
from message_store.store import NewMessage
from tools.benchmarks.message_store_batches import ATTEMPTS, quickest

WARM_UPS = 50
SEED = 9
TABLES = ("queuerow", "principalrow", "partitionrow", "messagerow", "position", "discarded")

FILL = (
    """
    INSERT INTO message_store_queuerow
        (application, name, created, partitions, type, consistency, principals, contents)
    SELECT 'bench', 'queue-' || number, extract(epoch FROM now()) * 10000000, 1, 'user', 'strong', '[]',
        nextval(pg_get_serial_sequence('message_store_queuerow', 'id'))
    FROM generate_series(0, %(queues)s - 1) AS number
    """,
    """
    INSERT INTO message_store_partitionrow (contents, partition, last)
    SELECT contents, 1, created FROM message_store_queuerow
    """,
    """
    INSERT INTO message_store_messagerow (contents, partition, ticks, rest, body, content_type, expires)
    SELECT contents, 1, created - number, (random() * 4e18)::bigint, convert_to(repeat('x', 100), 'UTF8'),
        'text/plain', created + 3 * 24 * 3600 * 10000000::bigint
    FROM message_store_queuerow, generate_series(0, %(each)s - 1) AS number
    """,
)


def measure(vhost: str, few: int, many: int, each: int, rounds: int) -> dict[str, Any]:
    """Return the microseconds to ``create`` a queue, ``post`` a message and ``read`` a queue.

    They are measured with ``few`` and with ``many`` queues of ``each`` messages. Posting and reading include finding
    the queue by name.
    """
    _make_schema("few")
    sizes = {"few": few, "many": many}
    for schema, queues in sizes.items():
        _use(schema)
        _fill(queues, each)
    store = DatabaseStore()
    drawn = random.Random(SEED)
    times: dict[str, dict[str, list[float]]] = {schema: {"create": [], "post": [], "read": []} for schema in sizes}
    for turn in range(WARM_UPS + rounds):
        for schema, queues in sizes.items():
            _use(schema)
            took = _work(store, [f"queue-{drawn.randrange(queues)}" for _ in range(2 * ATTEMPTS)], each)
            if turn >= WARM_UPS:
                for what, one in took.items():
                    times[schema][what].append(one)
    return times


def _work(store: DatabaseStore, names: list[str], each: int) -> dict[str, float]:
    message = NewMessage(b"x" * 100, 1, 3600, "text/plain")
    read: list[Any] = []
    took = {
        "create": quickest(lambda _: store.register("bench", uuid.uuid4().hex)),
        "post": quickest(lambda number: store.push(store.find("bench", names[number]), [message])),
        "read": quickest(
            lambda number: read.extend(store.read(store.find("bench", names[ATTEMPTS + number]), 1, limit=each))
        ),
    }
    assert len(read) == ATTEMPTS * each
    return took


def _make_schema(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {name}")
        for table in TABLES:
            cursor.execute(f"CREATE TABLE {name}.message_store_{table} (LIKE message_store_{table} INCLUDING ALL)")


def _use(schema: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET search_path TO {'public' if schema == 'many' else schema}")


def _fill(queues: int, each: int) -> None:
    with connection.cursor() as cursor:
        for sql in FILL:
            cursor.execute(sql, {"queues": queues, "each": each})
        cursor.execute("VACUUM ANALYZE")
