"""Locks of Pulse users and vhosts on the broker: one process at a time changes a name.

A lock is a lease that is renewed before each request to the broker and outlasts the request. The lock of a crashed
process expires. The row is deleted on release, because there are many names.
"""

import contextlib
import time
from collections.abc import Collection, Iterator
from typing import Any, cast

from django.conf import settings
from django.db.models import QuerySet

from core.leases import HeldLease, is_held
from core.models import Lease
from rabbit.management import Management
from rabbit.requests.sending import BODY_READ_TIMEOUTS

RENEW_INTERVAL_SECONDS = 10.0
"""A lock is checked before each request, and renewed at this interval."""

SLACK_SECONDS = 30
"""For the time that is not spent waiting for the broker, and for the interval between renewals."""

POLL_SECONDS = 0.05
"""The interval at which a waiting process tries to take a lock."""

PREFIX = "lock "
"""The prefix of the locks' lease names."""


class LockTaken(Exception):
    """Another process is changing this name, possibly because this process was too slow.

    This is not an error of leases, so that a sweep doesn't mistake it for the loss of its own lease.
    """


class Lock(HeldLease):
    def __init__(self, name: str, seconds: float | None = None) -> None:
        super().__init__(lease_name(name), seconds or lock_seconds())
        self._locked = name

    def acquire(self, wait: float = 0) -> None:
        """Take the lock, after up to ``wait`` seconds if another process has it. Raises LockTaken after that."""
        until = time.monotonic() + wait
        while not self.take():
            if time.monotonic() >= until:
                raise LockTaken(self._text())
            time.sleep(POLL_SECONDS)

    def renew(self) -> None:
        """Raise LockTaken unless this process has the lock, and will have it for the duration of a request.

        Without it, another owner may have a Pulse user or vhost of this name now.
        """
        if time.monotonic() - self._written_at < RENEW_INTERVAL_SECONDS:
            is_ours = self._mine().exists()
        else:
            is_ours = self._write(self._mine())
        if not is_ours:
            raise LockTaken(self._text())

    def renewing_client(self, management: Management) -> Management:
        """Return a client that renews the lock before each request, and sends none without the lock."""
        return cast("Management", _Renewing(management, self))

    def _release(self, rows: QuerySet[Lease]) -> None:
        rows.delete()

    def _text(self) -> str:
        return f"Another request is changing '{self._locked}'; try again in a few minutes."


class _Renewing:
    """A management client that renews a lock before each call. Each method makes one request."""

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
    """Lock a name on the broker, so that no other process creates, changes or removes it.

    If another process has the lock, wait up to ``wait`` seconds, then raise LockTaken. Read the Pulse user's row again
    inside the block: it may have changed.
    """
    lock = Lock(name)
    lock.acquire(wait)
    try:
        yield lock
    finally:
        lock.release()


def locked_names(names: Collection[str]) -> list[str]:
    by_lease = {lease_name(name): name for name in names}
    leases = Lease.objects.filter(is_held(lock_seconds()), name__in=by_lease).values_list("name", flat=True)
    return sorted(by_lease[lease] for lease in leases)


def lease_name(name: str) -> str:
    return f"{PREFIX}{name}"


def lock_seconds() -> float:
    """Return the length of a lock without renewal: longer than a request and its retry.

    Each of the two may wait one broker timeout for a connection, for sending, and for the first part of the answer. The
    body may take ``BODY_READ_TIMEOUTS`` more, and one more for the part during which that limit passes.
    """
    return 2 * (4 + BODY_READ_TIMEOUTS) * float(settings.GUARDIAN_BROKER_TIMEOUT_SECONDS) + SLACK_SECONDS
