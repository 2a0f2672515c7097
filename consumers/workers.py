"""The threads that callbacks run in, and the door to them: where a limiter stands.

A thread is woken for a message by the connection's thread, and wakes the next one itself when it finds more waiting.
So at most one is on its way at any time, and callbacks that wait for something let the next thread start at once.

While callbacks take no time, a thread that is awake already takes the rest too: twenty that contend for the
interpreter's lock take half as much again of the processor (49 µs a message, and 32 with one). Whoever leaves the
others asleep for that has somebody look after `LOOKOUT_SECONDS` whether something still waits: a callback may be stuck.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from consumers.delivery import Delivery
from consumers.source import Limiter, Waiting

logger = logging.getLogger(__name__)

QUICK_SECONDS = 0.0005
"""A callback that takes less than this is not worth waking another thread for the next one."""

LOOKOUT_SECONDS = 0.002

DOOR_SECONDS = 0.5
"""For how long a limiter is waited for at once: how late a worker may see that it is to end."""


class Workers:
    """At most so many threads, started when they are needed, that take from ``waiting`` and ``handle`` what they took.

    ``hold`` is called when the limiter says that it takes longer than ``hold_seconds`` until the next message may be
    worked on: nothing should wait here meanwhile. A thread goes on asking the limiter, and when it has the token,
    ``read_on`` is called. So messages come again when they can be worked on, and aren't given back time after time:
    each time counts as a delivery, of which a quorum queue allows so many.
    ``later`` has a function called in so many seconds, by any thread; without it, every message that waits wakes a
    thread.
    ``failed`` is called when ``waiting``, ``handle`` or the limiter raises, in the thread that it happened in, which
    ends.
    """

    def __init__(
        self,
        threads: int,
        waiting: Waiting,
        handle: Callable[[Delivery], None],
        name: str,
        limiter: Limiter | None = None,
        hold: Callable[[], None] | None = None,
        read_on: Callable[[], None] | None = None,
        hold_seconds: float = 0,
        later: Callable[[float, Callable[[], None]], None] | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._threads = threads
        self._waiting = waiting
        self._handle = handle
        self._name = name
        self._limiter = limiter
        self._hold = hold
        self._read_on = read_on
        self._hold_seconds = hold_seconds
        self._later = later
        self._failed = failed
        self._quick = False
        self._lookout = False
        self._lock = threading.Lock()
        self._idle: list[threading.Lock] = []
        self._started: list[threading.Thread] = []
        self._waking = False
        self._door = threading.Lock()
        self._holding = False
        self._ending = threading.Event()

    def wake(self) -> None:
        """Have what waits taken as soon as a thread has time. Any thread may call this; it doesn't block."""
        if self._waking:
            return  # one is on its way, and wakes the next
        with self._lock:
            if self._waking or self._ending.is_set() or not len(self._waiting):
                return
            if self._quick and len(self._started) > len(self._idle):
                self._have_it_looked_after()
                return
            if self._idle:
                self._waking = True
                self._idle.pop().release()
                return
            if len(self._started) >= self._threads:
                return  # all are at work, and look for more when they are done
            self._waking = True
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._started) + 1}", daemon=True)
            self._started.append(thread)
        thread.start()

    def _have_it_looked_after(self) -> None:
        if not self._lookout and self._later is not None:
            self._lookout = True
            self._later(LOOKOUT_SECONDS, self._look)

    def _look(self) -> None:
        self._lookout = False
        if len(self._waiting):
            self._quick = False  # until a callback is quick again, one thread wakes the next
            self.wake()

    def end(self) -> None:
        """Take nothing more. What is at work goes on."""
        with self._lock:
            self._ending.set()
            while self._idle:
                self._idle.pop().release()

    def wait(self, until: float | None, give_up: Callable[[], bool]) -> bool:
        """After `end`: wait for the threads to finish; see `joined`."""
        return joined(self._started, until, give_up)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            logger.exception("%s: a worker failed", self._name)
            self._waking = False  # it may have been on its way
            self._failed(error)

    def _work(self) -> None:
        asleep = threading.Lock()
        asleep.acquire()
        while not self._ending.is_set():
            delivery = self._take()
            self._waking = False
            if delivery is None:
                with self._lock:
                    # Whoever puts something calls wake() after it: either they find this thread idle, or it finds that.
                    if len(self._waiting) or self._ending.is_set():
                        continue
                    self._idle.append(asleep)
                asleep.acquire()
                continue
            if len(self._waiting):
                self.wake()
            if self._later is None:
                self._handle(delivery)
                continue
            begun = time.monotonic()
            self._handle(delivery)
            self._quick = time.monotonic() - begun < QUICK_SECONDS

    def _take(self) -> Delivery | None:
        if self._limiter is None:
            return self._waiting.take()
        with self._door:
            while True:
                if self._ending.is_set() or not (len(self._waiting) or self._holding):
                    return None
                seconds = self._limiter.take(DOOR_SECONDS)
                if seconds <= 0:
                    break
                if seconds > self._hold_seconds and self._hold is not None and not self._holding:
                    self._holding = True
                    self._hold()
            self._go_on()
            delivery = self._waiting.take()
            if delivery is None:
                # The connection was lost in between, or is just reading on. A token that was kept for the next message
                # would come on top of what comes in until then.
                self._limiter.give_back()
            return delivery

    def _go_on(self) -> None:
        if self._holding and self._read_on is not None:
            self._holding = False
            self._read_on()


def joined(threads: Sequence[threading.Thread], until: float | None, give_up: Callable[[], bool]) -> bool:
    """Wait for these threads to finish; return False where they haven't by this moment, or ``give_up()``."""
    for thread in threads:
        while thread.is_alive():
            if give_up() or (until is not None and time.monotonic() >= until):
                return False
            thread.join(0.1)
    return True
