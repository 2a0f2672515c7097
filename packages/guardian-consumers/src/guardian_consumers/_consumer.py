"""The public consumer, composed of the parts that its threads own.

The I/O thread owns the connection and its channels (`connection`). Each worker thread owns a message while its callback
runs (`workers`, `handler`). The thread that calls `run` waits for a signal or an error, checks the time limit
(`time_limit`), and shuts down.

This does not use yapw's clients. They ack messages one by one, have one channel, and stop when a queue is deleted, a
channel is closed or a body can't be decoded. Names, the exchange, the encoding of bodies, halt and discard are the
same, so yapw's publishers and consumers can be mixed with these.
"""

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from guardian_consumers._connection import ConsumerConnection
from guardian_consumers._decoding import DECODERS, Decoder
from guardian_consumers._errors import ConsumerError
from guardian_consumers._handler import Handler, require_function
from guardian_consumers._link import CLOSE_SECONDS
from guardian_consumers._message import Message
from guardian_consumers._outcomes import Outcome
from guardian_consumers._publisher import Publisher
from guardian_consumers._settings import Settings
from guardian_consumers._source import DeliveryBuffer, Limiter, Source
from guardian_consumers._time_limit import TimeLimit
from guardian_consumers._workers import RateLimited, Workers, join_threads

logger = logging.getLogger(__name__)

Callback = Callable[[Message], object]
Listener = Callable[[Message, Outcome | None, float], None]
"""Called after each message with its outcome and the duration of the callback in seconds. The outcome is None if the
callback failed after the ack. A message that waits for a delay or parking queue has the outcome it will get there."""

FORCED_CLOSE_SECONDS = 0.5
"""Timeout for closing connections after a second signal."""

CHECK_SECONDS = 0.5
"""The interval of the checks for overdue callbacks and deliveries."""


