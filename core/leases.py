"""One at a time: a lease that expires, taken by a conditional update.

The clock is the database's, so that machines needn't agree about the time. A lease is free when it has expired, and
when it was taken before the clock was set back (:func:`max_remaining`).
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from core.models import Lease

SECONDS = 90.0
"""How long a lease lasts unless it is renewed: longer than any step of a pass between two renewals."""

CLOCK_SLACK_SECONDS = 60
"""How far the clocks of two processes may differ. PostgreSQL's time of a statement that waited is that of its start."""


class LeaseTaken(Exception):
    """Another process has the lease."""


class LeaseLost(Exception):
    """The lease expired, as after a long stop. Another process may have it, so nothing more may be done under it."""


def is_held(seconds: float = SECONDS) -> Q:
    """Return the condition that a process has a lease, which lasts this long unless it is renewed."""
    return Q(holder__isnull=False, expires_at__gt=Now(), expires_at__lte=Now() + max_remaining(seconds))


def max_remaining(length: float) -> timedelta:
    """Return the longest time for which a lease of this length, in seconds, can still last.

    A lease that expires later was taken before the clock was set back. Without this limit, a lease that a crash left
    behind would last longer by as much as the clock was set back.
    """
    return timedelta(seconds=length + CLOCK_SLACK_SECONDS)


class HeldLease:
    """A lease that this process has."""

    def __init__(self, name: str, seconds: float = SECONDS) -> None:
        self.name = name
        self.holder = uuid.uuid4()
        self._seconds = seconds
        self._written_at = 0.0

    def take(self) -> bool:
        """Take the lease if it is free, and return whether it was."""
        if self._write(self._free()):
            return True
        Lease.objects.bulk_create([Lease(name=self.name)], ignore_conflicts=True)
        return self._write(self._free())

    def renew(self) -> None:
        """Make the lease last its whole length again.

        Raises:
            LeaseLost: it expired; whatever was about to be done must not be done.
        """
        if not self._write(self._mine()):
            raise LeaseLost(f"the lease '{self.name}' ran out while it was in use; the next pass goes on from here")

    def renew_if_due(self) -> None:
        """Renew the lease if a third of it has gone by.

        Raises:
            LeaseLost: it expired.
        """
        if time.monotonic() - self._written_at > self._seconds / 3:
            self.renew()

    def release(self) -> None:
        """Let the next one have it."""
        Lease.objects.filter(name=self.name, holder=self.holder).update(holder=None)

    def _free(self) -> QuerySet[Lease]:
        return Lease.objects.filter(~is_held(self._seconds), name=self.name)

    def _mine(self) -> QuerySet[Lease]:
        return Lease.objects.filter(name=self.name, holder=self.holder, expires_at__gt=Now())

    def _write(self, rows: QuerySet[Lease]) -> bool:
        self._written_at = time.monotonic()
        return bool(rows.update(holder=self.holder, expires_at=Now() + timedelta(seconds=self._seconds)))


@contextmanager
def lease(name: str) -> Iterator[HeldLease]:
    """Have the lease of this name for a while.

    Raises:
        LeaseTaken: another process has it.
    """
    held = HeldLease(name)
    if not held.take():
        raise LeaseTaken(name)
    try:
        yield held
    finally:
        held.release()
