"""Take tokens, alone or as a consumer with a no-op callback, in its own process.

``python -m tools.benchmarks.consumers_rate_child '{"rate": 50, "seconds": 10, …}'`` writes the times of its tokens or
messages as doubles, by the machine's monotonic clock, and then its processor seconds per second.
"""

import json
import logging
import sys
import time
from array import array
from typing import Any

from guardian_consumers import Consumer, Settings, SharedTokenBucket, TokenBucket
from guardian_consumers.source import Limiter


def take(limiter: Limiter, seconds: float) -> "array[float]":
    """Take tokens for ``seconds``."""
    times = array("d")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if limiter.take(0.5) <= 0:
            times.append(time.monotonic())
    return times


def consume(url: str, exchange: str, rate: float, seconds: float) -> "array[float]":
    """Handle messages for ``seconds`` as a grown consumer."""
    times = array("d")
    settings = Settings(url, exchange, prefetch="grown", rate=rate)
    consumer = Consumer(settings, "orders", lambda message: times.append(time.monotonic()))
    consumer.start()
    consumer.wait(seconds)
    consumer.close()
    return times


def main(seconds: float, rate: float, burst: float | None = None, **more: Any) -> None:
    """Run a consumer with ``url`` and ``exchange``, or take tokens, from Redis with ``redis_url`` and ``name``."""
    if "url" in more:
        times = consume(more["url"], more["exchange"], rate, seconds)
    elif "redis_url" in more:
        times = take(SharedTokenBucket(rate, burst, **more), seconds)
    else:
        times = take(TokenBucket(rate, burst), seconds)
    times.append(time.process_time() / seconds)
    sys.stdout.buffer.write(times.tobytes())


if __name__ == "__main__":
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    main(**json.loads(sys.argv[1]))
