"""How often somebody may do something, counted by all processes together in Django's cache.

A limit holds for stretches of time that begin at the same moment for everybody. What may be done in one is cut into
shares. A process takes a share when it has used up the one before, so that a large limit costs next to nothing: the
cache is asked once for many. Which share is whose the cache decides (``add``), so that no two get the same.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

from django.core.cache import cache
from django.db import OperationalError

SHARES = 100
"""A stretch has about so many shares. A limit up to this is exact; past it a process may keep a share to itself."""

GONE_SECONDS = 0.3
"""For so long what can't be kept, and has nothing in its way, is tried again."""

STRETCHES = {60: "a minute", 3600: "an hour"}
"""How long stretches are, in seconds, and in words."""


@dataclass(frozen=True)
class RateLimit:
    """So many ``what`` in each stretch of so many seconds, for each of those who are counted; 0: any number."""

    what: str
    most: int
    seconds: int


class RateLimitExceeded(Exception):
    """Somebody did it more often than they may. The text says so; ``seconds`` is how long to wait."""

    def __init__(self, limit: RateLimit, seconds: int) -> None:
        super().__init__(
            f"These are too many {limit.what}: {limit.most} within {STRETCHES[limit.seconds]} are the most. "
            f"Wait {seconds} seconds."
        )
        self.seconds = seconds


_left: dict[tuple[str, str], tuple[int, int]] = {}
"""The stretch that this process has a share of, and how many are left of that; by what is limited, and who does it."""
_lock = threading.Lock()


def consume(limit: RateLimit, who: str) -> None:
    """Count one more that ``who`` does, who is known by letters, digits and ``.:_-``.

    Raises:
        RateLimitExceeded: they did as many as they may in this stretch of time.
    """
    if not limit.most:
        return
    stretch = int(time.time() // limit.seconds)
    if _use(limit, who, stretch):
        return
    size = _take_share(limit, who, stretch)
    if size > 1:
        with _lock:
            of, left = _left.get((limit.what, who), (stretch, 0))
            _left[limit.what, who] = (stretch, size - 1 + (left if of == stretch else 0))


def _use(limit: RateLimit, who: str, stretch: int) -> bool:
    """Use one of the share that this process has, and return whether there was one."""
    with _lock:
        of, left = _left.get((limit.what, who), (stretch, 0))
        if of != stretch or not left:
            return False
        _left[limit.what, who] = (stretch, left - 1)
        return True


def _take_share(limit: RateLimit, who: str, stretch: int) -> int:
    """Take a share for this process, and return how large it is.

    Raises:
        RateLimitExceeded: all are taken.
        OperationalError: nothing can be written to the database.
    """
    size = max(1, limit.most // SHARES)
    name = f"limit:{limit.what.replace(' ', '-')}:{who}:{stretch}"
    shares = {f"{name}:{begin}": min(size, limit.most - begin) for begin in range(0, limit.most, size)}
    taken = cache.get_many(shares)
    for key, of_share in shares.items():
        if key not in taken and add(key, True, limit.seconds):
            return of_share
    raise RateLimitExceeded(limit, int((stretch + 1) * limit.seconds - time.time()) + 1)


def add(key: str, value: Any, seconds: float) -> bool:
    """Keep a value in the cache for so many seconds, and return whether it is the first there.

    Raises:
        OperationalError: nothing can be written to the database. Django's cache in it calls that "not the first".
    """
    until: float | None = None
    while until is None or time.monotonic() < until:
        if cache.add(key, value, seconds):
            return True
        if cache.get(key) is not None:
            return False
        # What stood in the way has just gone, and the next may be faster.
        until = until or time.monotonic() + GONE_SECONDS
        time.sleep(GONE_SECONDS / 30)
    raise OperationalError("Nothing can be written to the cache in the database.")
