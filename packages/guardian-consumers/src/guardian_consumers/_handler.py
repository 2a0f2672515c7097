"""Call the callback with each message, and settle the message according to the result."""

import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from guardian_consumers import _retries as retries
from guardian_consumers._connection import ConsumerConnection
from guardian_consumers._decoding import Decoder, decode
from guardian_consumers._delivery import Delivery
from guardian_consumers._errors import ConsumerError, Halted, SettingsError
from guardian_consumers._message import Message
from guardian_consumers._outcomes import Decision, Halt, Outcome, Unreadable, decide
from guardian_consumers._transfers import Transfer, Transfers

if TYPE_CHECKING:
    from guardian_consumers._consumer import Callback, Consumer

logger = logging.getLogger(__name__)

_DESCRIPTIONS = {
    Outcome.HALT: "the consumer stops",
    Outcome.DISCARD: "discarded",
    Outcome.REQUEUE: "requeued once",
    Outcome.RETRY: "will be retried",
    Outcome.PARK: "parked",
}


def is_coroutine_function(callback: Callable[..., object]) -> bool:
    """Return whether calls of the callback return coroutines."""
    return inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(type(callback).__call__)


def require_function(callback: Callable[..., object]) -> None:
    """Raise SettingsError for a coroutine or generator function: calling it does nothing, and the message is acked."""
    is_generator_function = inspect.isgeneratorfunction(callback) or inspect.isasyncgenfunction(callback)
    if is_coroutine_function(callback) or is_generator_function:
        name = getattr(callback, "__qualname__", repr(callback))
        raise SettingsError(
            f"the callback {name} is a coroutine or generator function; write a plain function, or a coroutine "
            "function for AsyncConsumer"
        )


def require_result(result: object) -> None:
    """Raise Halt for a coroutine or generator: nothing runs it, and the message would be acked without its work."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
    elif not inspect.isasyncgen(result):
        return
    raise Halt(f"the callback returned {result!r}, which nothing runs; return after the work, or use AsyncConsumer")


class Handler:
    """Handles deliveries in worker threads. A thread owns its message while the callback runs."""

    def __init__(
        self, consumer: "Consumer", connection: ConsumerConnection, callback: "Callback", decoders: dict[str, Decoder]
    ) -> None:
        self.running: dict[Hashable, tuple[Message, float]] = {}
        """By thread id or task: the message whose callback runs, and its start by `time.monotonic`."""
        self._consumer = consumer
        self._connection = connection
        self._callback = callback
        self._decoders = decoders
        self._name = consumer.source.key
        self.transfers = Transfers(consumer, connection, self.worker_failed)

    def handle(self, delivery: Delivery) -> None:
        """Decode the message, call the callback, settle the message, and call the listeners."""
        thread, message = threading.get_ident(), Message(self._consumer, delivery, None)
        begun = self.begin(thread, message)
        if begun is None:
            return
        try:
            self.decode(message)
            require_result(self._callback(message))
        except BaseException as error:
            # Claim first: the time limit is for the callback, and publishing may take long.
            self.raised(message, error, time.monotonic() - begun, message._claim())
        else:
            self.returned(message, time.monotonic() - begun)
        finally:
            self.running.pop(thread, None)

    def interrupt(self, thread: Hashable) -> tuple[str, bool]:
        """Return where the callback is, and False, since a thread can't be stopped from outside."""
        return stack_of(thread), False

    # The steps of `handle`, also for callbacks in tasks

    def begin(self, key: Hashable, message: Message) -> float | None:
        """Record a running callback and return the time, or None if the message's connection was lost."""
        if not message._delivery.channel.open:
            self._consumer._count("void")
            return None
        begun = time.monotonic()
        self.running[key] = message, begun
        self._connection.ensure_room(len(self.running) + self.transfers.kept)
        return begun

    def decode(self, message: Message) -> None:
        """Set the message's body. Raises Unreadable."""
        properties = message.properties
        if why := getattr(properties, "unreadable", ""):
            raise Unreadable(why)
        message.body = decode(message.raw, properties.content_type, properties.content_encoding, self._decoders)

    def returned(self, message: Message, took: float) -> None:
        """Acknowledge a message whose callback returned, and call the listeners. It doesn't block."""
        message.ack()
        self.notify(message, Outcome.DONE, took)

    def raised(self, message: Message, error: BaseException, took: float, is_claimed: bool) -> None:
        """Settle a message whose callback raised, and call the listeners. It blocks until the broker's confirm."""
        outcome = None
        if is_claimed:
            outcome = self.failed(message, error, "".join(traceback.format_exception(error)))
        else:
            self._failed_late(message, error)
        self.notify(message, outcome, took)

    def notify(self, message: Message, outcome: Outcome | None, took: float) -> None:
        """Call the listeners."""
        for listener in self._consumer.listeners:
            try:
                listener(message, outcome, took)
            except Exception:
                logger.exception("%s: a listener failed; the message is settled", self._name)

    def failed(self, message: Message, error: BaseException, trace: str) -> Outcome:
        """Settle a claimed message according to the exception, and return the outcome.

        A message that waits for its delay or parking queue is not settled yet.
        """
        decision = self._decide(message, error)
        level = logging.WARNING if decision.outcome is Outcome.RETRY else logging.ERROR
        logger.log(level, "%s: %r failed: %s", self._name, message, _DESCRIPTIONS[decision.outcome], exc_info=error)
        if decision.outcome is Outcome.HALT:
            self._stop(Halted, f"stopped by {message!r}", error)
        elif decision.outcome in (Outcome.RETRY, Outcome.PARK):
            return self.transfers.begin(self._transfer(message, error, trace, decision))
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

    def _transfer(self, message: Message, error: BaseException, trace: str, decision: Decision) -> Transfer:
        """Return the transfer of a message to a delay queue or the parking queue."""
        if decision.outcome is Outcome.RETRY:
            routing_key, properties = retries.delayed(message._delivery, error, decision.delay)
        else:
            routing_key, properties = retries.parked(message._delivery, error, trace)
        return Transfer(message, routing_key, properties, decision.outcome)


def stack_of(thread: Hashable) -> str:
    """Return the stack of a thread by its id, or an empty text if it has ended."""
    frame = sys._current_frames().get(thread)  # type: ignore[call-overload]
    return "".join(traceback.format_stack(frame)) if frame else ""
