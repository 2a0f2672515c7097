"""A consumer: what people create and run, put together from the parts that its threads own.

The I/O thread owns the connection and its channels (`connection`). Each worker owns a message while its callback runs
(`workers`, `handler`). The thread that called `run` waits for a signal or an error, checks the time limit
(`time_limit`), and shuts down.

yapw's clients are not used for this. They acknowledge one by one, through a callback for each; have one channel; stop
for good when a queue is deleted or a channel closed; and stop at a body that can't be decoded. What is the same are the
names, the exchange, the encoding of bodies, and the meanings of halt and discard, so that publishers and consumers with
yapw and with this can be mixed.
"""

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from guardian_consumers.connection import ConsumerConnection
from guardian_consumers.decoding import DECODERS, Decoder
from guardian_consumers.errors import ConsumerError
from guardian_consumers.handler import Handler
from guardian_consumers.link import CLOSE_SECONDS
from guardian_consumers.message import Message
from guardian_consumers.outcomes import Outcome
from guardian_consumers.publisher import Publisher
from guardian_consumers.settings import Settings
from guardian_consumers.source import DeliveryBuffer, Limiter, Source
from guardian_consumers.time_limit import TimeLimit
from guardian_consumers.workers import RateLimited, Workers, join_threads

logger = logging.getLogger(__name__)

Callback = Callable[[Message], object]
Listener = Callable[[Message, Outcome | None, float], None]
"""Called after each message with its outcome, and with the seconds that the callback took. None: it failed after it was
acknowledged."""

FORCED_CLOSE_SECONDS = 0.5
"""How long the broker has to answer a goodbye after a second signal."""

CHECK_SECONDS = 0.5
"""The interval of the checks for callbacks and deliveries that take too long."""


