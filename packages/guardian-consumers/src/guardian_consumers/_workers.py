"""The worker threads that run callbacks, and their rate limit.

The I/O thread wakes a worker for a delivery, and this worker wakes the next one if more deliveries wait. So at most one
worker is being woken at any time, and a blocking callback doesn't delay the next worker.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from guardian_consumers._connection import ConsumerConnection
from guardian_consumers._delivery import Delivery
from guardian_consumers._source import DeliveryBuffer, Limiter

logger = logging.getLogger(__name__)

LIMITER_TIMEOUT_SECONDS = 0.5
"""Timeout of one call to the limiter, and so the longest delay of a shutdown."""


class RateLimited:
    """Takes waiting deliveries at the rate of a limiter, one worker at a time.

    While the limiter has no token for longer than ``hold_seconds``, the connection is paused, so that no delivery waits
    in memory. This avoids repeated requeues, which count toward a quorum queue's delivery limit.
    """

    def __init__(self, connection: ConsumerConnection, limiter: Limiter, hold_seconds: float) -> None:
        self._connection = connection
        self._limiter = limiter
        self._hold_seconds = hold_seconds
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of waiting deliveries, plus one while paused, so that a worker calls the limiter."""
        return len(self._connection.waiting) + self._connection.paused

    def take(self) -> Delivery | None:
        """Wait for a token and take a delivery. Return None if either is missing."""
        with self._lock:
            if not len(self):
                return None
            seconds = self._limiter.take(LIMITER_TIMEOUT_SECONDS)
            if seconds > 0:
                if seconds > self._hold_seconds and not self._connection.paused:
                    self._connection.set_paused(True)
                return None
            if self._connection.paused:
                self._connection.set_paused(False)
            delivery = self._connection.waiting.take()
            if delivery is None:
                # The connection was lost or just resumed. A kept token would add to those that the limiter gains until
                # the next delivery.
                self._limiter.give_back()
            return delivery


class Workers:
    """Up to ``threads`` threads, started on demand, that take deliveries from ``waiting`` and ``handle`` them.

    If ``waiting`` or ``handle`` raises, ``failed`` is called in the worker's thread, which ends.
    """

    def __init__(
        self,
        threads: int,
        waiting: DeliveryBuffer | RateLimited,
        handle: Callable[[Delivery], Any],
        name: str,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.threads = threads
        self._waiting = waiting
        self._handle = handle
        self._name = name
        self._failed = failed
        self._lock = threading.Lock()
        self._idle: list[threading.Lock] = []
        self._started: list[threading.Thread] = []
        self._waking = False
        self._ending = threading.Event()

    def wake(self) -> None:
        """Wake or start a worker if deliveries wait. Any thread may call this; it doesn't block."""
        if self._waking:
            return  # the waking worker wakes the next one
        with self._lock:
            if self._waking or self._ending.is_set() or not len(self._waiting):
                return
            if self._idle:
                self._waking = True
                self._idle.pop().release()
                return
            if len(self._started) >= self.threads:
                return  # busy workers take the next deliveries
            self._waking = True
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._started) + 1}", daemon=True)
            self._started.append(thread)
        thread.start()

    def end(self) -> None:
        """Stop taking deliveries. Running callbacks continue."""
        with self._lock:
            self._ending.set()
            while self._idle:
                self._idle.pop().release()

    def wait(self, until: float | None, give_up: Callable[[], bool]) -> bool:
        """Wait for the threads to finish after `end`; see `join_threads`."""
        return join_threads(self._started, until, give_up)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            logger.exception("%s: a worker failed", self._name)
            self._waking = False  # this worker may have been the waking one
            self._failed(error)

    def _work(self) -> None:
        asleep = threading.Lock()
        asleep.acquire()
        while not self._ending.is_set():
            delivery = self._waiting.take()
            if delivery is None:
                with self._lock:
                    # Reset before reading the length: a delivery added afterwards then wakes a worker.
                    self._waking = False
                    if len(self._waiting) or self._ending.is_set():
                        self._waking = True  # this worker continues
                        continue
                    self._idle.append(asleep)
                asleep.acquire()
                continue
            self._waking = False
            if len(self._waiting):
                self.wake()
            self._handle(delivery)


def join_threads(threads: Sequence[threading.Thread], until: float | None, give_up: Callable[[], bool]) -> bool:
    """Wait for threads to finish. Return False if they haven't at the time ``until``, or once ``give_up()`` is true."""
    for thread in threads:
        while thread.is_alive():
            if give_up() or (until is not None and time.monotonic() >= until):
                return False
            thread.join(0.1)
    return True
