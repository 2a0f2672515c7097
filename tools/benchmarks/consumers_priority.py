"""Latency of high-priority messages while 100,000 low-priority messages wait.

It is compared to the same consumer without low-priority messages, to the broker's own priorities, and to naive polling,
with callbacks that sleep, compute, or do nothing.
"""

import json
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pika

from guardian_consumers import Consumer, Publisher, Settings
from guardian_consumers.names import level_queue, priority_queue
from guardian_consumers.priority import BROKER
from tools.benchmarks.figures import Figure
from tools.benchmarks.services import PROJECT, ChildError, Services

LOW, HIGH = 0, 9
WAITING = 100_000
HIGHS = 400
INTERVAL_SECONDS = 0.006
"""Average interval between high-priority messages."""

BUSY_INTERVAL_SECONDS = 0.012
"""The interval with computing callbacks, so that high-priority messages alone don't saturate the processor."""

CATCH_UP_TIMEOUT_SECONDS = 30.0
"""Timeout for handling the last high-priority messages."""

ROUNDS = 5
MAX_RATIO = 3.0

IDLE, FULL, SATURATED = "bench_priority_idle", "bench_priority_full", "bench_priority_saturated"
"""The exchanges. The messages in their queues stay for the next round."""

KEY = "orders"
RANGES = "0-4,5-9"

AGEING_SECONDS = 1.0
SATURATED_SECONDS = 8.0
SATURATING = 20_000
SLOW_WORK_SECONDS = 0.04
"""Long enough that the threads are the bottleneck, not the processor."""

SETTINGS = {"ranges": RANGES, "broker": BROKER}


class Case(NamedTuple):
    """A way to consume. ``work``: average seconds of a callback; ``how``: whether it sleeps or is busy.

    ``limit``: the target for the ratio of the p99 to that without low-priority messages. ``interval``: seconds between
    high-priority messages.
    """

    name: str
    kind: str
    work: float
    how: str = "sleeps"
    prefetch: int = 20
    limit: float | None = None
    interval: float = INTERVAL_SECONDS


KINDS = (
    Case("ranges", "ranges", 0.01, limit=MAX_RATIO),
    Case("the broker's own priorities", "broker", 0.01),
    Case("naive polling", "polling", 0.01),
)
WORKS = (
    Case("ranges, no work", "ranges", 0, limit=MAX_RATIO),
    Case("ranges, 2 ms asleep", "ranges", 0.002, limit=MAX_RATIO),
    # With 20 threads contending for the GIL, the connection's thread gets one of 20 turns of 5 ms each.
    Case("ranges, 2 ms busy", "ranges", 0.002, "busy", interval=BUSY_INTERVAL_SECONDS),
    Case("ranges, 2 ms busy, prefetch 1", "ranges", 0.002, "busy", 1, MAX_RATIO, BUSY_INTERVAL_SECONDS),
)


def measure(services: Services) -> list[Figure]:
    """Alternate between the cases, each with and without low-priority messages.

    The p99 is that of each round's high-priority messages. The floor is the same consumer without low-priority
    messages.
    """
    services.say(f"priority, with {WAITING:,} messages waiting")
    cases = [(case, low) for case in (*KINDS, *WORKS) for low in (0, WAITING)]
    found: dict[tuple[Case, int], list[dict[str, float]]] = {one: [] for one in cases}
    for number in range(ROUNDS):
        for case, low in cases if number % 2 else reversed(cases):
            found[case, low].append(_latencies(services, case, low))

    def values(case: Case, low: int, what: str) -> list[float]:
        return [one[what] for one in found[case, low]]

    where, idle = f"priority, {WAITING:,} low ones waiting", "priority, nothing waiting"
    figures = []
    for case in (*KINDS, *WORKS):
        for what in ("p99", "median"):
            most = case.limit if what == "p99" else None
            both = values(case, WAITING, what), values(case, 0, what)
            figures.append(Figure(where, f"{what} of a high one, {case.name}, beside idle", "µs", *both, most))
        lows = values(case, WAITING, "low_a_second")
        figures.append(Figure(where, f"low ones handled a second, {case.name}", "", lows))
    figures += [
        Figure(idle, f"of the broker's processor, {case.name}", "%", values(case, 0, "broker_percent"))
        for case in KINDS
    ]
    return [*figures, *_saturated(services)]


def _saturated(services: Services) -> list[Figure]:
    """Measure how long low-priority messages wait during an endless supply of high-priority ones."""
    strict = [_longest_wait(services, None) for _ in range(ROUNDS)]
    aged = [_longest_wait(services, AGEING_SECONDS) for _ in range(ROUNDS)]
    where = f"priority, high ones without end, for {SATURATED_SECONDS:g} s"
    return [
        Figure(where, "low ones handled, strict", "", [one["low"] for one in strict]),
        Figure(where, f"low ones handled, ageing {AGEING_SECONDS:g} s", "", [one["low"] for one in aged]),
        Figure(where, "longest without a low one, strict", "s", [one["longest"] for one in strict]),
        Figure(where, f"the same, ageing {AGEING_SECONDS:g} s", "s", [one["longest"] for one in aged]),
        Figure(where, "high ones a second, strict", "", [one["high_a_second"] for one in strict]),
        Figure(where, f"the same, ageing {AGEING_SECONDS:g} s", "", [one["high_a_second"] for one in aged]),
    ]


