"""The consuming connection. Only its I/O thread uses the channels.

It declares queues, consumes with a prefetch, and acks and requeues deliveries that workers settled. It never publishes:
see `publisher`.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from guardian_consumers._delivery import Delivery, QueueChannel
from guardian_consumers._link import Link, Steps, open_channel
from guardian_consumers._outcomes import Outcome
from guardian_consumers._settings import Settings
from guardian_consumers._source import Limiter, OverdueBuffer, PhysicalQueue
from guardian_consumers._topology import declare

if TYPE_CHECKING:
    from guardian_consumers._consumer import Consumer

logger = logging.getLogger(__name__)


class Prefetch:
    """The prefetch of a plain queue: small for a young consumer, larger for a grown one, reduced by a limiter."""

    def __init__(self, settings: Settings, limiter: Limiter | None) -> None:
        self.callbacks = 1
        """Concurrent callbacks to allow for on top of a limiter's prefetch."""
        self._settings = settings
        self._limiter = limiter
        self._grown = settings.grown_prefetch <= settings.young_prefetch
        self._successes = 0

    @property
    def size(self) -> int:
        """The current prefetch. A limiter's prefetch excludes messages whose callbacks run."""
        size = self._settings.grown_prefetch if self._grown else self._settings.young_prefetch
        return size if self._limiter is None else min(size, self.callbacks + self._limiter.prefetch(size))

    def record(self, outcome: Outcome) -> bool:
        """Record a settled message, and return whether the prefetch grew."""
        self._successes = self._successes + 1 if outcome is Outcome.DONE else 0
        if self._grown or self._successes < self._settings.grows_after:
            return False
        self._grown = True
        return True


