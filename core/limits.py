"""Rate limits, counted by all processes together in Django's cache.

A limit applies to fixed windows of time, such as each full minute. Its actions in a window are divided into shares. A
process reserves a share in the cache with ``add``, and counts its actions in memory until the share is used up. So a
large limit needs few requests to the cache.

Each limit stands where its actions are counted: messages posted to the store in ``message_store/http/views.py``, events
in ``agents/events/publishing.py``, new tokens in ``accounts/access/tokens.py``, wrong keys in
``guardian_site/middleware.py``, sign-in codes in ``accounts/signing_in/code_limits.py``. A replay's rate
is a column of its row.
"""

import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.core.cache import cache
from django.db import OperationalError

from core.refusals import Refusal

SHARES_PER_WINDOW = 100
"""The approximate number of shares in a window. A higher limit is not exact: a process may keep an unused share."""

RETRY_SECONDS = 0.3
"""The timeout for retries of a write to the cache that fails without a reason."""

WINDOW_NAMES = {60: "a minute", 3600: "an hour"}
"""Names of the possible windows, by their length in seconds."""


@dataclass(frozen=True)
class RateLimit:
    """At most ``max_count`` actions in a window of ``seconds``, for each client, or no limit if it is 0.

    ``actions`` names them in the plural, such as "events".
    """

    actions: str
    max_count: int
    seconds: int


class RateLimitExceeded(Refusal):
    """A client exceeded a rate limit. ``seconds`` is the time to wait."""

    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, limit: RateLimit, seconds: int) -> None:
        super().__init__(
            f"Too many {limit.actions}: the limit is {limit.max_count} within {WINDOW_NAMES[limit.seconds]}. "
            f"Wait {seconds} seconds."
        )
        self.seconds = seconds


_left: dict[tuple[str, str], tuple[int, int]] = {}
"""The window and the remaining actions of this process's share, by ``RateLimit.actions`` and client."""
_lock = threading.Lock()


def consume(limit: RateLimit, client: str) -> None:
    """Count one action of a client, or raise RateLimitExceeded. ``client`` has letters, digits and ``.:_-`` only."""
    if not limit.max_count:
        return
    window = int(time.time() // limit.seconds)
    if _use_share(limit, client, window):
        return
    size = _reserve_share(limit, client, window)
    if size > 1:
        with _lock:
            share_window, left = _left.get((limit.actions, client), (window, 0))
            _left[limit.actions, client] = (window, size - 1 + (left if share_window == window else 0))


def _use_share(limit: RateLimit, client: str, window: int) -> bool:
    with _lock:
        share_window, left = _left.get((limit.actions, client), (window, 0))
        if share_window != window or not left:
            return False
        _left[limit.actions, client] = (window, left - 1)
        return True


def _reserve_share(limit: RateLimit, client: str, window: int) -> int:
    """Reserve a share for this process, and return its number of actions. Raises RateLimitExceeded."""
    size = max(1, limit.max_count // SHARES_PER_WINDOW)
    name = f"limit:{limit.actions.replace(' ', '-')}:{client}:{window}"
    shares = {f"{name}:{begin}": min(size, limit.max_count - begin) for begin in range(0, limit.max_count, size)}
    reserved = cache.get_many(shares)
    for key, share in shares.items():
        if key not in reserved and add(key, True, limit.seconds):
            return share
    raise RateLimitExceeded(limit, int((window + 1) * limit.seconds - time.time()) + 1)


def add(key: str, value: Any, seconds: float) -> bool:
    """Add a value to the cache for this time. Return False if the key has a value already.

    Raises OperationalError if the database can't be written. Django's database cache returns False in this case too.
    """
    until: float | None = None
    while until is None or time.monotonic() < until:
        if cache.add(key, value, seconds):
            return True
        if cache.get(key) is not None:
            return False
        # Either the existing value has just expired, or the database can't be written.
        until = until or time.monotonic() + RETRY_SECONDS
        time.sleep(RETRY_SECONDS / 30)
    raise OperationalError("The cache in the database can't be written.")