def _settings(services: Services, kind: str, exchange: str) -> Settings:
    return Settings(url=f"{services.node.amqp_url}/%2F", exchange=exchange, priorities=SETTINGS.get(kind, RANGES))


def _queues(settings: Settings) -> tuple[str, str]:
    """Return the names of the queues for low and high priorities."""
    queue = settings.names.queue(KEY)
    return (priority_queue(queue),) * 2 if settings.priorities == BROKER else (queue, level_queue(queue, 1))


def _ready(channel: Any, queue: str) -> int:
    count: int = channel.queue_declare(queue, passive=True).method.message_count
    return count


def _prepare(settings: Settings, low: int, high: int = 0) -> None:
    """Declare and bind the queues with the consumer, and fill them."""
    consumer = Consumer(settings, KEY, lambda message: None)
    consumer.start()
    while not consumer.connected:
        time.sleep(0.01)
    consumer.close()
    with Publisher(settings) as publisher, pika.BlockingConnection(settings.addresses) as connection:
        channel = connection.channel()
        for priority, number, queue in zip((LOW, HIGH), (low, high), _queues(settings), strict=True):
            message = publisher.prepare(0, KEY, priority=priority)
            for _ in range(number - _ready(channel, queue)):
                channel.basic_publish(settings.exchange, message.routing_key, message.body, message.properties)
            while _ready(channel, queue) < number:
                time.sleep(0.1)


class _Child:
    """The consumer in its own process."""

    def __init__(self, settings: Settings, case: Case, ageing: float | None = None) -> None:
        arguments = [case.kind, settings.url, settings.exchange, KEY, settings.priorities]
        arguments += [str(case.work), case.how, str(case.prefetch), *([str(ageing)] if ageing else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.benchmarks.consumers_priority_child", *arguments],
            cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self._fail()

    def end(self) -> list[tuple[int, float, float]]:
        """Stop it. Return each message's number (0: low priority) and times of publishing and handling."""
        out, _ = self._process.communicate("end\n", timeout=120)
        if self._process.returncode:
            self._fail()
        handled: list[tuple[int, float, float]] = json.loads(out)
        return handled

    def _fail(self) -> None:
        self._process.kill()
        _, errors = self._process.communicate()
        raise ChildError(f"the consumer of priorities failed. Its output:\n{errors[-4000:]}")


def _latencies(services: Services, case: Case, low: int) -> dict[str, float]:
    """Publish high-priority messages at random intervals, and return statistics of their latencies in microseconds."""
    settings = _settings(services, case.kind, FULL if low else IDLE)
    _prepare(settings, low)
    child = _Child(settings, case)
    with Publisher(settings) as publisher, pika.BlockingConnection(settings.addresses) as connection:
        channel = connection.channel()
        message = publisher.prepare(0, KEY, priority=HIGH)
        time.sleep(1)
        choose = random.Random(0)
        before, begun = _broker_seconds(services), time.monotonic()
        for number in range(1, HIGHS + 1):
            time.sleep(choose.uniform(0, 2 * case.interval))
            body = f"[{number}, {time.monotonic()}]".encode()
            channel.basic_publish(settings.exchange, message.routing_key, body, message.properties)
        took = time.monotonic() - begun
        time.sleep(1)
        worked = _broker_seconds(services) - before
        lowest, highest = _queues(settings)
        until = time.monotonic() + CATCH_UP_TIMEOUT_SECONDS
        while highest != lowest and _ready(channel, highest) and time.monotonic() < until:
            time.sleep(0.1)
        left = _ready(channel, lowest)
    handled = child.end()
    highs = {number: at - since for number, since, at in handled if number}
    if len(highs) < HIGHS:
        raise ChildError(f"{case.name}: {HIGHS - len(highs)} of {HIGHS} high messages weren't handled")
    if low and left < low // 100:
        raise ChildError(f"{case.name}: only {left} low messages were left; that was no backlog")
    seconds = sorted(highs.values())
    lows = [at for number, _, at in handled if not number and begun <= at <= begun + took]
    return {
        "p99": seconds[len(seconds) * 99 // 100] * 1_000_000,
        "median": seconds[len(seconds) // 2] * 1_000_000,
        "low_a_second": len(lows) / took,
        "broker_percent": worked / (took + 1) * 100,
    }


def _longest_wait(services: Services, ageing: float | None) -> dict[str, float]:
    """Fill both levels, consume for a while, and return how many low-priority messages were handled, and the gaps."""
    settings = _settings(services, "ranges", SATURATED)
    _prepare(settings, 1000, SATURATING)
    child = _Child(settings, Case("ranges", "ranges", SLOW_WORK_SECONDS), ageing)
    time.sleep(SATURATED_SECONDS)
    handled = child.end()
    times = sorted(at for *_, at in handled)
    begun, ended = times[0], times[-1]
    lows = sorted(at for _, priority, at in handled if priority == LOW)
    turns = [begun, *lows, ended]
    return {
        "low": float(len(lows)),
        "longest": max(later - earlier for earlier, later in pairwise(turns)),
        "high_a_second": (len(handled) - len(lows)) / (ended - begun),
    }


def _broker_seconds(services: Services) -> float:
    """Return the broker's processor seconds."""
    fields = Path(f"/proc/{services.node.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
