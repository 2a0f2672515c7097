"""Deliveries and their channels."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guardian_consumers._link import Steps


class Delivery:
    """A message delivered by the broker.

    ``tag`` is its delivery tag on ``channel``. ``properties`` are pika's. ``since`` is its arrival by `time.monotonic`.
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
        """The name of its physical queue."""
        return self.channel.queue

    @property
    def level(self) -> int:
        """The level that the source gave this queue."""
        return self.channel.level


class QueueChannel:
    """A channel that consumes one queue. Only the I/O thread uses it, except ``open``.

    A delivery tag is valid on its own channel only. When the channel closes, the broker requeues the unacknowledged
    messages. So ``open`` never becomes true again, and the next connection has new channels. ``amqp`` is pika's
    channel. ``suspended``: not consumed for now, since its deliveries waited too long.
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
        """Restart consuming with this prefetch; 0 stops it."""
        self.cancel()
        if prefetch:
            self.prefetch = prefetch
            # A prefetch only applies to new consumers.
            yield partial(self.amqp.basic_qos, prefetch_count=prefetch)
            answer = yield partial(self.amqp.basic_consume, self.queue, on_message)
            self.consumer_tag = answer.method.consumer_tag

    def cancel(self) -> None:
        """Stop consuming. pika requeues deliveries that arrive before the broker's answer."""
        if self.consumer_tag and self.amqp.is_open:
            self.amqp.basic_cancel(self.consumer_tag, callback=lambda _: None)
        self.consumer_tag = ""

    def delivered(self, tag: int) -> None:
        """Record a delivery. Tags increase."""
        self._unacked.append(tag)

    def requeue(self, delivery: Delivery) -> None:
        """Requeue a delivery that no worker has taken."""
        if self.open and self.amqp.is_open:
            self.settle([], [delivery.tag])

    def settle(self, acked: list[int], requeued: list[int]) -> None:
        """Ack and requeue deliveries in as few frames as possible.

        A multiple ack covers all tags up to one, so it is only sent if all of these are settled.
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
        # The broker refuses unknown tags, such as those of rejected messages, so use a tag that is acked now.
        together = max((tag for tag in acked if tag <= upto), default=0)
        if together:
            self.amqp.basic_ack(together, multiple=True)
        for tag in acked:
            if tag > together:
                self.amqp.basic_ack(tag)
