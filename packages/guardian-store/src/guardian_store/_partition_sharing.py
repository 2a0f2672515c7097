"""Plan which worker gets which partitions, and define the interface for leases on partitions.

Each worker plans its own share. If two workers see different states, the leases decide: only one worker at a time can
lease a partition. Leases are kept by the store (``_leases.py``) or by ZooKeeper (``_zookeeper.py``).
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

VALID_FRACTION = 2 / 3
"""A worker trusts its own leases for this part of their duration after a renewal.

The rest allows for clocks of different speeds and for the propagation of heartbeats in a ZooKeeper ensemble.
"""

clock = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Return monotonic seconds that include the time when the process or machine was suspended."""


DEFAULT_DEPLOYMENT = "default"
"""The name of a worker's deployment of the store, if it has only one."""


class Partition(NamedTuple):
    """A partition of a queue in one of a worker's deployments."""

    deployment: str
    queue: str
    number: int


class CoordinationError(Exception):
    """Base class of the errors of a ``Coordination``."""


class CoordinationUnavailable(CoordinationError):
    """The store or ZooKeeper is unreachable. This worker's leases may still be valid."""


class LeasesLost(CoordinationError):
    """This worker's leases expired, and others may have its partitions. It must join again."""


class Plan(NamedTuple):
    """The partitions to release and acquire for a fair share."""

    release: list[Partition]
    acquire: list[Partition]
    """Free partitions in the order to try, of which at most ``max_acquire`` are acquired."""
    max_acquire: int


def plan_share(
    partitions: Collection[Partition], workers: Sequence[object], me: object, holders: Mapping[Partition, object]
) -> Plan:
    """Plan the fair share of the worker ``me``. A partition is free if none of the workers is its holder.

    ``workers`` are in the order of joining. Shares differ by at most one, and earlier workers get the larger ones. So
    when a worker leaves, no other share shrinks, and when one joins, no share grows: partitions move only if they must.
    Sorting by hash spreads the partitions of one queue over the workers.
    """
    wanted, live = set(partitions), set(workers)
    mine = sorted((one for one in wanted if holders.get(one) == me), key=_hash)
    rank = list(workers).index(me)
    missing = len(wanted) // len(workers) + (rank < len(wanted) % len(workers)) - len(mine)
    if missing < 0:
        return Plan(mine[missing:], [], 0)
    free = [one for one in wanted if holders.get(one) not in live] if missing else []
    # Workers begin at different partitions, so that they rarely compete.
    free.sort(key=_hash)
    begin = len(free) * rank // len(workers)
    return Plan([], free[begin:] + free[:begin], missing)


def _hash(partition: Partition) -> bytes:
    return blake2b(repr(tuple(partition)).encode(), digest_size=8).digest()


class Coordination(ABC):
    """One worker's view of the workers of a consumer and of their leases in one deployment.

    The worker's heartbeat thread may call ``renew`` at any time. Leases expire ``seconds`` after the last heartbeat.
    The worker notices before the others: it uses a partition only while ``leases_valid``, and otherwise calls ``renew``
    first.

    Every method may raise ``CoordinationUnavailable``, and after ``join`` also ``LeasesLost``.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.leased: set[Partition] = set()
        """This worker's partitions. Only its main thread changes them."""
        self.leases_valid_until = 0.0
        """The time by ``clock`` before which no other worker can have them."""
        self._renew_lock = threading.Lock()

    @property
    def leases_valid(self) -> bool:
        return clock() < self.leases_valid_until

    def join(self) -> None:
        """Join with a new id and without partitions."""
        with self._renew_lock:
            self.leases_valid_until = 0.0
            self.leased = set()
            begun = clock()
            self._join()
            self.leases_valid_until = begun + self.seconds * VALID_FRACTION

    def renew(self) -> None:
        """Send a heartbeat and renew the leases.

        Raises LeasesLost if they expired, and CoordinationUnavailable if the answer is missing or too late to rely on.
        """
        with self._renew_lock:
            begun = clock()
            try:
                self._renew()
            except LeasesLost:
                self.leases_valid_until = 0.0
                raise
            self.leases_valid_until = begun + self.seconds * VALID_FRACTION
            if not self.leases_valid:
                raise CoordinationUnavailable(f"the renewal took too long: {clock() - begun:.1f} s")

    def leave(self) -> None:
        """Release everything and leave. Never raise: after a failure the leases expire."""
        with self._renew_lock:
            self.leases_valid_until = 0.0
            self.leased = set()
            self._leave()

    @abstractmethod
    def plan(self, partitions: Collection[Partition]) -> Plan:
        """Fetch the workers and leases, and plan this worker's share of these partitions.

        The plan also releases leased partitions that are not among them.
        """

    @abstractmethod
    def release(self, partitions: Collection[Partition]) -> None:
        """Release the leases of these partitions."""

    @abstractmethod
    def acquire(self, planned: Plan) -> None:
        """Lease the planned partitions that are still free."""

    @abstractmethod
    def _join(self) -> None: ...

    @abstractmethod
    def _renew(self) -> None: ...

    @abstractmethod
    def _leave(self) -> None: ...


class PinnedPartitions(Coordination):
    """Partitions that this worker has whatever others do."""

    def __init__(self, partitions: Collection[Partition]) -> None:
        super().__init__(math.inf)
        self._pinned = set(partitions)

    def plan(self, partitions: Collection[Partition]) -> Plan:
        """Plan to have the pinned ones of these partitions."""
        existing = self._pinned & set(partitions)
        return Plan(sorted(self.leased - existing), sorted(existing - self.leased), len(existing))

    def release(self, partitions: Collection[Partition]) -> None:
        self.leased -= set(partitions)

    def acquire(self, planned: Plan) -> None:
        self.leased |= set(planned.acquire)

    def _join(self) -> None:
        """Nobody else is asked."""

    _renew = _leave = _join
