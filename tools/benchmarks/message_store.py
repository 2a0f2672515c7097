"""The message store on PostgreSQL, compared to bare SQL and to fewer queues and messages, and its worker."""

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import connection

from guardian_store import Worker, ids
from guardian_store.ids import TICKS_PER_SECOND, Place, now, place, random_rests
from message_store import queues
from message_store.database.dialects import SIGNED_OFFSET
from message_store.database.store import DatabaseStore
from message_store.queues import MessageInput
from message_store.store import MessageStore, NewMessage, StoredQueue, store
from message_store.worker import StoreTransport
from tools.benchmarks.figures import Figure, in_turn, seconds
from tools.benchmarks.passes import vacuum
from tools.benchmarks.running import size

FEW, MANY = 1_000, size(1_000_000, 2_000)
"""Queues, or messages in a queue."""

DEEP = size(10_000_000, 20_000)
MESSAGES_EACH = 3
BATCH = 100
ROUNDS = size(200, 5)
WARM_UPS = size(50, 1)
ATTEMPTS = 3
"""Calls per measurement, of which the fastest counts."""

DAY_SECONDS = 24 * 3600
TTL = 3 * DAY_SECONDS
MAX_GROWTH = 1.2

PUSHED_BYTES = 1000
MAX_PUSH_RATIO = 2
BARE_CONTENTS = 0
"""No queue has this contents number."""

WORKER_MESSAGES = size(40_000, 2_000)
WORKER_ROUNDS = size(15, 2)
MAX_WORKER_RATIO = 1 / 0.8
"""Of the time per message: the inverse of the minimum speed."""

TABLES = ("queuerow", "principalrow", "partitionrow", "messagerow", "position", "discarded")

