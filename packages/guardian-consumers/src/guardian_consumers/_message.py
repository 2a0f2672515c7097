"""The message that a callback receives."""

import threading
from typing import TYPE_CHECKING, Any

from guardian_consumers._delivery import Delivery
from guardian_consumers._outcomes import Outcome
from guardian_consumers._publisher import Publication
from guardian_consumers._retries import first_published, message_id_of
from guardian_consumers.headers import ATTEMPTS, MOVED, attempts_of

if TYPE_CHECKING:
    from guardian_consumers._consumer import Consumer


_claim_lock = threading.Lock()


class Message:
    """A message for the callback. When the callback returns, the message is acknowledged.

    ``body`` is decoded according to the content type. ``properties`` are pika's.
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
        """The undecoded body."""
        return self._delivery.body

    @property
    def properties(self) -> Any:
        """The AMQP properties."""
        return self._delivery.properties

    @property
    def headers(self) -> dict[str, Any]:
        """The headers, possibly empty."""
        return self._delivery.properties.headers or {}

    @property
    def id(self) -> str:
        """The publisher's message id, or one derived from the message, which is the same at each delivery."""
        return message_id_of(self._delivery)

    @property
    def attempts(self) -> int:
        """How often the message failed and was delayed."""
        return attempts_of(self.headers)

    @property
    def redelivered(self) -> bool:
        """Whether the message may have been handled before, at least in part: it was redelivered, failed or moved."""
        return self._delivery.redelivered or ATTEMPTS in self.headers or MOVED in self.headers

    @property
    def queue(self) -> str:
        """The name of its physical queue."""
        return self._delivery.queue

    @property
    def exchange(self) -> str:
        """The exchange of its first publication."""
        return first_published(self._delivery)[0]

    @property
    def routing_key(self) -> str:
        """The complete routing key of its first publication."""
        return first_published(self._delivery)[1]

    @property
    def settled(self) -> bool:
        """Whether the message was acknowledged, or settled otherwise, for instance by its time limit."""
        return self._settled

    def ack(self) -> bool:
        """Acknowledge the message before the callback returns, so that it isn't redelivered if the callback fails.

        Use this for work that is long or can't be repeated. A later exception is logged and counted as "late"; with
        HALT it also stops the consumer.

        Return whether the ack is sent. It isn't if the message's connection is closed or closing (the message is
        redelivered), if the message was settled before, or if the callback exceeded its time limit. An ack can also get
        lost with the connection after True was returned; then the message is redelivered, too.
        """
        if not self._claim():
            return False
        self._consumer._connection.settle(self._delivery, Outcome.DONE)
        return self._delivery.channel.open

    def publish(self, body: Any, routing_key: str, *, timeout: float | None = None, **options: Any) -> None:
        """Publish another message and wait for the broker's confirm; see `Publisher.publish`.

        While the consumer stops, it doesn't wait for a broker that accepts no messages.
        """
        self._send(self._consumer.publisher.prepare(body, routing_key, **options), timeout)

    def _send(self, publication: Publication, timeout: float | None = None) -> None:
        is_stopping = self._consumer._connection.stopping.is_set
        self._consumer.publisher.send(*publication, timeout=timeout, is_stopping=is_stopping)

    def _claim(self) -> bool:
        """Claim the message for settling or publishing. Return False if another thread has claimed it."""
        with _claim_lock:
            claimed, self._settled = self._settled, True
        return not claimed
