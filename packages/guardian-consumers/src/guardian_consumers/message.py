"""What a callback gets."""

import threading
from typing import TYPE_CHECKING, Any

from guardian_consumers.delivery import Delivery
from guardian_consumers.outcomes import Outcome
from guardian_consumers.retries import ATTEMPTS, MOVED, attempts_of, first_published, message_id_of

if TYPE_CHECKING:
    from guardian_consumers.consumer import Consumer


_claim_lock = threading.Lock()


class Message:
    """A message to be handled. When the callback returns, it is acknowledged.

    ``body`` is decoded by its content type. ``properties`` are pika's.
    """

    __slots__ = ("_consumer", "_delivery", "_settled", "body")

    def __init__(self, consumer: "Consumer", delivery: Delivery, body: Any) -> None:
        self._consumer = consumer
        self._delivery = delivery
        self._settled = False
        self.body = body

    def __repr__(self) -> str:
        return f"<Message {self.id} from {self._delivery.queue}>"

    @property
    def raw(self) -> bytes:
        """The body as it came."""
        return self._delivery.body

    @property
    def properties(self) -> Any:
        """AMQP's properties."""
        return self._delivery.properties

    @property
    def headers(self) -> dict[str, Any]:
        """The headers; empty where there are none."""
        return self._delivery.properties.headers or {}

    @property
    def id(self) -> str:
        """The publisher's message id; without one, one made of the message, which is the same at each delivery."""
        return message_id_of(self._delivery)

    @property
    def attempts(self) -> int:
        """How often it failed before and was sent on a delay."""
        return attempts_of(self.headers)

    @property
    def redelivered(self) -> bool:
        """Whether it may have been handled before, wholly or in part: the broker says so, or it failed before,
        or was moved."""
        return self._delivery.redelivered or ATTEMPTS in self.headers or MOVED in self.headers

    @property
    def queue(self) -> str:
        """The physical queue that it came from."""
        return self._delivery.queue

    @property
    def exchange(self) -> str:
        """The exchange that it was first published to."""
        return first_published(self._delivery)[0]

    @property
    def routing_key(self) -> str:
        """The routing key that it was first published with, whole."""
        return first_published(self._delivery)[1]

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, or is otherwise dealt with, as after its time limit."""
        return self._settled

    def ack(self) -> bool:
        """Acknowledge it now: the point of no return. It won't come again, whatever happens from here on.

        For work that is long, or that can't be done twice. An exception after it is logged, and counted as "late"; with
        HALT it stops the consumer too. Return whether the acknowledgement goes out: False where the connection that the
        message came by is gone, or is being closed, so that it comes again (or has come already); where it was settled
        before; or where the callback had it for longer than its time limit. True is no promise: an acknowledgement that
        is lost on its way, with the connection, brings the message again.
        """
        if not self._claim():
            return False
        self._consumer._connection.settle(self._delivery, Outcome.DONE)
        return self._delivery.channel.open

    def publish(self, body: Any, routing_key: str, **options: Any) -> None:
        """Publish another message, and return when the broker has confirmed it; see `Publisher.publish`."""
        self._consumer.publisher.publish(body, routing_key, **options)

    def _claim(self) -> bool:
        """Claim the right to settle the message or publish for it; return False if another thread has claimed it."""
        with _claim_lock:
            claimed, self._settled = self._settled, True
        return not claimed
