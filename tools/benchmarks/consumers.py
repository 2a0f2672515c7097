"""Throughput of a no-op consumer with a prefetch of 20, compared to pika, yapw and aio-pika."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import aio_pika
import pika
from django.conf import settings
from yapw.clients import AsyncConsumer
from yapw.methods import ack, add_callback_threadsafe

from guardian_consumers import Consumer, Settings
from tools.benchmarks.figures import Figure, in_turn
from tools.benchmarks.running import process, size

MESSAGES = size(10_000, 500)
ROUNDS = size(5, 1)
PREFETCH = 20
BODY = b'{"order": "00000000000000000000000000000000", "state": "executing", "comment": "' + b"x" * 100 + b'"}'

MAX_RATIO = 1 / 0.9
"""Of the time per message: the inverse of the minimum speed."""

EXCHANGE = "bench_consumers"


class Clock:
    """Measures the time from the first message to the last. It is thread-safe."""

    def __init__(self) -> None:
        self._count = itertools.count(1)  # next() is atomic in CPython
        self._begun = 0.0, 0.0
        self.seconds = 0.0
        self.processor_seconds = 0.0

    def tick(self) -> bool:
        """Count a message, and return whether it is the last."""
        number = next(self._count)
        if number == 1:
            self._begun = time.perf_counter(), time.process_time()
        elif number == MESSAGES:
            self.seconds = time.perf_counter() - self._begun[0]
            self.processor_seconds = time.process_time() - self._begun[1]
            return True
        return False


def toolkit(url: str, key: str, clock: Clock, **changes: Any) -> None:
    """Consume with this project's toolkit, with threads and decoded bodies."""

    def callback(_: Any) -> None:
        if clock.tick():
            consumer.stop()

    consumer = Consumer(Settings(**{"url": url, "exchange": EXCHANGE, "prefetch": "grown", **changes}), key, callback)
    consumer.run()


def bare(url: str, key: str, clock: Clock) -> None:
    """Consume with pika's BlockingConnection in one thread, with acks in the callback, as in its examples."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=PREFETCH)

    def callback(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        if clock.tick():
            channel.stop_consuming()

    channel.basic_consume(f"{EXCHANGE}_{key}", callback)
    channel.start_consuming()
    connection.close()


def bare_select(url: str, key: str, clock: Clock) -> None:
    """Consume with pika's SelectConnection in one thread, where callbacks block heartbeats."""

    def consume(channel: Any) -> None:
        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume(f"{EXCHANGE}_{key}", callback)

    def callback(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        if clock.tick():
            connection.close()

    connection = pika.SelectConnection(
        pika.URLParameters(url),
        on_open_callback=lambda opened: opened.channel(on_open_callback=consume),
        on_close_callback=lambda closed, _: closed.ioloop.stop(),
    )
    connection.ioloop.start()


def bare_threads(url: str, key: str, clock: Clock) -> None:
    """Consume with pika and threads that pass acks back, as in its example for long work."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=PREFETCH)

    def acknowledge(tag: int) -> None:
        channel.basic_ack(tag)
        if clock.tick():
            channel.stop_consuming()

    def work(tag: int) -> None:
        connection.add_callback_threadsafe(lambda: acknowledge(tag))

    with ThreadPoolExecutor(PREFETCH) as executor:
        channel.basic_consume(
            f"{EXCHANGE}_{key}", lambda _, method, properties, body: executor.submit(work, method.delivery_tag)
        )
        channel.start_consuming()
    connection.close()


def yapw(url: str, key: str, clock: Clock) -> None:
    """Consume with yapw's AsyncConsumer, the faster of its reconnecting clients."""

    def callback(state: Any, channel: Any, method: Any, properties: Any, body: Any) -> None:
        ack(state, channel, method.delivery_tag)
        if clock.tick():
            add_callback_threadsafe(state.connection, state.interrupt)

    AsyncConsumer(
        url=url, exchange=EXCHANGE, queue=key, on_message_callback=callback, prefetch_count=PREFETCH,
        arguments={"x-queue-type": "classic"},
    ).start()  # fmt: skip


def with_aio_pika(url: str, key: str, clock: Clock) -> None:
    """Consume with aio-pika, whose callbacks run in the event loop."""

    async def run() -> None:
        done = asyncio.Event()
        connection = await aio_pika.connect_robust(url)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)

        async def callback(message: Any) -> None:
            await message.ack()
            if clock.tick():
                done.set()

        await (await channel.get_queue(f"{EXCHANGE}_{key}")).consume(callback)
        await done.wait()
        await connection.close()

    asyncio.run(run())


KINDS: dict[str, tuple[str, Callable[[str, str, Clock], None]]] = {
    "this package": ("orders", toolkit),
    "this package, prefetch 1": ("orders", partial(toolkit, prefetch="young")),
    "this package, from a quorum queue": ("quorum", partial(toolkit, queue_type="quorum")),
    "pika, BlockingConnection": ("orders", bare),
    "pika, SelectConnection": ("orders", bare_select),
    "pika, with threads": ("orders", bare_threads),
    "yapw": ("orders", yapw),
    "aio-pika": ("orders", with_aio_pika),
}
"""The key of the queue, and the consumer."""


def consumers() -> list[Figure]:
    """Measure each consumer, in its own process, on the same number of messages in one queue.

    The floor is pika's BlockingConnection with acks in the callback, where a long callback blocks heartbeats.
    """
    url = f"{settings.RABBIT_URL}/%2F"
    for key, queue_type in (("orders", "classic"), ("quorum", "quorum")):
        declare(Settings(url=url, exchange=EXCHANGE, queue_type=queue_type), key)
    worked: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def consume_all(kind: str) -> float:
        fill(url, f"{EXCHANGE}_{KINDS[kind][0]}", MESSAGES, BODY)
        with process(_consume, kind, url) as child:
            seconds, processor_seconds = child.recv()
        worked[kind].append(processor_seconds / MESSAGES * 1e6)
        return float(seconds / MESSAGES * 1e6)

    elapsed = in_turn(ROUNDS, warm_ups=0, **{kind: partial(consume_all, kind) for kind in KINDS})
    floor = "pika, BlockingConnection"
    return [
        Figure("elapsed, a message", kind, "µs", times, elapsed[floor], MAX_RATIO if kind == "this package" else None)
        for kind, times in elapsed.items()
    ] + [
        Figure("consumer's processor time, a message", kind, "µs", times, worked[floor])
        for kind, times in worked.items()
    ]


def _consume(connection: Connection, kind: str, url: str) -> None:
    logging.disable(logging.CRITICAL)
    clock = Clock()
    key, consume = KINDS[kind]
    consume(url, key, clock)
    connection.send((clock.seconds, clock.processor_seconds))


def declare(settings: Settings, key: str) -> None:
    """Declare queue and exchange with the toolkit."""
    consumer = Consumer(settings, key, lambda message: None)
    consumer.start()
    while not consumer.connected:
        time.sleep(0.01)
    consumer.close()


def fill(url: str, queue: str, messages: int, body: bytes) -> None:
    """Replace the messages of a queue by as many new ones."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_purge(queue)
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
        for _ in range(messages):
            channel.basic_publish("", queue, body, properties)
        while channel.queue_declare(queue, passive=True).method.message_count < messages:
            time.sleep(0.02)
