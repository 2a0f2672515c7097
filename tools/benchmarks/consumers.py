"""Throughput of a no-op consumer with a prefetch of 20, compared to pika, yapw and aio-pika."""

import subprocess
import sys
import time

import pika

from guardian_consumers import Consumer, Settings
from tools.benchmarks.figures import Figure
from tools.benchmarks.services import PROJECT, ChildError, Services

MESSAGES = 10_000
ROUNDS = 5
BODY = b'{"order": "00000000000000000000000000000000", "state": "executing", "comment": "' + b"x" * 100 + b'"}'

MAX_RATIO = 1 / 0.9
"""Of the time per message: the inverse of the minimum speed."""

EXCHANGE = "bench_consumers"
QUEUE = f"{EXCHANGE}_orders"

QUORUM_QUEUE = f"{EXCHANGE}_quorum"

CHANGES = {
    "toolkit_young": "prefetch 1",
    "toolkit_quorum": "quorum queue",
}
COMPARED = {
    "bare_select": "pika, SelectConnection",
    "bare_threads": "pika, with threads",
    "yapw": "yapw",
    "aio_pika": "aio-pika",
}


def measure(services: Services) -> list[Figure]:
    """Alternate between the consumers, each on the same number of messages in one queue.

    The figures are microseconds per message and messages per second. The floor is pika's BlockingConnection with acks
    in the callback, where a long callback blocks heartbeats.
    """
    services.say(f"consumers of {MESSAGES:,} messages")
    _declare(services)
    took: dict[str, list[float]] = {kind: [] for kind in ("bare", "toolkit", *CHANGES, *COMPARED)}
    worked: dict[str, list[float]] = {kind: [] for kind in took}
    for number in range(ROUNDS):
        for kind in took if number % 2 else reversed(took):
            seconds, processor_seconds = _seconds(services, kind)
            took[kind].append(seconds / MESSAGES * 1_000_000)
            worked[kind].append(processor_seconds / MESSAGES * 1_000_000)
    where = f"{MESSAGES:,} messages, prefetch 20"
    others = {**CHANGES, **COMPARED}
    return [
        Figure(where, "one message, ≥ 0.9 of bare", "µs", took["toolkit"], took["bare"], MAX_RATIO),
        *(Figure(where, what, "µs", took[kind], took["bare"]) for kind, what in others.items()),
        Figure(where, "messages a second", "", _speeds(took["toolkit"]), _speeds(took["bare"])),
        *(
            Figure(where, f"beside {COMPARED[kind]}", "", _speeds(took["toolkit"]), _speeds(took[kind]))
            for kind in COMPARED
        ),
        Figure("of the processor", "one message", "µs", worked["toolkit"], worked["bare"]),
        *(Figure("of the processor", what, "µs", worked[kind], worked["bare"]) for kind, what in others.items()),
    ]


def _speeds(microseconds: list[float]) -> list[float]:
    return [1_000_000 / one for one in microseconds]


def _declare(services: Services) -> None:
    """Declare the queues with the toolkit, for all consumers."""
    for key, queue_type in (("orders", "classic"), ("quorum", "quorum")):
        settings = Settings(url=_url(services), exchange=EXCHANGE, queue_type=queue_type)
        consumer = Consumer(settings, key, lambda message: None)
        consumer.start()
        while not consumer.connected:
            time.sleep(0.01)
        consumer.close()


def _seconds(services: Services, kind: str) -> tuple[float, float]:
    """Fill the queue. Return the time that a process takes to consume it, and its processor time."""
    queue = QUORUM_QUEUE if kind == "toolkit_quorum" else QUEUE
    with pika.BlockingConnection(pika.URLParameters(_url(services))) as connection:
        channel = connection.channel()
        channel.queue_purge(queue)
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
        for _ in range(MESSAGES):
            channel.basic_publish("", queue, BODY, properties)
        while channel.queue_declare(queue, passive=True).method.message_count < MESSAGES:
            time.sleep(0.02)
    command = [
        sys.executable,
        "-m",
        "tools.benchmarks.consumers_child",
        kind,
        _url(services),
        EXCHANGE,
        queue,
        str(MESSAGES),
    ]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise ChildError(f"{kind} ended with code {done.returncode}. It said:\n{done.stderr[-4000:]}")
    seconds, processor_seconds = map(float, done.stdout.split())
    return seconds, processor_seconds


def _url(services: Services) -> str:
    return f"{services.node.amqp_url}/%2F"
