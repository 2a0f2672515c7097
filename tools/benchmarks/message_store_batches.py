"""Batches and reads of the message store, alternating with bare SQL. Runs in ``tools.benchmarks.child``."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from django.db import connection

from guardian_store.ids import TICKS_PER_SECOND, Place, now, place, random_rests
from message_store.database.dialects import SIGNED_OFFSET
from message_store.database.store import DatabaseStore
from message_store.store import NewMessage

WARM_UPS = 10
ATTEMPTS = 3
"""Calls per measurement, of which the fastest counts."""

TTL = 3 * 24 * 3600
PARTITION = 1
BARE_CONTENTS = 0
"""No queue has this contents number."""

INSERT = (
    "INSERT INTO message_store_messagerow (contents, partition, ticks, rest, body, content_type, expires) VALUES {}"
)
SELECT = (
    "SELECT ticks, rest, body, content_type FROM message_store_messagerow "
    "WHERE contents = %s AND partition = %s AND (ticks, rest) >= (%s, %s) ORDER BY ticks, rest LIMIT %s"
)


def measure(vhost: str, rounds: int, messages: int, size: int) -> dict[str, Any]:
    """Return the microseconds of a ``push`` and a ``read`` of batches, alternating with bare statements.

    ``bare push`` inserts the same rows with one statement; ``bare read`` selects and fetches the same rows.
    """
    store = DatabaseStore()
    queue = store.register("bench", "queue")
    batch = [NewMessage(os.urandom(size), PARTITION, TTL, "application/octet-stream") for _ in range(messages)]
    times: dict[str, list[float]] = {"push": [], "bare push": [], "read": [], "bare read": []}
    starts = []
    for turn in range(WARM_UPS + rounds):
        rows = [_rows(batch) for _ in range(ATTEMPTS)]
        pushed = quickest(lambda _: starts.append(place(store.push(queue, batch)[0])))
        bare = quickest(lambda number, rows=rows: _insert(rows[number]))
        if turn >= WARM_UPS:
            times["push"].append(pushed)
            times["bare push"].append(bare)
    contents = store_contents(queue.key)
    for turn in range(WARM_UPS + rounds):
        some = starts[turn * ATTEMPTS : turn * ATTEMPTS + ATTEMPTS]
        read = quickest(lambda number, some=some: store.read(queue, PARTITION, start=some[number], limit=messages))
        bare = quickest(lambda number, some=some: _select(contents, some[number], messages))
        if turn >= WARM_UPS:
            times["read"].append(read)
            times["bare read"].append(bare)
    assert store.count([queue]) == [(WARM_UPS + rounds) * ATTEMPTS * messages]
    return times


def store_contents(key: int) -> int:
    """Return a queue's contents number."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT contents FROM message_store_queuerow WHERE id = %s", [key])
        contents: int = cursor.fetchone()[0]
        return contents


def microseconds(do: Callable[[], Any]) -> float:
    """Return the duration of a call."""
    began = time.perf_counter()
    do()
    return (time.perf_counter() - began) * 1e6


def quickest(do: Callable[..., Any]) -> float:
    """Return the time of the fastest of ``ATTEMPTS`` calls, each with its number, to reduce the noise of other load."""
    return min(microseconds(lambda number=number: do(number)) for number in range(ATTEMPTS))  # type: ignore[misc]


def _rows(batch: Sequence[NewMessage]) -> list[Any]:
    at = now()
    return [
        value
        for step, (message, rest) in enumerate(zip(batch, random_rests(len(batch)), strict=True))
        for value in (
            *(BARE_CONTENTS, PARTITION, at + step, rest - SIGNED_OFFSET),
            *(message.body, message.content_type, at + TTL * TICKS_PER_SECOND),
        )
    ]


def _insert(values: Sequence[Any]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(INSERT.format(", ".join(["(%s, %s, %s, %s, %s, %s, %s)"] * (len(values) // 7))), values)


def _select(contents: int, start: Place, messages: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(SELECT, [contents, PARTITION, start.ticks, start.rest - SIGNED_OFFSET, messages])
        assert len(cursor.fetchall()) == messages
