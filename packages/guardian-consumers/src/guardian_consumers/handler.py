"""Call the callback with each message, and settle the message according to the result."""

import inspect
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from guardian_consumers import retries
from guardian_consumers.connection import ConsumerConnection
from guardian_consumers.decoding import Decoder, decode
from guardian_consumers.delivery import Delivery
from guardian_consumers.errors import ConsumerError, Halted, NotPublished, SettingsError, Unroutable
from guardian_consumers.message import Message
from guardian_consumers.outcomes import Decision, Outcome, Unreadable, decide
from guardian_consumers.source import OVERDUE_SECONDS

if TYPE_CHECKING:
    from guardian_consumers.consumer import Callback, Consumer

logger = logging.getLogger(__name__)

REQUEUE_DELAY_SECONDS = (1.0, 5.0)
"""Random delay before requeueing a message that could not be published."""
_DESCRIPTIONS = {
    Outcome.HALT: "the consumer stops",
    Outcome.DISCARD: "discarded",
    Outcome.REQUEUE: "requeued once",
    Outcome.RETRY: "will be retried",
    Outcome.PARK: "parked",
}


def require_function(callback: Callable[..., object]) -> None:
    """Raise SettingsError for a coroutine or generator function: calling it does nothing, and the message is acked."""
    if inspect.iscoroutinefunction(callback) or inspect.isgeneratorfunction(callback):
        name = getattr(callback, "__qualname__", repr(callback))
        raise SettingsError(f"the callback {name} is a coroutine or generator function; write a plain function")


class Handler:
    """Handles deliveries in worker threads. A thread owns its message while the callback runs."""

    def __init__(
        self, consumer: "Consumer", connection: ConsumerConnection, callback: "Callback", decoders: dict[str, Decoder]
    ) -> None:
        self.running: dict[int, tuple[Message, float]] = {}
        """By thread id: the message whose callback runs, and its start by `time.monotonic`."""
        self._consumer = consumer
        self._connection = connection
        self._callback = callback
        self._decoders = decoders
        self._name = consumer.source.key

    def handle(self, delivery: Delivery) -> None:
        """Decode the message, call the callback, settle the message, and call the listeners."""
        if not delivery.channel.open:
            self._consumer._count("void")
            return
        message = Message(self._consumer, delivery, None)
        thread = threading.get_ident()
        begun = time.monotonic()
        self.running[thread] = message, begun
        self._connection.ensure_room(len(self.running))
        outcome: Outcome | None = Outcome.DONE
        try:
            properties = delivery.properties
            if why := getattr(properties, "unreadable", ""):
                raise Unreadable(why)
            message.body = decode(delivery.body, properties.content_type, properties.content_encoding, self._decoders)
            self._callback(message)
        except BaseException as error:
            took, outcome = time.monotonic() - begun, None
            # Claim first: the time limit is for the callback, and publishing may take long.
            if message._claim():
                outcome = self.failed(message, error, "".join(traceback.format_exception(error)))
            else:
                self._failed_late(message, error)
        else:
            took = time.monotonic() - begun
            message.ack()
        finally:
            self.running.pop(thread, None)
        for listener in self._consumer.listeners:
            try:
                listener(message, outcome, took)
            except Exception:
                logger.exception("%s: a listener failed; the message is settled", self._name)

    def failed(self, message: Message, error: BaseException, trace: str) -> Outcome:
        """Settle a claimed message according to the exception, and return the outcome."""
        decision = self._decide(message, error)
        level = logging.WARNING if decision.outcome is Outcome.RETRY else logging.ERROR
        logger.log(level, "%s: %r failed: %s", self._name, message, _DESCRIPTIONS[decision.outcome], exc_info=error)
        if decision.outcome is Outcome.HALT:
            self._stop(Halted, f"stopped by {message!r}", error)
        elif decision.outcome in (Outcome.RETRY, Outcome.PARK):
            return self._publish(message, error, trace, decision)
        else:
            self._connection.settle(message._delivery, decision.outcome)
        return decision.outcome

    def worker_failed(self, error: BaseException) -> None:
        """Stop the consumer. The message stays unacknowledged and is redelivered."""
        self._stop(ConsumerError, "a worker failed", error)

    def _failed_late(self, message: Message, error: BaseException) -> None:
        """Count a callback that failed after its message was acked, or settled by the time limit."""
        logger.error("%s: %r failed after it was acknowledged", self._name, message, exc_info=error)
        self._consumer._count("late")
        if self._decide(message, error).outcome is Outcome.HALT:
            self._stop(Halted, f"stopped by {message!r}", error)

    def _decide(self, message: Message, error: BaseException) -> Decision:
        return decide(error, self._consumer.settings.policy, message.attempts, message._delivery.redelivered)

    def _stop(self, kind: type[ConsumerError], why: str, cause: BaseException) -> None:
        error = kind(f"{self._name}: {why}: {retries.describe_error(cause)}")
        error.__cause__ = cause
        self._consumer.fail(error)

    def _publish(self, message: Message, error: BaseException, trace: str, decision: Decision) -> Outcome:
        """Publish a message to a delay queue or the parking queue, then ack it. Return REQUEUE if it is requeued.

        A crash between publishing and ack leaves the message in both queues, with the same message id. While the broker
        accepts no messages, keep the message: after a requeue it would be redelivered immediately, and its callback
        called again and again. If its connection is lost it is redelivered anyway, so it isn't published.
        """
        delivery, names, publisher = message._delivery, self._consumer.names, self._consumer.publisher
        if decision.outcome is Outcome.RETRY:
            routing_key, properties = retries.delayed(delivery, names, error, decision.delay)
        else:
            routing_key, properties = retries.parked(delivery, names, error, trace)
        outcome, redeclared = Outcome.REQUEUE, False
        while delivery.channel.open:  # otherwise it is void, and `settle` counts it so
            try:
                publisher.send(
                    routing_key,
                    delivery.body,
                    properties,
                    mandatory=True,
                    keep_waiting=lambda: self._can_wait(delivery),
                    is_stopping=self._connection.stopping.is_set,
                )
                outcome = decision.outcome
            except NotPublished as failure:
                keep = self._can_wait(delivery)
                if keep and publisher.blocked and not failure.unknown:
                    logger.warning("%s: %r is kept: %s", self._name, message, failure)
                    continue
                if keep and isinstance(failure, Unroutable) and not redeclared:
                    logger.warning("%s: %s; declaring its queue again", self._name, failure)
                    redeclared = True
                    self._connection.redeclare(self._consumer.settings.publish_timeout)
                    continue
                self._not_published(message, failure)
            break
        self._connection.settle(delivery, outcome)
        return outcome

    def _not_published(self, message: Message, failure: NotPublished) -> None:
        logger.error("%s: %r is requeued: %s", self._name, message, failure)
        self._consumer._count("unpublished")
        if isinstance(failure.__cause__, ConsumerError):
            self._consumer.fail(failure.__cause__)
        # An immediate requeue would cause an immediate redelivery, in a loop.
        self._connection.stopping.wait(random.uniform(*REQUEUE_DELAY_SECONDS))  # noqa: S311

    def _can_wait(self, delivery: Delivery) -> bool:
        """Whether a message can be kept: no shutdown has begun, and the broker's ack timeout is not near."""
        if self._connection.stopping.is_set() or not delivery.channel.open:
            return False
        limit = self._consumer.settings.time_limit
        return not limit or time.monotonic() - delivery.since < limit + OVERDUE_SECONDS
