"""The speed of guardian-consumers beside bare pika, yapw and aio-pika, with a callback that does nothing.

Each measurement is a process of its own, which reads a prefilled queue with a prefetch of 20.
"""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aio_pika
import pika
import yapw.clients
import yapw.methods

from guardian_consumers import AsyncConsumer, Consumer, Settings
from tools.benchmarks.figures import Figure, in_turn
from tools.benchmarks.running import size

URL, EXCHANGE, KEY, QUEUE, PREFETCH = os.environ.get("RABBIT_URL", ""), "bench", "orders", "bench_orders", 20
BODY = b'{"book": "Dune"}'
TIMEOUT_SECONDS = 60


def consuming() -> list[Figure]:
    """Return the processor time of each library per message, which other programs on the machine change least."""
    messages = size(20_000, 200)
    found = in_turn(size(5, 1), warm_ups=0, **{name: partial(_measured, name, messages) for name in CONSUMERS})
    where = "a callback that does nothing, prefetch 20: processor time, beside pika_threads"
    limits = {"ours_threads": 1.0, "ours_asyncio": 1.0}
    return [Figure(where, name, "µs", found[name], found["pika_threads"], limits.get(name)) for name in CONSUMERS]


def _measured(name: str, messages: int) -> float:
    """Fill the queue, and have a process read it. Print its messages per second, and return the microseconds of each.

    They are those of the processor.
    """
    with pika.BlockingConnection(pika.URLParameters(URL)) as connection:
        channel = connection.channel()
        channel.exchange_declare(EXCHANGE, "direct", durable=True)
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "classic"})
        channel.queue_bind(QUEUE, EXCHANGE, QUEUE)
        channel.queue_purge(QUEUE)
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
        for _ in range(messages):
            channel.basic_publish(EXCHANGE, QUEUE, BODY, properties)
    command = [sys.executable, "-m", "tools.benchmarks.consuming", name, str(messages)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_SECONDS)
    elapsed, used = map(float, done.stdout.split())
    print(f"{name:>15}: {1e6 / elapsed:,.0f} messages/s", flush=True)
    return used


def _until(messages: int) -> Callable[[], None]:
    """Return a callback that ends the process at its last call, and prints elapsed and processor time per call."""
    numbers, begun = itertools.count(1), []

    def called() -> None:
        number = next(numbers)
        if number in (1, messages):
            begun.append((time.perf_counter(), time.process_time()))
        if number == messages:
            print(*((end - start) / (messages - 1) * 1e6 for start, end in zip(*begun, strict=True)), flush=True)
            os._exit(0)

    return called


def ours_threads(called: Callable[[], None]) -> None:
    Consumer(Settings(URL, EXCHANGE, prefetch=PREFETCH), KEY, lambda message: called()).run()


def ours_asyncio(called: Callable[[], None]) -> None:
    async def callback(message: Any) -> None:
        called()

    asyncio.run(AsyncConsumer(Settings(URL, EXCHANGE, prefetch=PREFETCH), KEY, callback).run())


def pika_threads(called: Callable[[], None]) -> None:
    """As in pika's example of a threaded consumer: acknowledgements return to the connection's thread."""
    with pika.BlockingConnection(pika.URLParameters(URL)) as connection, ThreadPoolExecutor(PREFETCH) as executor:
        channel = connection.channel()

        def work(tag: int) -> None:
            called()
            connection.add_callback_threadsafe(partial(channel.basic_ack, tag))

        channel.basic_qos(prefetch_count=PREFETCH)
        channel.basic_consume(QUEUE, lambda _, method, *__: executor.submit(work, method.delivery_tag))
        channel.start_consuming()


def yapw_threads(called: Callable[[], None]) -> None:
    def callback(state: Any, channel: Any, method: Any, properties: Any, message: Any) -> None:
        called()
        yapw.methods.ack(state, channel, method.delivery_tag)

    yapw.clients.AsyncConsumer(
        on_message_callback=callback, queue=KEY, url=URL, exchange=EXCHANGE, prefetch_count=PREFETCH,
        arguments={"x-queue-type": "classic"},
    ).start()  # fmt: skip


def aio_pika_tasks(called: Callable[[], None]) -> None:
    async def callback(message: Any) -> None:
        called()
        await message.ack()

    async def consume() -> None:
        channel = await (await aio_pika.connect(URL)).channel()
        await channel.set_qos(PREFETCH)
        queue = await channel.get_queue(QUEUE)
        await queue.consume(callback)
        await asyncio.Future()

    asyncio.run(consume())


CONSUMERS = {
    "ours_threads": ours_threads,
    "ours_asyncio": ours_asyncio,
    "pika_threads": pika_threads,
    "yapw": yapw_threads,
    "aio_pika": aio_pika_tasks,
}


if __name__ == "__main__":
    CONSUMERS[sys.argv[1]](_until(int(sys.argv[2])))
