"""How long a message with a high priority takes to be handled, while 100,000 with a low one wait before it.

Beside the same consumer with nothing else to do, the broker's own priorities, and naive polling; with callbacks that
wait, that keep the processor busy, and that do nothing.
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
"""How long it is between two high ones, on average."""

BUSY_INTERVAL_SECONDS = 0.012
"""The same where callbacks are busy: high ones alone are not to be what keeps the processor so."""

CATCH_UP_TIMEOUT_SECONDS = 30.0
"""How long it may take until the last high ones are handled."""

ROUNDS = 5
MAX_RATIO = 3.0

IDLE, FULL, SATURATED = "bench_priority_idle", "bench_priority_full", "bench_priority_saturated"
"""The exchanges: what waits in one's queues is there for the next round."""

KEY = "orders"
RANGES = "0-4,5-9"

AGEING_SECONDS = 1.0
SATURATED_SECONDS = 8.0
SATURATING = 20_000
SLOW_WORK_SECONDS = 0.04
"""So long that it is the threads that are too few, and not the processor."""

SETTINGS = {"ranges": RANGES, "broker": BROKER}


class Case(NamedTuple):
    """A way to consume. ``work``: seconds that a callback takes on average; ``how``: whether it sleeps or is busy.

    ``most``: the target, of the p99 as a multiple of that with nothing low waiting. ``every``: seconds from one high
    message to the next.
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
    # Twenty that contend for the interpreter's lock leave the connection's thread one turn in twenty, of 5 ms each.
    Case("ranges, 2 ms busy", "ranges", 0.002, "busy", interval=BUSY_INTERVAL_SECONDS),
    Case("ranges, 2 ms busy, prefetch 1", "ranges", 0.002, "busy", 1, MAX_RATIO, BUSY_INTERVAL_SECONDS),
)


def measure(services: Services) -> list[Figure]:
    """Measure each in turn, round after round: with nothing low waiting, and right before or after that with all of it.

    The p99 is that of each round's high messages; the floor is the same consumer with nothing low to do.
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
    """Measure how long a low message waits for its turn while high ones without end wait too."""
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
    """Return the names of the queues of low messages and of high ones."""
    queue = settings.names.queue(KEY)
    return (priority_queue(queue),) * 2 if settings.priorities == BROKER else (queue, level_queue(queue, 1))


def _ready(channel: Any, queue: str) -> int:
    count: int = channel.queue_declare(queue, passive=True).method.message_count
    return count


def _prepare(settings: Settings, low: int, high: int = 0) -> None:
    """Have the consumer declare and bind its queues, and so many messages wait in them."""
    consumer = Consumer(settings, KEY, lambda message: None)
    consumer.start()
    while not consumer.connected:
        time.sleep(0.01)
    consumer.close()
    with Publisher(settings) as publisher, pika.BlockingConnection(settings.parameters) as connection:
        channel = connection.channel()
        for priority, number, queue in zip((LOW, HIGH), (low, high), _queues(settings), strict=True):
            message = publisher.prepare(0, KEY, priority=priority)
            for _ in range(number - _ready(channel, queue)):
                channel.basic_publish(settings.exchange, message.routing_key, message.body, message.properties)
            while _ready(channel, queue) < number:
                time.sleep(0.1)


class _Child:
    """The consumer, in a process of its own."""

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
        """End it, and return of each message the number (0 of a low one), and when it was published and handled."""
        out, _ = self._process.communicate("end\n", timeout=120)
        if self._process.returncode:
            self._fail()
        handled: list[tuple[int, float, float]] = json.loads(out)
        return handled

    def _fail(self) -> None:
        self._process.kill()
        _, errors = self._process.communicate()
        raise ChildError(f"the consumer of priorities failed. It said:\n{errors[-4000:]}")


def _latencies(services: Services, case: Case, low: int) -> dict[str, float]:
    """Publish high messages now and then, and return how long it took until they were handled, in microseconds."""
    settings = _settings(services, case.kind, FULL if low else IDLE)
    _prepare(settings, low)
    child = _Child(settings, case)
    with Publisher(settings) as publisher, pika.BlockingConnection(settings.parameters) as connection:
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
    """Have both levels full, consume for a while, and return how often and how rarely low ones had their turn."""
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
    """Return how many seconds of the processor the broker has used."""
    fields = Path(f"/proc/{services.node.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