class Consumer:
    """Calls the callback with each message of a source, in threads.

    ``source`` is a `Source`, or the key of a queue, with priorities if the settings say so. Start a consumer with
    `run`, several with `run_all`. ``figures`` and ``counts`` report its state. ``listeners`` are called in the worker's
    thread after each message.
    """

    _require_function = staticmethod(require_function)
    _handler_class = Handler
    _publisher_class = Publisher
    _workers_class = Workers

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
        self._require_function(callback)
        self.settings = settings
        self.names = settings.names
        self.source: Source = settings.source(source) if isinstance(source, str) else source
        self.publisher = publisher or self._publisher_class(settings)
        self.counts: Counter[str] = Counter()
        """Messages by outcome (the values of `Outcome`), and these: "late", the callback failed after the ack; "void",
        the connection was lost first, so the message is redelivered; "unpublished", requeued since no delay or parking
        queue accepted it before a shutdown or the broker's ack timeout; "reconnected", the number of reconnections."""
        self.listeners = list(listeners)
        self._counting = threading.Lock()
        self._own_publisher = publisher is None
        self._ended: SimpleQueue[ConsumerError | None] = SimpleQueue()
        limiter = limiter or settings.limiter(self.names.queue(self.source.key))
        self._connection = connection = ConsumerConnection(self, limiter)
        self._handler = handler = self._handler_class(self, connection, callback, {**DECODERS, **(decoders or {})})
        self._time_limit = TimeLimit(self, handler)
        waiting: DeliveryBuffer | RateLimited = connection.waiting
        if limiter is not None:
            waiting = RateLimited(connection, limiter, settings.hold_seconds)
        prefetches = [queue.prefetch for queue in self.source.queues(self.names, settings.grown_prefetch)]
        spare = max(1, min(prefetches) // 2) if len(prefetches) > 1 else 0
        threads = settings.threads or min(prefetches) + spare
        self._workers = self._workers_class(threads, waiting, handler.handle, connection.name, handler.worker_failed)

    def run(self, *, signals: bool = True) -> None:
        """Consume until SIGTERM or SIGINT, let running callbacks finish, and return. A second signal doesn't wait.

        Only the main thread handles signals. Raises Refused, Halted or Hung after the same shutdown.
        """
        run_all([self], signals=signals)

    def start(self) -> None:
        """Connect and consume in background threads. Then call `wait`, which also enforces the time limit."""
        self._connection.start(self._workers.wake)

    def stop(self) -> None:
        """Make `wait` return. Any thread or signal handler may call this."""
        self._ended.put(None)

    def fail(self, error: ConsumerError) -> None:
        """Make `wait` return with this error."""
        self._ended.put(error)

    def wait(self, timeout: float | None = None) -> tuple[bool, ConsumerError | None]:
        """Wait for `stop` or `fail`. Return whether one was called, and the error. Call `close` afterwards."""
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
        """Stop consuming, let running callbacks finish, requeue waiting messages, and close the connections.

        Return whether the callbacks finished within the settings' ``grace`` and before ``is_forced()``.
        """
        self._connection.stop()
        keeping = self._handler.transfers.end()
        self._workers.end()
        grace = self.settings.grace
        until = None if grace is None else time.monotonic() + grace
        finished = self._workers.wait(until, lambda: is_forced() or self._time_limit.all_running_settled())
        finished = join_threads([*self._time_limit.threads.values(), *keeping], until, is_forced) and finished
        if self._own_publisher:
            self.publisher.close(FORCED_CLOSE_SECONDS if is_forced() else CLOSE_SECONDS)
        self._connection.close(FORCED_CLOSE_SECONDS if is_forced() else CLOSE_SECONDS)
        if not finished:
            logger.warning("%s: ended with %d callbacks unfinished", self.source.key, len(self._handler.running))
        return finished

    @property
    def connected(self) -> bool:
        """Whether the connection is open and set up."""
        return self._connection.ready

    def figures(self) -> dict[str, float]:
        """Return the current state: whether it is connected, the messages that wait or have a running callback, those
        kept until a delay or parking queue accepts them, the age of the oldest running callback, the seconds since the
        last ack (or the start), and the prefetch."""
        now = time.monotonic()
        begun = [since for _, since in list(self._handler.running.values())]
        return {
            "connected": float(self._connection.ready),
            "waiting": float(len(self._connection.waiting)),
            "in_hand": float(len(begun)),
            "kept": float(self._handler.transfers.kept),
            "oldest_in_hand_seconds": now - min(begun) if begun else 0.0,
            "seconds_since_acknowledged": now - self._connection.last_acked,
            "prefetch": float(self._connection.prefetch),
        }

    def _count(self, name: str) -> None:
        with self._counting:
            self.counts[name] += 1


def run_all(consumers: Sequence[Consumer], *, signals: bool = True) -> None:
    """Run several consumers until a signal or until one fails, then close all; see `Consumer.run`."""
    with stopping_at_signals(consumers, signals) as received:
        run_until_stopped(consumers, received)


@contextmanager
def stopping_at_signals(consumers: Sequence[Consumer], signals: bool) -> Iterator[list[int]]:
    """Stop the consumers at SIGTERM and SIGINT within the ``with`` block. Yield the list of the received signals."""
    received: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        received.append(number)
        for consumer in consumers:
            consumer.stop()

    signals = signals and threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT) if signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_stopped(consumers: Sequence[Consumer], received: Sequence[int]) -> None:
    """Start consumers, wait until one is stopped or fails, and close all. Two received signals end the waiting."""
    if not consumers:
        raise ValueError("There are no consumers to run")
    try:
        for consumer in consumers:
            consumer.start()
        error = _wait_for_one(consumers)
        if received:
            logger.info("Received %s: waiting for running callbacks.", signal.Signals(received[0]).name)
    finally:
        with ThreadPoolExecutor(len(consumers)) as executor:
            list(executor.map(lambda consumer: consumer.close(is_forced=lambda: len(received) > 1), consumers))
    error = error or _first_error(consumers)
    if error is not None:
        raise error


def _wait_for_one(consumers: Sequence[Consumer]) -> ConsumerError | None:
    while True:
        for consumer in consumers:
            ended, error = consumer.wait(CHECK_SECONDS / len(consumers))
            if ended:
                return error


def _first_error(consumers: Sequence[Consumer]) -> ConsumerError | None:
    for consumer in consumers:
        while not consumer._ended.empty():
            if (error := consumer._ended.get()) is not None:
                return error
    return None
