"""One taker of tokens, in a process of its own: by itself, or a consumer whose callback does nothing.

``python -m tools.benchmarks.consumers_rate_child '{"rate": 50, "seconds": 10, …}'`` writes the moments at which it had
a token or a message, as doubles of the clock that all processes of a machine have in common, and then how many seconds
of the processor it used in a second.
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
    """Take tokens for so long."""
    times = array("d")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if limiter.take(0.5) <= 0:
            times.append(time.monotonic())
    return times


def consume(url: str, exchange: str, rate: float, seconds: float) -> "array[float]":
    """Handle messages for so long, as a consumer that has grown."""
    times = array("d")
    settings = Settings(url, exchange, prefetch="grown", rate=rate)
    consumer = Consumer(settings, "orders", lambda message: times.append(time.monotonic()))
    consumer.start()
    consumer.wait(seconds)
    consumer.close()
    return times


def main(seconds: float, rate: float, burst: float | None = None, **more: Any) -> None:
    """Take as is asked for: by a consumer with ``url`` and ``exchange``, from Redis with ``redis_url`` and ``name``."""
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
