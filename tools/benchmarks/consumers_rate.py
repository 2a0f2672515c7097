"""How exactly rates are kept by a token bucket, by four processes that share one, and by a consumer."""

import json
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pika

from guardian_consumers.rate import validate_rate
from tools.benchmarks.figures import Figure
from tools.benchmarks.services import PROJECT, ChildError, Services
from tools.redis import PrivateRedis

RATES = (50, 500, 5000)
SECONDS = 10.0
WARM_UP_SECONDS = 1.0
"""Buckets start empty, shared ones with small batches, and four processes don't start at the same moment."""

MAX_DEVIATION, MAX_DEVIATION_SHARED = 10_000, 20_000
"""Parts per million of the rate: 1 %, and 2 % for four processes."""

PROCESSES = 4
EXCHANGE = "bench_rate"
QUEUE = f"{EXCHANGE}_orders"


def measure(services: Services) -> list[Figure]:
    """Take tokens as fast as possible, and handle messages of a queue that is never empty.

    From the times of taking or handling it computes the deviation from the rate in ppm, and the largest excess over the
    rate in any interval, whose target is the burst. A bucket is full after three quarters of its burst. So if the
    machine suspends all takers for longer than that, here 75 ms, further tokens are lost, and the rate is missed.
    """
    url = f"{services.node.amqp_url}/%2F"
    figures = []
    with PrivateRedis() as redis:
        for rate in RATES:
            services.say(f"rates of {rate:,} a second, for {SECONDS:.0f} s each")
            where = f"{rate:,} a second"
            shared = {"rate": rate, "redis_url": redis.url, "name": str(rate)}
            consumer = {"rate": rate, "url": url, "exchange": EXCHANGE}
            _fill(url, int(rate * (SECONDS + 4 * WARM_UP_SECONDS)) + 100)
            for what, children, most in (
                ("one process", [{"rate": rate}], MAX_DEVIATION),
                ("four, one bucket", [shared] * PROCESSES, MAX_DEVIATION_SHARED),
                ("a consumer", [consumer], MAX_DEVIATION),
            ):
                times, processor = taken(children, SECONDS + 2 * WARM_UP_SECONDS)
                off, above = rate_deviation(times, rate), max_excess(times, rate)
                burst = validate_rate(rate, None)[1]
                figures += [
                    Figure(where, f"{what}: off it", "ppm", [off * 1_000_000], limit=most),
                    Figure(where, f"{what}: above, at most", "", [above], limit=burst),
                    Figure(where, f"{what}: longest without any", "ms", [_longest_gap(times) * 1000]),
                    Figure(where, f"{what}: processor, each", "ms/s", [one * 1000 for one in processor]),
                ]
    return figures


def taken(children: Iterable[dict[str, Any]], seconds: float) -> tuple[list[float], list[float]]:
    """Run a process for each of these arguments. Return the sorted times of all, and each one's processor seconds per
    second."""
    command = [sys.executable, "-m", "tools.benchmarks.consumers_rate_child"]
    started = [
        subprocess.Popen([*command, json.dumps({"seconds": seconds, **child})], cwd=PROJECT, stdout=subprocess.PIPE)
        for child in children
    ]
    times, processor = array("d"), []
    try:
        for process in started:
            output, _ = process.communicate(timeout=seconds + 60)
            if process.returncode != 0:
                raise ChildError(f"a taker of tokens ended with code {process.returncode}")
            its = array("d", output)
            processor.append(its.pop())
            times += its
    finally:
        for process in started:
            process.kill()
            process.wait()
    return sorted(times), processor


def rate_deviation(times: Sequence[float], rate: float, seconds: float = SECONDS) -> float:
    """Return the relative deviation from the rate in ``seconds`` after the warm-up."""
    begin = times[0] + WARM_UP_SECONDS
    count = sum(begin <= moment < begin + seconds for moment in times)
    return abs(count / (rate * seconds) - 1)


def max_excess(times: Sequence[float], rate: float) -> float:
    """Return the largest excess over the rate in any interval."""
    lowest, most = float("inf"), 0.0
    for number, moment in enumerate(times):
        behind = number - rate * moment
        lowest = min(lowest, behind)
        most = max(most, behind + 1 - lowest)
    return most


def _longest_gap(times: Sequence[float]) -> float:
    return max(after - before for before, after in pairwise(times))


def _fill(url: str, messages: int) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_delete(QUEUE)
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "classic"})
        properties = pika.BasicProperties(content_type="application/json")
        for _ in range(messages):
            channel.basic_publish("", QUEUE, b"{}", properties)
        while channel.queue_declare(QUEUE, passive=True).method.message_count < messages:
            time.sleep(0.02)
