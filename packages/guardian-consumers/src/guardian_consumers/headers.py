"""The headers of retried and parked messages, for programs that read these."""

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ATTEMPTS",
    "ERROR",
    "EXCHANGE",
    "FAILED_AT",
    "HEADERS_DROPPED",
    "KEPT_PREFIX",
    "MOVED",
    "QUEUE",
    "ROUTING_KEY",
    "TRACEBACK",
    "attempts_of",
]

ATTEMPTS = "consumer-attempts"
"""The number of failures."""
EXCHANGE = "consumer-exchange"
"""The exchange of the first publication."""
ROUTING_KEY = "consumer-routing-key"
"""The routing key of the first publication."""
QUEUE = "consumer-queue"
"""The physical queue of the consumer that wrote the headers."""
ERROR = "consumer-error"
"""The exception's class and text."""
TRACEBACK = "consumer-traceback"
"""The exception's traceback. Only parked messages have it."""
FAILED_AT = "consumer-failed-at"
"""Seconds since 1970, as a whole number."""
MOVED = "consumer-moved"
"""True if `move_priorities` moved the message."""
KEPT_PREFIX = "consumer-kept-"
"""Prefix for the names of removed properties and headers, which the broker would act on again."""
HEADERS_DROPPED = "consumer-headers-dropped"
"""True if the original headers were dropped, since they were too long or can't be encoded."""


def attempts_of(headers: Mapping[str, Any]) -> int:
    """Return how often a message failed, or 0 if the header is missing or invalid."""
    attempts = headers.get(ATTEMPTS)
    return attempts if type(attempts) is int and 0 < attempts < 2**31 else 0
