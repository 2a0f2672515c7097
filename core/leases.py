"""One at a time: a lease that expires, taken by a conditional update.

The clock is the database's, so that machines needn't agree about the time. A lease is free when it has expired, and
when it was taken before the clock was set back (`core.locks.max_remaining`).
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from core.locks import max_remaining
from core.models import Lease

SECONDS = 90
"""How long a lease lasts unless it is renewed: longer than any step of a pass between two renewals."""


class LeaseTaken(Exception):
    """Somebody else holds the lease."""


class LeaseLost(Exception):
    """The lease ran out, as after a long stop. Somebody else may have it, so nothing more may be done under it."""


def is_held() -> Q:
    """Return the condition that somebody holds a lease."""
    return Q(holder__isnull=False, expires_at__gt=Now(), expires_at__lte=Now() + max_remaining(SECONDS))


class HeldLease:
    """A lease that this process holds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holder = uuid.uuid4()
        self._written_at = 0.0

    def take(self) -> bool:
        """Take the lease where it is free, and return whether it was."""
        if self._write(Lease.objects.filter(~is_held(), name=self.name)):
            return True
        Lease.objects.bulk_create([Lease(name=self.name)], ignore_conflicts=True)
        return self._write(Lease.objects.filter(~is_held(), name=self.name))

    def renew(self) -> None:
        """Make the lease last its whole length again.

        Raises:
            LeaseLost: it ran out; whatever was about to be done must not be done.
        """
        if not self._write(Lease.objects.filter(name=self.name, holder=self.holder, expires_at__gt=Now())):
            raise LeaseLost(f"the lease '{self.name}' ran out while it was in use; the next pass goes on from here")

    def keep(self) -> None:
        """Renew the lease where a third of it has gone by.

        Raises:
            LeaseLost: it ran out.
        """
        if time.monotonic() - self._written_at > SECONDS / 3:
            self.renew()

    def release(self) -> None:
        """Let the next one have it."""
        Lease.objects.filter(name=self.name, holder=self.holder).update(holder=None)

    def _write(self, rows: QuerySet[Lease]) -> bool:
        self._written_at = time.monotonic()
        return bool(rows.update(holder=self.holder, expires_at=Now() + timedelta(seconds=SECONDS)))


@contextmanager
def lease(name: str) -> Iterator[HeldLease]:
    """Hold the lease of this name.

    Raises:
        LeaseTaken: somebody else holds it.
    """
    held = HeldLease(name)
    if not held.take():
        raise LeaseTaken(name)
    try:
        yield held
    finally:
        held.release()
