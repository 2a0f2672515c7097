"""Which worker gets which partitions, and what a worker needs of whoever keeps the count of them.

The plan is pure: each worker makes its own, of what it sees, and what two see differently is settled by the leases,
which are one worker's at a time. Leases are kept in the database (``leases.py``) or by ZooKeeper (``zookeeper.py``).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

VALID_FRACTION = 2 / 3
"""Of the seconds after which a silent worker counts as gone, the part for which it takes its own leases for granted.

The rest is for clocks that don't run alike, and for an ensemble of ZooKeepers to tell each other who was heard.
"""

clock = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Gives seconds that never go back, and that go on while this process or this machine is stopped."""


class Partition(NamedTuple):
    """A partition of a queue."""

    application: str
    queue: str
    number: int


class CoordinationError(Exception):
    """What keeps workers apart could not be used."""


class CoordinationUnavailable(CoordinationError):
    """It can't be reached. What this worker holds may still be its own."""


class LeasesLost(CoordinationError):
    """This worker counts as gone: others may have its partitions. It has to join anew."""


class Plan(NamedTuple):
    """What a worker is to do for its fair share."""

    release: list[Partition]
    acquire: list[Partition]
    """Those that are free, in the order in which to try them, and ``room`` of them at most."""
    max_acquire: int


def plan_share(
    partitions: Collection[Partition], workers: Sequence[object], me: object, holders: Mapping[Partition, object]
) -> Plan:
    """Return what ``me`` is to release and to take. Whose holder is none of the workers, or who has none, is free.

    ``workers`` are in the order in which they joined. The shares differ by one at most, and are larger for those who
    came first: so when a worker goes, nobody else's shrinks, and when one comes, nobody's grows. Nothing moves that
    needn't. Which ones are given is by their hash, so that the partitions of one queue don't stay together.
    """
    there, everyone = set(partitions), set(workers)
    mine = sorted((one for one in there if holders.get(one) == me), key=_mixed)
    rank = list(workers).index(me)
    room = len(there) // len(workers) + (rank < len(there) % len(workers)) - len(mine)
    if room < 0:
        return Plan(mine[room:], [], 0)
    free = [one for one in there if holders.get(one) not in everyone] if room else []
    # Each begins elsewhere, so that they don't all try the same ones.
    free.sort(key=_mixed)
    begin = len(free) * rank // len(workers)
    return Plan([], free[begin:] + free[:begin], room)


def _mixed(partition: Partition) -> bytes:
    return blake2b(repr(tuple(partition)).encode(), digest_size=8).digest()


class Coordination(ABC):
    """Knows the workers of an application's consumer, and which of them holds which partition.

    For one worker, whose other thread may call ``keep`` at any time. A worker that wasn't heard for ``seconds`` is gone
    for the others, and what it held is free. It knows so itself before they do: it does nothing with a partition unless
    ``sure``, by its own clock, and has ``keep`` ask otherwise.

    Every method may raise ``CoordinationUnavailable``, and after ``join`` also ``LeasesLost``.
    """

    def __init__(self, application: str, consumer: str, seconds: float) -> None:
        self.application = application
        self.consumer = consumer
        self.seconds = seconds
        self.leased: set[Partition] = set()
        """The partitions that this worker holds. The worker's own thread alone changes them."""
        self.leases_valid_until = 0.0
        """Until when, by ``clock``, nobody else can have what this worker holds."""
        self._renew_lock = threading.Lock()

    @property
    def leases_valid(self) -> bool:
        """Whether nobody else can have what this worker holds, by its own clock."""
        return clock() < self.leases_valid_until

    def join(self) -> None:
        """Be a worker from now on, under a name that never was, and hold nothing yet."""
        with self._renew_lock:
            self.leases_valid_until = 0.0
            self.leased = set()
            begun = clock()
            self._join()
            self.leases_valid_until = begun + self.seconds * VALID_FRACTION

    def renew(self) -> None:
        """Have it confirmed that this worker is there, and be sure of what it holds.

        Raises:
            LeasesLost: it counts as gone.
            CoordinationUnavailable: no answer came, or so late that it says nothing about now.
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
                raise CoordinationUnavailable(f"the answer took {clock() - begun:.1f} s, which is too long to go by it")

    def leave(self) -> None:
        """Hand over everything at once. It raises nothing: who can't be told finds out when the seconds are over."""
        with self._renew_lock:
            self.leases_valid_until = 0.0
            self.leased = set()
            self._leave()

    @abstractmethod
    def plan(self, partitions: Collection[Partition]) -> Plan:
        """Look who is there, and return what this worker is to do for its share of these partitions.

        What it holds of others, which aren't there any more, is among what it is to release.
        """

    @abstractmethod
    def release(self, partitions: Collection[Partition]) -> None:
        """Let others have these."""

    @abstractmethod
    def acquire(self, planned: Plan) -> set[Partition]:
        """Take what is planned, as far as nobody else was quicker, and return what is held now and wasn't before."""

    @abstractmethod
    def _join(self) -> None: ...

    @abstractmethod
    def _renew(self) -> None: ...

    @abstractmethod
    def _leave(self) -> None: ...
