"""No-op consumers, each run in its own process.

``python -m tools.benchmarks.consumers_child KIND URL EXCHANGE QUEUE MESSAGES`` consumes this number of messages, by
default with a prefetch of 20. It prints the seconds from the first message to the last, and the processor seconds of
this process, which depend less on other load.
"""

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pika

PREFETCH = 20


def bare(url: str, _: str, queue: str, messages: int) -> "Clock":
    """Consume with pika's BlockingConnection in one thread, with acks in the callback, as in its examples."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=PREFETCH)
    clock = Clock(messages)

    def callback(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        if clock.tick():
            channel.stop_consuming()

    channel.basic_consume(queue, callback)
    channel.start_consuming()
    connection.close()
    return clock


def bare_select(url: str, _: str, queue: str, messages: int) -> "Clock":
    """Consume with pika's SelectConnection in one thread, where callbacks block heartbeats."""
    clock = Clock(messages)

    def consume(channel: Any) -> None:
        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume(queue, callback)

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
    return clock


def bare_threads(url: str, _: str, queue: str, messages: int) -> "Clock":
    """Consume with pika and threads that pass acks back, as in its example for long work."""
    from concurrent.futures import ThreadPoolExecutor

    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=PREFETCH)
    clock = Clock(messages)
    executor = ThreadPoolExecutor(PREFETCH)

    def acknowledge(tag: int) -> None:
        channel.basic_ack(tag)
        if clock.tick():
            channel.stop_consuming()

    def work(tag: int) -> None:
        connection.add_callback_threadsafe(lambda: acknowledge(tag))

    channel.basic_consume(queue, lambda _, method, properties, body: executor.submit(work, method.delivery_tag))
    channel.start_consuming()
    executor.shutdown()
    connection.close()
    return clock


def yapw(url: str, exchange: str, queue: str, messages: int) -> "Clock":
    """Consume with yapw's AsyncConsumer, the faster of its reconnecting clients."""
    from yapw.clients import AsyncConsumer
    from yapw.methods import ack, add_callback_threadsafe

    clock = Clock(messages)

    def callback(state: Any, channel: Any, method: Any, properties: Any, body: Any) -> None:
        ack(state, channel, method.delivery_tag)
        if clock.tick():
            add_callback_threadsafe(state.connection, state.interrupt)

    key = queue.removeprefix(f"{exchange}_")
    arguments = {"x-queue-type": "classic"}
    AsyncConsumer(
        url=url, exchange=exchange, queue=key, on_message_callback=callback, prefetch_count=PREFETCH,
        arguments=arguments,
    ).start()  # fmt: skip
    return clock


def aio_pika(url: str, _: str, queue: str, messages: int) -> "Clock":
    """Consume with aio-pika, whose callbacks run in the event loop."""
    import aio_pika as client

    clock = Clock(messages)

    async def run() -> None:
        done = asyncio.Event()
        connection = await client.connect_robust(url)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)

        async def callback(message: Any) -> None:
            await message.ack()
            if clock.tick():
                done.set()

        await (await channel.get_queue(queue)).consume(callback)
        await done.wait()
        await connection.close()

    asyncio.run(run())
    return clock


def toolkit(url: str, exchange: str, queue: str, messages: int, **changes: Any) -> "Clock":
    """Consume with `guardian_consumers.Consumer`, with threads and decoded bodies."""
    from guardian_consumers import Consumer, Settings

    clock = Clock(messages)
    settings = Settings(**{"url": url, "exchange": exchange, "prefetch": "grown", **changes})

    def callback(_: Any) -> None:
        if clock.tick():
            consumer.stop()

    consumer = Consumer(settings, queue.removeprefix(f"{exchange}_"), callback)
    consumer.run()
    return clock


KINDS: dict[str, Callable[[str, str, str, int], "Clock"]] = {
    "bare": bare,
    "bare_select": bare_select,
    "bare_threads": bare_threads,
    "yapw": yapw,
    "aio_pika": aio_pika,
    "toolkit": toolkit,
    "toolkit_young": partial(toolkit, prefetch="young"),
    "toolkit_quorum": partial(toolkit, queue_type="quorum"),
}


class Clock:
    """Measures the time from the first to the last of ``messages`` messages. It is thread-safe."""

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self._count = itertools.count(1)  # next() is atomic in CPython
        self._begun = 0.0, 0.0
        self.seconds = 0.0
        self.processor_seconds = 0.0

    def tick(self) -> bool:
        """Count a message, and return whether it is the last."""
        number = next(self._count)
        if number == 1:
            self._begun = time.perf_counter(), time.process_time()
        elif number == self._messages:
            self.seconds = time.perf_counter() - self._begun[0]
            self.processor_seconds = time.process_time() - self._begun[1]
            return True
        return False


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    kind, url, exchange, queue, messages = sys.argv[1:]
    measured = KINDS[kind](url, exchange, queue, int(messages))
    print(measured.seconds, measured.processor_seconds)