class Consumer:
    """Reads a source, and calls the callback with each message, in threads.

    ``source`` is a queue's key, plain or with priorities as the settings say, or a `Source`. `run` it, or several with
    `run_all`.
    ``figures`` and ``counts`` say how it does; ``listeners`` are called in the worker's thread after each message.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source | str,
        callback: Callback,
        *,
        limiter: Limiter | None = None,
        decoders: Mapping[str, Decoder] | None = None,
        publisher: Publisher | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.settings = settings
        self.names = settings.names
        self.source: Source = settings.source(source) if isinstance(source, str) else source
        self.publisher = publisher or Publisher(settings)
        self.counts: Counter[str] = Counter()
        """How many messages by what became of them (`Outcome`'s values); and "late": failed after they were
        acknowledged; "void": their connection was lost before, so that they come again; "unpublished": put back, as the
        broker took no message for a delay or the parking queue; "reconnected"."""
        self.listeners = list(listeners)
        self._counting = threading.Lock()
        self._own_publisher = publisher is None
        self._ended: SimpleQueue[ConsumerError | None] = SimpleQueue()
        limiter = limiter or settings.limiter(self.names.queue(self.source.key))
        self._connection = connection = ConsumerConnection(self, limiter)
        self._handler = handler = Handler(self, connection, callback, {**DECODERS, **(decoders or {})})
        self._time_limit = TimeLimit(self, handler)
        waiting: DeliveryBuffer | RateLimited = connection.waiting
        if limiter is not None:
            waiting = RateLimited(connection, limiter, settings.hold_seconds)
        prefetches = [queue.prefetch for queue in self.source.queues(self.names, settings.grown_prefetch)]
        spare = max(1, min(prefetches) // 2) if len(prefetches) > 1 else 0
        threads = settings.threads or min(prefetches) + spare
        self._workers = Workers(threads, waiting, handler.handle, connection.name, handler.worker_failed)

    def run(self, *, signals: bool = True) -> None:
        """Consume until SIGTERM or SIGINT, finish what is in hand, and return; a second signal returns at once.

        Signals are handled in the main thread alone. Raises Refused, Halted or Hung, after the same.
        """
        run_all([self], signals=signals)

    def start(self) -> None:
        """Connect and consume, in threads of its own."""
        self._connection.start(self._workers.wake)

    def stop(self) -> None:
        """Ask for the end: `wait` then returns. Any thread, and a signal's handler, may call this."""
        self._ended.put(None)

    def fail(self, error: ConsumerError) -> None:
        """Ask for the end, because of this error, which `wait` then gives."""
        self._ended.put(error)

    def wait(self, timeout: float | None = None) -> tuple[bool, ConsumerError | None]:
        """Wait until it is to end; return whether it is, and the error if one is why. `close` it then."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = CHECK_SECONDS if until is None else min(CHECK_SECONDS, until - time.monotonic())
            try:
                return True, self._ended.get(timeout=max(left, 0.001))
            except Empty:
                self._time_limit.check()
                self._connection.requeue_overdue(len(self._handler.running) < self._workers.threads)
                if until is not None and time.monotonic() >= until:
                    return False, None

    def close(self, *, is_forced: Callable[[], bool] = lambda: False) -> bool:
        """Take no more, finish what is in hand, and close the connections; what was not begun goes back to the broker.

        Return whether all that was in hand was finished within the settings' ``grace``, and before ``is_forced()``.
        """
        self._connection.stop()
        self._workers.end()
        grace = self.settings.grace
        until = None if grace is None else time.monotonic() + grace
        finished = self._workers.wait(until, lambda: is_forced() or self._time_limit.all_running_settled())
        finished = join_threads(list(self._time_limit.threads.values()), until, is_forced) and finished
        if self._own_publisher:
            self.publisher.close(FORCED_CLOSE_SECONDS if is_forced() else CLOSE_SECONDS)
        self._connection.close(FORCED_CLOSE_SECONDS if is_forced() else CLOSE_SECONDS)
        if not finished:
            logger.warning("%s: ended with %d callbacks unfinished", self.source.key, len(self._handler.running))
        return finished

    @property
    def connected(self) -> bool:
        """Whether it is connected and set up."""
        return self._connection.ready

    def figures(self) -> dict[str, float]:
        """Return how it stands: messages waiting and in hand here, seconds since one was acknowledged (or since the
        start) and since the oldest in hand was begun, the prefetch, and whether it is connected."""
        now = time.monotonic()
        begun = [since for _, since in list(self._handler.running.values())]
        return {
            "connected": float(self._connection.ready),
            "waiting": float(len(self._connection.waiting)),
            "in_hand": float(len(begun)),
            "oldest_in_hand_seconds": now - min(begun) if begun else 0.0,
            "seconds_since_acknowledged": now - self._connection.last_acked,
            "prefetch": float(self._connection.prefetch),
        }

    def _count(self, name: str) -> None:
        with self._counting:
            self.counts[name] += 1


def run_all(consumers: Sequence[Consumer], *, signals: bool = True) -> None:
    """Run several consumers until a signal comes, or one of them fails, and end all of them; see `Consumer.run`."""
    received: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        received.append(number)
        for consumer in consumers:
            consumer.stop()

    signals = signals and threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT) if signals}
    try:
        try:
            for consumer in consumers:
                consumer.start()
            error = _wait_for_one(consumers)
            if received:
                logger.info("Received %s: finishing what is in hand.", signal.Signals(received[0]).name)
        finally:
            with ThreadPoolExecutor(len(consumers)) as executor:
                list(executor.map(lambda consumer: consumer.close(is_forced=lambda: len(received) > 1), consumers))
        error = error or _first_error(consumers)
        if error is not None:
            raise error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_one(consumers: Sequence[Consumer]) -> ConsumerError | None:
    while True:
        for consumer in consumers:
            ended, error = consumer.wait(CHECK_SECONDS / len(consumers))
            if ended:
                return error


def _first_error(consumers: Sequence[Consumer]) -> ConsumerError | None:
    """Return what went wrong while they finished what was in hand, if anything did."""
    for consumer in consumers:
        while not consumer._ended.empty():
            if (error := consumer._ended.get()) is not None:
                return error
    return None
