"""A message as the broker delivered it, and the channel that it came by."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guardian_consumers.link import Steps


class Delivery:
    """A message as the broker delivered it.

    ``exchange``, ``routing_key`` and ``redelivered`` are those of this delivery, and ``tag`` is its delivery tag on
    ``channel``. ``properties`` are pika's. ``since`` is when it arrived, by `time.monotonic`.
    """

    __slots__ = ("body", "channel", "exchange", "properties", "redelivered", "routing_key", "since", "tag")

    def __init__(self, channel: "QueueChannel", method: Any, properties: Any, body: bytes) -> None:
        self.channel = channel
        self.tag: int = method.delivery_tag
        self.exchange: str = method.exchange
        self.routing_key: str = method.routing_key
        self.redelivered: bool = method.redelivered
        self.properties = properties
        self.body = body
        self.since = time.monotonic()

    @property
    def queue(self) -> str:
        """The name of the physical queue that it came from."""
        return self.channel.queue

    @property
    def level(self) -> int:
        """The level of that queue, as the source gave it."""
        return self.channel.level


class QueueChannel:
    """A channel that consumes one queue, for as long as its connection lives. The I/O thread owns all but ``open``.

    A delivery tag is valid on its own channel alone: when that closes, the broker requeues what is unacknowledged. So
    ``open`` never becomes true again; the next connection has channels of its own.
    ``amqp`` is pika's channel. ``resting``: not to be consumed for now, since its deliveries waited too long.
    """

    def __init__(self, queue: str, level: int, amqp: Any) -> None:
        self.queue = queue
        self.level = level
        self.amqp = amqp
        self.consumer_tag = ""
        self.prefetch = 0
        self.open = True
        self.suspended = False
        self._unacked: deque[int] = deque()
        self._settled: set[int] = set()

    def consume(self, prefetch: int, on_message: Callable[..., None]) -> "Steps":
        """Consume the queue with this prefetch; 0: not at all."""
        self.cancel()
        if prefetch:
            self.prefetch = prefetch
            # It applies to consumers that start afterwards: hence a new one for another prefetch.
            yield partial(self.amqp.basic_qos, prefetch_count=prefetch)
            answer = yield partial(self.amqp.basic_consume, self.queue, on_message)
            self.consumer_tag = answer.method.consumer_tag

    def cancel(self) -> None:
        """Consume no more. pika requeues what arrives before the broker has answered."""
        if self.consumer_tag and self.amqp.is_open:
            self.amqp.basic_cancel(self.consumer_tag, callback=lambda _: None)
        self.consumer_tag = ""

    def delivered(self, tag: int) -> None:
        """Record a delivery; tags rise."""
        self._unacked.append(tag)

    def requeue(self, delivery: Delivery) -> None:
        """Requeue what no worker has taken."""
        if self.open and self.amqp.is_open:
            self.settle([], [delivery.tag])

    def settle(self, acked: list[int], requeued: list[int]) -> None:
        """Ack and requeue deliveries, in as few frames as their order permits.

        An ack of several is for all up to a tag: it is sent if everything up to there is settled, and never for a
        message whose callback still runs.
        """
        for tag in requeued:
            self.amqp.basic_reject(tag, requeue=True)
        unacked, settled = self._unacked, self._settled
        settled.update(acked)
        settled.update(requeued)
        upto = 0
        while unacked and unacked[0] in settled:
            tag = unacked.popleft()
            settled.remove(tag)
            upto = tag
        if len(acked) == 1:
            self.amqp.basic_ack(acked[0])
            return
        # The broker refuses a tag that it no longer knows, as that of a rejected message: this one is acked now.
        together = max((tag for tag in acked if tag <= upto), default=0)
        if together:
            self.amqp.basic_ack(together, multiple=True)
        for tag in acked:
            if tag > together:
                self.amqp.basic_ack(tag)
