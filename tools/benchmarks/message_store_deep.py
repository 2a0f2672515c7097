"""Reads in a queue with very many messages and in one with few. Runs in ``tools.benchmarks.child``."""

import random
from typing import Any

from django.db import connection

from guardian_store.ids import TICKS_PER_SECOND, Place, now
from message_store.database.store import DatabaseStore
from message_store.store import StoredQueue
from tools.benchmarks.message_store_batches import ATTEMPTS, microseconds, quickest, store_contents

WARM_UPS = 20
SEED = 9
TICKS_BETWEEN = 100
"""Ticks between two messages."""

FILL = """
    INSERT INTO message_store_messagerow (contents, partition, ticks, rest, body, content_type, expires)
    SELECT %(contents)s, 1, %(first)s + number * %(apart)s, (random() * 4e18)::bigint,
        convert_to('message ' || number, 'UTF8'), 'text/plain', %(expires)s + number
    FROM generate_series(0, %(messages)s - 1::bigint) AS number
"""


def measure(vhost: str, few: int, many: int, messages: int, rounds: int) -> dict[str, Any]:
    """Return the microseconds of alternating reads of ``messages`` messages.

    ``few``: from the beginning of a queue with few messages. The others: at different places of a queue with many.
    ``count``: the milliseconds of counting the latter's messages once.
    """
    store = DatabaseStore()
    small, large = store.register("bench", "small"), store.register("bench", "large")
    _fill(small, few)
    first = _fill(large, many)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE message_store_messagerow")
    drawn = random.Random(SEED)
    places = ("at the beginning", "at the end", "in the middle", "by time", "by time, going back")
    times: dict[str, list[float]] = {place: [] for place in places}
    floor: list[float] = []

    def read(queue: StoredQueue, *asked: dict[str, Any]) -> float:
        found: list[Any] = []
        took = quickest(lambda number: found.extend(store.read(queue, 1, limit=messages, **asked[number % len(asked)])))
        assert len(found) == ATTEMPTS * messages
        return took

    def somewhere(off: int, **asked: Any) -> list[dict[str, Any]]:
        """Return random places to read from, each ``off`` ticks after a message."""
        numbers = [drawn.randrange(messages, many - messages) for _ in range(ATTEMPTS)]
        return [{"start": Place(first + number * TICKS_BETWEEN + off, 0), **asked} for number in numbers]

    for turn in range(WARM_UPS + rounds):
        took = [
            read(large, {}),
            read(large, {"descending": True}),
            read(large, *somewhere(0)),
            read(large, *somewhere(TICKS_BETWEEN // 2, before=now())),
            read(large, *somewhere(TICKS_BETWEEN // 2, descending=True)),
        ]
        bare = read(small, {})
        if turn >= WARM_UPS:
            floor.append(bare)
            for place, one in zip(places, took, strict=True):
                times[place].append(one)
    counted: list[int] = []
    count = microseconds(lambda: counted.extend(store.count([large]))) / 1000
    assert counted == [many]
    return {"few": floor, "many": times, "count": [count]}


def _fill(queue: StoredQueue, messages: int) -> int:
    """Fill a queue, and return the ticks of the first message."""
    first = now() - messages * TICKS_BETWEEN
    with connection.cursor() as cursor:
        cursor.execute(
            FILL,
            {
                "contents": store_contents(queue.key),
                "first": first,
                "apart": TICKS_BETWEEN,
                "expires": now() + 3 * 24 * 3600 * TICKS_PER_SECOND,
                "messages": messages,
            },
        )
    return first
