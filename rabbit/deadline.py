"""How long somebody waits for the broker, whatever the timeouts of the clients that send the requests.

A page sets a limit around all that it does. Each client asks here how long its next request may take. Threads of
``ContextThreadPool`` share the limit of the thread that started them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class _Limit:
    """A limit that starts with the first request. ``renewed``: each answer starts it again."""

    def __init__(self, seconds: float, *, renewed: bool) -> None:
        self.seconds = seconds
        self.renewed = renewed
        self.until: float | None = None


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


@contextmanager
def limit(seconds: float, *, renewed: bool = False) -> Iterator[None]:
    """Limit the time that all requests to the broker take together, from the first one on.

    ``renewed``: limit the time without an answer instead, so that many requests may take longer together. A limit
    inside another replaces it.
    """
    before = _limit.set(_Limit(seconds, renewed=renewed))
    try:
        yield
    finally:
        _limit.reset(before)


def is_limited() -> bool:
    return _limit.get() is not None


def seconds_left(timeout: float) -> float:
    """Return the seconds that the next request may take: at most the client's timeout, or 0 if the limit is over."""
    current = _limit.get()
    if current is None:
        return timeout
    now = time.monotonic()
    if current.until is None:
        current.until = now + current.seconds
    return min(timeout, max(current.until - now, 0.0))


def record_answer() -> None:
    current = _limit.get()
    if current is not None and current.renewed:
        current.until = time.monotonic() + current.seconds
