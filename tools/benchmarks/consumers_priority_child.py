"""Consumers of messages with priorities, each run in its own process.

``python -m tools.benchmarks.consumers_priority_child KIND URL EXCHANGE KEY PRIORITIES WORK HOW PREFETCH [AGEING]``
prints "ready", consumes until it reads a line from its standard input, and prints JSON: for each message its number and
the monotonic times of publishing and handling; for a message without a number 0, its priority, and the time of
handling. The callback takes a random time from 0 to twice WORK seconds: it "sleeps", or is "busy" for this processor
time.
"""

import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pika

IDLE_SECONDS = 0.05
"""The pause of naive polling on empty queues, to spare the broker."""

Handled = Callable[[Any, int], None]


def toolkit(url: str, exchange: str, key: str, priorities: str, prefetch: int, ageing: str, handled: Handled) -> None:
    """Consume with `guardian_consumers.Consumer`."""
    from guardian_consumers import Consumer, Message, Settings

    settings = Settings(
        url, exchange, prefetch=prefetch, priorities=priorities, priority_ageing=float(ageing) if ageing else None
    )

    def callback(message: Message) -> None:
        handled(message.body, message.properties.priority)

    consumer = Consumer(settings, key, callback)
    consumer.start()
    while not consumer.connected:
        time.sleep(0.01)
    _wait()
    consumer.close()


def polling(url: str, exchange: str, key: str, priorities: str, prefetch: int, ageing: str, handled: Handled) -> None:
    """Get messages one by one, from the high queue first, in ``prefetch`` threads with a connection each."""
    from guardian_consumers.names import Names, level_queue

    queue = Names(exchange).queue(key)
    ended = threading.Event()

    def work() -> None:
        connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = connection.channel()
        while not ended.is_set():
            for level in (1, 0):
                method, properties, body = channel.basic_get(level_queue(queue, level))
                if method is not None:
                    handled(json.loads(body), properties.priority)
                    channel.basic_ack(method.delivery_tag)
                    break
            else:
                connection.sleep(IDLE_SECONDS)
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(prefetch)]
    for thread in threads:
        thread.start()
    _wait()
    ended.set()
    for thread in threads:
        thread.join()


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(50))


def _wait() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Run the consumer of the command line."""
    logging.disable(logging.CRITICAL)
    kind, url, exchange, key, priorities, work, how, prefetch, *ageing = sys.argv[1:]
    spend = time.sleep if how == "sleeps" else _compute
    found: list[tuple[int, float, float]] = []

    def handled(body: Any, priority: int) -> None:
        now = time.monotonic()
        found.append((body[0], body[1], now) if body else (0, priority, now))
        if float(work):
            spend(random.uniform(0, 2 * float(work)))

    consume = polling if kind == "polling" else toolkit
    consume(url, exchange, key, priorities, int(prefetch), ageing[0] if ageing else "", handled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
