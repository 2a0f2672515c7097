"""Locks of accounts and vhosts on the broker: one process at a time changes a name.

A lock is a lease that is renewed before each request to the broker and outlasts any request. One that a crash leaves
behind expires. Its row is deleted when it is released, as names are many.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from typing import Any, cast

from django.conf import settings
from django.db import DatabaseError

from core.leases import HeldLease, is_held
from core.models import Lease
from rabbit.management import BODY_READ_TIMEOUTS, Management

logger = logging.getLogger(__name__)

RENEW_INTERVAL_SECONDS = 10.0
"""A lock is looked at before each request, and prolonged this often."""

SLACK_SECONDS = 30
"""For all that isn't waiting for the broker: connecting, the database, and what was not prolonged just now."""

POLL_SECONDS = 0.05
"""How often a process that waits for a lock tries to take it."""

PREFIX = "lock "
"""With this the names of the leases begin that are locks."""


class LockTaken(Exception):
    """Another process changes this name right now, maybe since this one was too slow.

    It is no error of a lease: a sweep that changes an account must not take this for the loss of its own lease.
    """


class Lock(HeldLease):
    """The lock of a name on the broker."""

    def __init__(self, name: str) -> None:
        super().__init__(lease_name(name), lock_seconds())
        self._locked = name

    def acquire(self, wait: float = 0) -> None:
        """Take the lock. If another process has it, wait up to so many seconds for it.

        Raises:
            LockTaken: another process has it.
            DatabaseError: nothing can be written to the database.
        """
        until = time.monotonic() + wait
        while not self.take():
            if time.monotonic() >= until:
                raise LockTaken(self._text())
            time.sleep(POLL_SECONDS)

    def renew(self) -> None:
        """Make sure that the lock is still this process's, for as long as a request can take.

        Raises:
            LockTaken: it isn't; whatever has this name by now may be another owner's.
        """
        if time.monotonic() - self._written_at < RENEW_INTERVAL_SECONDS:
            is_ours = self._mine().exists()
        else:
            is_ours = self._write(self._mine())
        if not is_ours:
            raise LockTaken(self._text())

    def renewing_client(self, management: Management) -> Management:
        """Return this client so that the lock is renewed before each of its requests, and none is made without it."""
        return cast("Management", _Renewing(management, self))

    def release(self) -> None:
        """Give up the lock. One that another process has by now stays.

        What was done is done, so a database that is away now is no error: the lock expires.
        """
        try:
            Lease.objects.filter(name=self.name, holder=self.holder).delete()
        except DatabaseError as error:
            logger.warning("The lock of '%s' could not be released, and expires: %s", self._locked, error)

    def _text(self) -> str:
        return f"Somebody is changing '{self._locked}' right now; try again in some minutes."


class _Renewing:
    """A management client that renews the lock at each call. Its methods make one request each."""

    def __init__(self, management: Management, lock: Lock) -> None:
        self._management = management
        self._lock = lock

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._management, name)

        def renewed(*args: Any, **kwargs: Any) -> Any:
            self._lock.renew()
            return method(*args, **kwargs)

        return renewed


@contextlib.contextmanager
def lock(name: str, wait: float = 0) -> Iterator[Lock]:
    """Lock a name on the broker, so that no other process creates, changes or removes it at the same time.

    If another process has it, wait up to ``wait`` seconds for it. What was read of the account before may be out of
    date: read it again.

    Raises:
        LockTaken: another process has it.
    """
    lock = Lock(name)
    lock.acquire(wait)
    try:
        yield lock
    finally:
        lock.release()


def locked_names(names: Collection[str]) -> list[str]:
    """Return those of these names that are locked. One statement."""
    by_lease = {lease_name(name): name for name in names}
    leases = Lease.objects.filter(is_held(lock_seconds()), name__in=by_lease).values_list("name", flat=True)
    return sorted(by_lease[lease] for lease in leases)


def lease_name(name: str) -> str:
    """Return the name of the lease that is the lock of this name on the broker."""
    return f"{PREFIX}{name}"


def lock_seconds() -> float:
    """Return how long a lock lasts that isn't renewed: longer than a request takes, and its only repetition.

    Each may wait for a connection, for being sent, for the answer's first piece, as often as that for its body, and for
    the piece of the body that comes too late.
    """
    return 2 * (4 + BODY_READ_TIMEOUTS) * float(settings.GUARDIAN_BROKER_TIMEOUT_SECONDS) + SLACK_SECONDS