ADD_QUEUES = (
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
ADD_MESSAGES = """
    INSERT INTO message_store_messagerow (contents, partition, ticks, rest, body, content_type, expires)
    SELECT (SELECT contents FROM message_store_queuerow WHERE id = %(queue)s), 1,
        %(now)s - (%(messages)s - number) * 100, (random() * 4e18)::bigint,
        convert_to('message ' || number, 'UTF8'), 'text/plain', %(now)s + %(ttl)s + number
    FROM generate_series(0, %(messages)s - 1::bigint) AS number
    """
INSERT = "INSERT INTO message_store_messagerow (contents, partition, ticks, rest, body, content_type, expires) VALUES "


def message_store() -> list[Figure]:
    """Measure batches, many queues, and many messages in a queue."""
    database = DatabaseStore()
    print(f"storing {MANY:,} queues, and {DEEP:,} messages in one", flush=True)
    with connection.cursor() as cursor:
        cursor.execute("CREATE SCHEMA few")
        for table in TABLES:
            cursor.execute(f"CREATE TABLE few.message_store_{table} (LIKE message_store_{table} INCLUDING ALL)")
    for schema, number in (("few", FEW), ("many", MANY)):
        with _schema(schema), connection.cursor() as cursor:
            for statement in ADD_QUEUES:
                cursor.execute(statement, {"queues": number, "each": MESSAGES_EACH})
    for name, messages in (("small", FEW), ("large", DEEP)):
        queue = database.register("bench", name)
        with connection.cursor() as cursor:
            values = {"queue": queue.key, "messages": messages, "now": now(), "ttl": TTL * TICKS_PER_SECOND}
            cursor.execute(ADD_MESSAGES, values)
    vacuum()
    return [*many_queues(database, _schema), *deep_queue(database), *pushes(database, _bare_push, PUSHED_BYTES)]


@contextmanager
def _schema(name: str) -> Iterator[None]:
    """Use the few queues, or the many: the few are in a schema of their own."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET search_path TO {'public' if name == 'many' else name}")
        yield
        cursor.execute("SET search_path TO public")


def _bare_push(batch: Sequence[NewMessage]) -> None:
    """Insert the same rows with one statement."""
    at = now()
    values: list[Any] = []
    for step, (message, rest) in enumerate(zip(batch, random_rests(len(batch)), strict=True)):
        values += [BARE_CONTENTS, 1, at + step, rest - SIGNED_OFFSET, message.body, message.content_type, at]
    with connection.cursor() as cursor:
        cursor.execute(INSERT + ", ".join(["(%s, %s, %s, %s, %s, %s, %s)"] * len(batch)), values)


def many_queues(store: MessageStore, using: Callable[[str], Any]) -> list[Figure]:
    """Measure calls with ``many`` queues, and with ``few`` as the floor. Finding a queue by its name is included.

    ``using(name)`` is a context in which the store uses these queues.
    """
    message = NewMessage(b"x" * 100, 1, 3600, "text/plain")
    sizes = {"few": FEW, "many": MANY}

    def any_queue(name: str) -> StoredQueue:
        return store.find("bench", f"queue-{random.randrange(sizes[name])}")

    calls: dict[str, Callable[[str], Any]] = {
        "create a queue": lambda name: store.register("bench", uuid.uuid4().hex),
        "post a message": lambda name: store.push(any_queue(name), [message]),
        "read a queue": lambda name: store.read(any_queue(name), 1, limit=MESSAGES_EACH),
    }

    def measured(name: str, what: str) -> float:
        with using(name):
            return fastest(partial(calls[what], name))

    found = in_turn(
        ROUNDS,
        warm_ups=WARM_UPS,
        **{f"{what} {name}": partial(measured, name, what) for what in calls for name in sizes},
    )
    where = f"{MANY:,} queues of {MESSAGES_EACH} messages (floor: {FEW:,})"
    return [Figure(where, what, "µs", found[f"{what} many"], found[f"{what} few"], MAX_GROWTH) for what in calls]


def fastest(do: Callable[[], Any]) -> float:
    """Return the microseconds of the fastest of some calls, to reduce the noise of other load."""
    return min(seconds(do) for _ in range(ATTEMPTS)) * 1e6


def deep_queue(store: MessageStore) -> list[Figure]:
    """Measure reads of a batch at different places of the queue ``large``, and of ``small`` as the floor."""
    small, large = store.find("bench", "small"), store.find("bench", "large")
    first, last = (
        place(store.read(large, 1, limit=1, descending=descending)[0].id).ticks for descending in (False, True)
    )
    margin = (last - first) // 100

    def somewhere() -> Place:
        return Place(random.randrange(first + margin, last - margin), 0)

    def message() -> Place:
        return place(store.read(large, 1, start=somewhere(), limit=1)[0].id)

    def read(queue: StoredQueue, start: Callable[[], Place | None] = lambda: None, **asked: Any) -> float:
        places = iter([start() for _ in range(ATTEMPTS)])
        found: list[Any] = []
        took = fastest(lambda: found.extend(store.read(queue, 1, start=next(places), limit=BATCH, **asked)))
        assert len(found) == ATTEMPTS * BATCH
        return took

    found = in_turn(
        ROUNDS,
        warm_ups=WARM_UPS,
        **{
            "floor": lambda: read(small),
            "from the beginning": lambda: read(large),
            "at the end": lambda: read(large, descending=True, before=store.now()),
            "in the middle, from a message": lambda: read(large, message),
            "by time": lambda: read(large, somewhere, before=store.now()),
            "by time, going back": lambda: read(large, somewhere, descending=True),
        },
    )
    floor = found.pop("floor")
    where = f"{BATCH} messages from a queue of {DEEP:,} (floor: of {FEW:,})"
    return [Figure(where, what, "µs", times, floor, MAX_GROWTH) for what, times in found.items()]


def pushes(store: MessageStore, bare: Callable[[Sequence[NewMessage]], None], size: int) -> list[Figure]:
    """Measure a push of a batch, and ``bare`` with the same batch as the floor."""
    queue = store.register("bench", uuid.uuid4().hex)
    batch = [NewMessage(os.urandom(size), 1, TTL, "text/plain") for _ in range(BATCH)]
    found = in_turn(
        ROUNDS,
        warm_ups=WARM_UPS,
        push=lambda: fastest(lambda: store.push(queue, batch)),
        bare=lambda: fastest(lambda: bare(batch)),
    )
    where = f"messages of {size} bytes (floor: the bare driver)"
    return [Figure(where, f"push {BATCH}", "µs", found["push"], found["bare"], MAX_PUSH_RATIO)]


def message_store_worker() -> list[Figure]:
    """Measure a worker, from a queue's first message to its last, and a bare loop over the store.

    The worker also plans shares, checks its leases before each message, and records its position every second.
    """
    queue = queues.create("bench", "queue")
    for _ in range(WORKER_MESSAGES // 1000):
        queues.post_all(queue, [MessageInput(os.urandom(PUSHED_BYTES)) for _ in range(1000)])
    found = in_turn(WORKER_ROUNDS, worker=lambda: _worker(queue), bare=lambda: _bare_loop(queue))
    where = f"{WORKER_MESSAGES:,} messages of {PUSHED_BYTES} bytes, batch {BATCH}"
    return [Figure(where, "one message, ≥ 0.8 of bare", "µs", found["worker"], found["bare"], MAX_WORKER_RATIO)]


class _Clock:
    """Measures the microseconds per message from the first message to the last."""

    def __init__(self) -> None:
        self.microseconds = 0.0
        self._count = 0
        self._begun = 0.0

    def tick(self) -> bool:
        """Count a message, and return whether it is the last."""
        self._count += 1
        if self._count == 1:
            self._begun = time.perf_counter()
        self.microseconds = (time.perf_counter() - self._begun) / self._count * 1e6
        return self._count == WORKER_MESSAGES


def _bare_loop(queue: StoredQueue) -> float:
    clock = _Clock()
    start, ended = None, False
    while not ended:
        messages = store().read(queue, 1, start=start, limit=BATCH)
        for _ in messages:
            ended = clock.tick()
        start = ids.place_after(messages[-1].id)
    return clock.microseconds


def _worker(queue: StoredQueue) -> float:
    queues.delete_positions(queue, "worker")
    clock = _Clock()

    def work(message: Any, context: Any) -> None:
        if clock.tick():
            worker.stop()

    worker = Worker("worker", work, StoreTransport("bench"), batch=BATCH)
    worker.run()
    return clock.microseconds
