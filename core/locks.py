"""One at a time: whoever changes an account on the broker holds its name meanwhile.

A hold that a crash leaves behind runs out by itself. One that its holder still needs doesn't: it is renewed before each
request to the broker, and lasts longer than any request can take.
"""

import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

from django.conf import settings
from django.core.cache import cache
from django.db import DatabaseError
from django.utils import timezone

from core import limits
from rabbit.management import BODY_READ_TIMEOUTS, Management

logger = logging.getLogger(__name__)

TOUCHED_EVERY = timedelta(seconds=10)
"""A holder looks before each request whether the hold is still its own, and prolongs it this often."""

SLACK_SECONDS = 30
"""For all that isn't waiting for the broker: connecting, the database, and what was not prolonged just now."""

CLOCK_SLACK_SECONDS = 60
"""How far the clocks of two processes may differ. PostgreSQL's time of a statement that waited is that of its start."""

POLL_SECONDS = 0.05
"""How often somebody who waits for a name looks whether it is free."""

PREFIX = "hold-"
"""With this the names of all holds in the cache begin."""


class Taken(Exception):
    """Somebody else is changing this account right now, maybe since this holder was too slow."""


class Hold:
    """What its holder has of an account's name."""

    def __init__(self, username: str) -> None:
        self._username = username
        self._key = key_of(username)
        self._token = _token(secrets.token_hex(16))
        self._touched_at = timezone.now()

    def take(self, wait: float = 0) -> None:
        """Begin to hold the name. Where somebody holds it, wait up to so many seconds for them to be done.

        Raises:
            Taken: somebody holds it.
            OperationalError: nothing can be written to the database.
        """
        until = time.monotonic() + wait
        while not limits.add(self._key, self._token, seconds()):
            self._shorten_lease_of_later_clock()
            if time.monotonic() >= until:
                raise self._taken()
            time.sleep(POLL_SECONDS)
        self._touched_at = timezone.now()

    def renew(self) -> None:
        """Make sure that the name is still held, and for as long as a request can take.

        Raises:
            Taken: it isn't; whatever there is under this name may be somebody else's by now.
        """
        if not self._is_ours():
            raise self._taken()
        now = timezone.now()
        if now - self._touched_at >= TOUCHED_EVERY:
            if not cache.touch(self._key, seconds()):
                raise self._taken()
            self._touched_at = now

    def renewed_by(self, management: Management) -> Management:
        """Return this client so that the hold is renewed before each of its requests, and none is made without it."""
        return cast("Management", _Renewing(management, self))

    def release(self) -> None:
        """Hold the name no longer; where another holds it by now, that stays.

        What was done is done, so a database that is away now is no error: the hold runs out by itself.
        """
        try:
            if self._is_ours():
                cache.delete(self._key)
        except DatabaseError as error:
            logger.warning("The hold of '%s' could not be released, and runs out by itself: %s", self._username, error)

    def _shorten_lease_of_later_clock(self) -> None:
        """Let a lease that was taken before the clock was set back expire as if it were taken now.

        A holder that still runs loses it at its next request. The request under way has its whole time.
        """
        _, _, expires_at = str(cache.get(self._key) or "").partition(" ")
        if expires_at and float(expires_at) > time.time() + max_remaining(seconds()).total_seconds():
            cache.set(self._key, _token("nobody"), seconds())

    def _is_ours(self) -> bool:
        return bool(cache.get(self._key) == self._token)

    def _taken(self) -> Taken:
        return Taken(f"Somebody is changing '{self._username}' right now; try again in some minutes.")


class _Renewing:
    """A management client that renews the hold at each call. Its methods make one request each."""

    def __init__(self, management: Management, hold: Hold) -> None:
        self._management = management
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._management, name)

        def renewed(*args: Any, **kwargs: Any) -> Any:
            self._hold.renew()
            return method(*args, **kwargs)

        return renewed


@contextlib.contextmanager
def held(username: str, wait: float = 0) -> Iterator[Hold]:
    """Hold an account's name, so that nobody else makes, changes or removes it on the broker at the same time.

    Where somebody holds it, they get up to ``wait`` seconds to be done.

    What was read of the account before may be out of date: read it again.

    Raises:
        Taken: somebody holds it.
    """
    hold = Hold(username)
    hold.take(wait)
    try:
        yield hold
    finally:
        hold.release()


def key_of(username: str) -> str:
    """Return the name of the hold in the cache, which not every account's name can be."""
    return f"{PREFIX}{hashlib.sha256(username.encode()).hexdigest()}"


def max_remaining(length: float) -> timedelta:
    """Return the longest time for which a lease of this length, in seconds, can still last.

    A lease that expires later was taken before the clock was set back. Without this limit, a lease that a crash left
    behind would last longer by as much as the clock was set back.
    """
    return timedelta(seconds=length + CLOCK_SLACK_SECONDS)


def _token(holder: str) -> str:
    return f"{holder} {time.time() + seconds():.0f}"


def seconds() -> float:
    """Return how long a hold lasts that isn't renewed: longer than a request takes, and its only repetition.

    Each may wait for a connection, for being sent, for the answer's first piece, as often as that for its body, and for
    the piece of the body that comes too late.
    """
    return 2 * (4 + BODY_READ_TIMEOUTS) * float(settings.GUARDIAN_BROKER_TIMEOUT_SECONDS) + SLACK_SECONDS
