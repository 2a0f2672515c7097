"""Latency of high-priority messages while 100,000 low-priority messages wait.

It is compared to the same consumer without low-priority messages, to the broker's own priorities, and to naive polling,
with callbacks that sleep, compute, or do nothing.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pika
from django.conf import settings

from guardian_consumers import Consumer, Publisher, Settings
from guardian_consumers.names import level_queue, priority_queue
from guardian_consumers.priority import BROKER
from tools.benchmarks.consumers import declare
from tools.benchmarks.figures import Figure
from tools.benchmarks.running import process, size

KEY = "orders"
RANGES = "0-4,5-9"
LOW, HIGH = 0, 9
WAITING = size(100_000, 30_000)
HIGHS = size(400, 50)
ROUNDS = size(5, 1)
MAX_RATIO = 3.0

CATCH_UP_SECONDS = 30.0
IDLE_SECONDS = 0.05
"""The pause of naive polling on empty queues, to spare the broker."""


class Case(NamedTuple):
    """A way to consume. ``work``: average seconds of a callback, which sleeps or is ``busy``.

    ``interval``: average seconds between high-priority messages. Computing callbacks get fewer, so that these alone
    don't saturate the processor. ``limit``: the target for the ratio of the p99 to that without low-priority messages.
    """

    name: str
    priorities: str = RANGES
    polls: bool = False
    work: float = 0.01
    busy: bool = False
    prefetch: int = 20
    limit: float | None = None
    interval: float = 0.006


CASES = (
    Case("ranges", limit=MAX_RATIO),
    Case("the broker's own priorities", priorities=BROKER),
    Case("naive polling", polls=True),
    Case("ranges, no work", work=0, limit=MAX_RATIO),
    Case("ranges, 2 ms asleep", work=0.002, limit=MAX_RATIO),
    # With 20 threads contending for the GIL, the connection's thread gets one of 20 turns of 5 ms each.
    Case("ranges, 2 ms busy", work=0.002, busy=True, interval=0.012),
    Case("ranges, 2 ms busy, prefetch 1", work=0.002, busy=True, prefetch=1, limit=MAX_RATIO, interval=0.012),
)


class Latency(NamedTuple):
    """Microseconds from publishing high-priority messages to their handling, and low ones handled a second."""

    p99: float
    median: float
    lows_a_second: float


def consumers_priority() -> list[Figure]:
    """Alternate between the cases, each with and without low-priority messages, which are the floor."""
    found: dict[tuple[Case, int], list[Latency]] = {(case, low): [] for case in CASES for low in (0, WAITING)}
    for number in range(ROUNDS):
        for case, low in found if number % 2 else reversed(found):
            found[case, low].append(_latency(case, low))
    figures = []
    for case in CASES:
        full, idle = found[case, WAITING], found[case, 0]
        p99s, medians = [one.p99 for one in full], [one.median for one in full]
        where = f"priority, {WAITING:,} low ones waiting (floor: none), {case.name}"
        figures += [
            Figure(where, "p99 of a high one", "µs", p99s, [one.p99 for one in idle], case.limit),
            Figure(where, "median of a high one", "µs", medians, [one.median for one in idle]),
            Figure(where, "low ones a second", "", [one.lows_a_second for one in full]),
        ]
    return figures


def _latency(case: Case, low: int) -> Latency:
    """Publish high-priority messages at random intervals. Low ones that are left stay for the next round."""
    exchange = f"bench_priority_{'full' if low else 'idle'}"
    options = Settings(f"{settings.RABBIT_URL}/%2F", exchange, prefetch=case.prefetch, priorities=case.priorities)
    declare(options, KEY)
    queue = options.names.queue(KEY)
    lowest, highest = (priority_queue(queue),) * 2 if case.priorities == BROKER else (queue, level_queue(queue, 1))
    with Publisher(options) as publisher, pika.BlockingConnection(options.addresses) as connection:
        channel = connection.channel()

        low_one, high_one = (publisher.prepare([], KEY, priority=priority) for priority in (LOW, HIGH))

        def publish(message: Any, body: bytes) -> None:
            channel.basic_publish(exchange, message.routing_key, body, message.properties)

        def ready(queue: str) -> int:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

        for _ in range(low - ready(lowest)):
            publish(low_one, low_one.body)
        while ready(lowest) < low:
            time.sleep(0.1)
        with process(_consume, options, case) as child:
            assert child.recv() == "ready"
            choose = random.Random(0)
            begun = time.monotonic()
            for number in range(1, HIGHS + 1):
                time.sleep(choose.uniform(0, 2 * case.interval))
                publish(high_one, f"[{number}, {time.monotonic()}]".encode())
            ended = time.monotonic()
            time.sleep(1)
            while highest != lowest and ready(highest) and time.monotonic() < ended + CATCH_UP_SECONDS:
                time.sleep(0.1)
            left = ready(lowest)
            child.send("stop")
            handled: list[tuple[int, float, float]] = child.recv()
    highs = sorted({number: at - since for number, since, at in handled if number}.values())
    assert len(highs) == HIGHS, f"{case.name}: {HIGHS - len(highs)} of {HIGHS} high messages weren't handled"
    assert left >= low // 100, f"{case.name}: only {left} low messages were left; that was no backlog"
    lows = sum(not number and begun <= at <= ended for number, _, at in handled)
    return Latency(highs[HIGHS * 99 // 100] * 1e6, highs[HIGHS // 2] * 1e6, lows / (ended - begun))


def _consume(connection: Connection, options: Settings, case: Case) -> None:
    """Consume until the connection receives anything.

    Send each message's number (0: low priority), and its monotonic times of publishing and handling.
    """
    logging.disable(logging.CRITICAL)
    handled: list[tuple[int, float, float]] = []

    def handle(body: Any) -> None:
        number, since = body or (0, 0.0)
        handled.append((number, since, time.monotonic()))
        seconds = random.uniform(0, 2 * case.work)
        if case.busy:
            _compute(seconds)
        elif seconds:
            time.sleep(seconds)

    if case.polls:
        _poll(connection, options, case, handle)
    else:
        consumer = Consumer(options, KEY, lambda message: handle(message.body))
        consumer.start()
        while not consumer.connected:
            time.sleep(0.01)
        connection.send("ready")
        connection.recv()
        consumer.close()
    connection.send(handled)


def _poll(connection: Connection, options: Settings, case: Case, handle: Callable[[Any], None]) -> None:
    """Get messages one by one, from the high queue first, in ``prefetch`` threads with a connection each."""
    queue = options.names.queue(KEY)
    ended = threading.Event()

    def work() -> None:
        with pika.BlockingConnection(options.addresses) as broker:
            channel = broker.channel()
            while not ended.is_set():
                for level in (1, 0):
                    method, _, body = channel.basic_get(level_queue(queue, level))
                    if method is not None:
                        handle(json.loads(body))
                        channel.basic_ack(method.delivery_tag)
                        break
                else:
                    broker.sleep(IDLE_SECONDS)

    threads = [threading.Thread(target=work) for _ in range(case.prefetch)]
    for thread in threads:
        thread.start()
    connection.send("ready")
    connection.recv()
    ended.set()
    for thread in threads:
        thread.join()


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(50))