class ConsumerConnection:
    """Consumes the queues of a source and settles their deliveries.

    Public methods are thread-safe. Private methods run in the I/O thread.
    """

    def __init__(self, consumer: "Consumer", limiter: Limiter | None) -> None:
        self.name = consumer.source.key
        self.waiting = consumer.source.create_buffer()
        self.paused = False
        self.stopping = threading.Event()
        self.last_acked = time.monotonic()  # until the first ack, the time of creation
        self._settings = consumer.settings
        self._source = consumer.source
        self._count = consumer._count
        self._prefetch = Prefetch(self._settings, limiter)
        name = f"consumer of {self.name}"
        self._link = Link(self._settings.addresses, name, self._set_up, self._lost, consumer.fail)
        self._wake: Callable[[], None] = lambda: None
        self._channels: list[QueueChannel] = []
        self._syncing = False
        self._redeclared: deque[threading.Event] = deque()
        self._settled: deque[tuple[Delivery, Outcome]] = deque()
        self._flushing = False

    def start(self, wake: Callable[[], None]) -> None:
        """Connect. Call ``wake`` in the I/O thread for each delivery."""
        self._wake = wake
        self._link.start()

    def stop(self) -> None:
        self.stopping.set()
        self._link.call(self._sync)

    def close(self, timeout: float) -> None:
        """Send the pending acks and close within ``timeout`` seconds. All other deliveries are void."""
        self._link.call(self._flush)
        self._link.call(self._void)
        self._link.close(timeout)

    @property
    def ready(self) -> bool:
        return self._link.ready

    @property
    def prefetch(self) -> int:
        return sum(channel.prefetch for channel in self._channels)

    def set_paused(self, paused: bool) -> None:
        if paused:
            logger.info("%s: paused by the rate limit; waiting messages are requeued", self.name)
        self.paused = paused
        self._link.call(self._sync)

    def settle(self, delivery: Delivery, outcome: Outcome) -> None:
        self._settled.append((delivery, outcome))
        if not self._flushing:
            self._flushing = True
            self._link.call(self._flush)

    def ensure_room(self, callbacks: int) -> None:
        """Raise the prefetch under a limiter if it allows for fewer concurrent callbacks."""
        if callbacks > self._prefetch.callbacks:
            self._prefetch.callbacks = 2 * callbacks
            self._link.call(self._sync)

    def redeclare(self, timeout: float) -> None:
        """Declare everything again, and wait for it. Don't call it in the I/O thread."""
        done = threading.Event()
        self._link.call(partial(self._redeclare, done))
        done.wait(timeout)

    def requeue_overdue(self, is_worker_free: bool) -> None:
        """Requeue overdue deliveries and suspend their queues. Resume suspended queues when a worker is idle."""
        self._link.call(partial(self._requeue_overdue, is_worker_free))

    # The I/O thread

    def _set_up(self, link: Link, connection: Any) -> Steps:
        self._syncing = True
        channels = []
        for queue in self._queues():
            amqp = yield open_channel(connection)
            link.watch(amqp)
            channels.append(QueueChannel(queue.name, queue.level, amqp))
            amqp.add_on_cancel_callback(partial(self._cancelled, channels[-1]))
        yield from declare(link, channels[0].amqp, self._settings, self._source, self._queues())
        if link.connects:
            self._count("reconnected")
        self._channels = channels
        yield from self._steps()

    def _queues(self) -> Sequence[PhysicalQueue]:
        return self._source.queues(self._settings.names, self._prefetch.size)

    def _sync(self) -> None:
        """Redeclare, and start, stop or restart consumers, as the current state requires."""
        if self._channels and not self._syncing:
            self._syncing = True
            self._link.run_steps(self._steps())

    def _steps(self) -> Steps:
        # The required state may change while the broker answers, so compute each step anew.
        while (change := self._next_change()) is not None:
            yield from change
        self._syncing = False
        if self.paused or self.stopping.is_set():
            while (delivery := self.waiting.take()) is not None:
                delivery.channel.requeue(delivery)

    def _next_change(self) -> Steps | None:
        if self._redeclared:
            return self._declare()
        idle = self.paused or self.stopping.is_set()
        for channel, queue in zip(self._channels, self._queues(), strict=True):
            wanted = 0 if idle or channel.suspended else queue.prefetch
            if wanted != (channel.prefetch if channel.consumer_tag else 0):
                return channel.consume(wanted, partial(self._on_message, channel))
        return None

    def _on_message(self, channel: QueueChannel, _: Any, method: Any, properties: Any, body: bytes) -> None:
        channel.delivered(method.delivery_tag)
        self.waiting.put(Delivery(channel, method, properties, body))
        self._wake()

    def _cancelled(self, channel: QueueChannel, _: Any) -> None:
        """Handle the broker's cancellation: the queue was deleted or lost its node, or a delivery timed out.

        Since RabbitMQ 4.3, an ack timeout cancels the consumer of a quorum queue instead of closing its channel. A late
        ack, which may be on its way, would then have the broker deliver messages to the cancelled consumer.
        """
        channel.consumer_tag = ""
        if self._settings.queue_type == "quorum" and self._link.server_version >= (4, 3):
            self._link.reconnect(f"the queue {channel.queue} was deleted, or a delivery timed out")
            return
        logger.warning("%s: the queue %s is gone; declaring it again", self.name, channel.queue)
        self._redeclare(threading.Event())

    def _redeclare(self, done: threading.Event) -> None:
        if self._channels:
            self._redeclared.append(done)
            self._sync()
        else:
            done.set()  # the next connection declares everything

    def _declare(self) -> Steps:
        waiters = len(self._redeclared)
        yield from declare(self._link, self._channels[0].amqp, self._settings, self._source, self._queues())
        for _ in range(waiters):
            self._redeclared.popleft().set()

    def _requeue_overdue(self, is_worker_free: bool) -> None:
        overdue = self.waiting.overdue() if isinstance(self.waiting, OverdueBuffer) else ()
        for delivery in overdue:
            channel = delivery.channel
            if not channel.suspended:
                logger.info("%s: %s is suspended: its messages waited too long", self.name, channel.queue)
            channel.suspended = True
            channel.cancel()
            channel.requeue(delivery)
        resting = [channel for channel in self._channels if channel.suspended]
        if resting and is_worker_free and not overdue and not len(self.waiting):
            for channel in resting:
                channel.suspended = False
            self._sync()

    def _flush(self) -> None:
        self._flushing = grown = False
        settled: defaultdict[QueueChannel, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        while self._settled:
            delivery, outcome = self._settled.popleft()
            if not delivery.channel.open or not delivery.channel.amqp.is_open:
                self._count("void")
                continue
            self._count(outcome.value)
            grown = self._prefetch.record(outcome) or grown
            settled[delivery.channel][outcome is Outcome.REQUEUE].append(delivery.tag)
        for channel, (acked, requeued) in settled.items():
            channel.settle(acked, requeued)
            if acked:
                self.last_acked = time.monotonic()
        if grown:
            logger.info("%s: prefetch grown after %d successes in a row", self.name, self._settings.grows_after)
            self._sync()

    def _void(self) -> None:
        """Stop settling deliveries: acks would not reach the broker."""
        for channel in self._channels:
            channel.open = False

    def _lost(self, reason: str) -> None:
        self._void()
        self._channels = []
        self._syncing = False
        while self._redeclared:
            self._redeclared.popleft().set()
        # The broker has requeued them. `_flush` ignores those that are settled from now on.
        while self.waiting.take() is not None:
            self._count("void")
