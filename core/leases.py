"""Leases: locks with an expiry, taken by a conditional UPDATE.

The clock is the database's, so that the machines' clocks don't matter. A lease is free if it has expired, or if it was
taken before the clock was set back.

If the database is down when a process wants to release a lease, the process releases it when it next takes one.
"""

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from django.db import Error
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from core.models import Lease

logger = logging.getLogger(__name__)

LEASE_SECONDS = 90.0
"""The length of a lease without renewal: longer than any step of a pass between two renewals."""

CLOCK_SLACK_SECONDS = 60
"""The tolerated difference of clock readings. PostgreSQL's time in a statement that waited is that of its start."""

_unreleased: "set[HeldLease]" = set()
"""The leases of this process that it could not release."""


class LeaseTaken(Exception):
    """Another process has the lease."""


class LeaseLost(Exception):
    """The lease expired, such as after a long pause of the process. Another process may have it, so stop the work."""


def is_held(seconds: float = LEASE_SECONDS) -> Q:
    """Return the condition that a process has a lease of this length.

    A lease that expires later was taken before the clock was set back. Otherwise the lease of a crashed process would
    last longer by that difference.
    """
    latest = Now() + timedelta(seconds=seconds + CLOCK_SLACK_SECONDS)
    return Q(holder__isnull=False, expires_at__gt=Now(), expires_at__lte=latest)


def holders() -> QuerySet[Lease, uuid.UUID | None]:
    """Return the holders of all leases that are held, as a subquery."""
    return Lease.objects.filter(is_held()).values_list("holder", flat=True)


class HeldLease:
    def __init__(self, name: str, seconds: float = LEASE_SECONDS) -> None:
        self.name = name
        self.holder = uuid.uuid4()
        self._seconds = seconds
        self._written_at = 0.0

    def take(self) -> bool:
        for lease in list(_unreleased):
            _unreleased.discard(lease)
            lease.release()
            if lease in _unreleased:  # the database is still down
                break
        if self._write(self._free()):
            return True
        Lease.objects.bulk_create([Lease(name=self.name)], ignore_conflicts=True)
        return self._write(self._free())

    def renew(self) -> None:
        """Extend the lease to its whole length. Raises LeaseLost if it expired; then do not act."""
        if not self._write(self._mine()):
            raise LeaseLost(f"the lease '{self.name}' expired while it was in use; the next run continues from here")

    def renew_if_due(self) -> None:
        """Renew the lease if a third of its length has passed. Raises LeaseLost."""
        if time.monotonic() - self._written_at > self._seconds / 3:
            self.renew()

    def release(self) -> None:
        """Release the lease, unless another process has it now.

        Only log errors of the database: the work is done, and the lease is released later, or expires.
        """
        try:
            self._release(Lease.objects.filter(name=self.name, holder=self.holder))
        except Error as error:
            _unreleased.add(self)
            logger.warning("The lease '%s' could not be released yet: %s", self.name, error)

    def _release(self, rows: QuerySet[Lease]) -> None:
        rows.update(holder=None)

    def _free(self) -> QuerySet[Lease]:
        return Lease.objects.filter(~is_held(self._seconds), name=self.name)

    def _mine(self) -> QuerySet[Lease]:
        return Lease.objects.filter(name=self.name, holder=self.holder, expires_at__gt=Now())

    def _write(self, rows: QuerySet[Lease]) -> bool:
        self._written_at = time.monotonic()
        return bool(rows.update(holder=self.holder, expires_at=Now() + timedelta(seconds=self._seconds)))


@contextmanager
def lease(name: str) -> Iterator[HeldLease]:
    """Hold the lease of this name inside the ``with`` block. Raises LeaseTaken if another process has it."""
    held = HeldLease(name)
    if not held.take():
        raise LeaseTaken(name)
    try:
        yield held
    finally:
        held.release()
