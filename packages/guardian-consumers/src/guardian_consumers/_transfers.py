"""Publish failed messages to delay and parking queues, and keep those that the broker doesn't accept.

A transferred message is published with a confirm, then acked. A crash in between leaves it in both queues, with the
same message id. If the broker doesn't accept it, it stays with this consumer, unacknowledged: the queue may be full or
missing, or the broker short of memory or disk. After a requeue it would be redelivered at once, and its callback called
again and again. Its worker handles other messages, as long as the prefetch allows. One thread publishes the kept
messages again, with a backoff for each queue.
"""

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from guardian_consumers._connection import ConsumerConnection
from guardian_consumers._errors import ConsumerError, NotPublished, Unroutable
from guardian_consumers._message import Message
from guardian_consumers._outcomes import Outcome
from guardian_consumers._publisher import PATIENCE_CHECK_SECONDS
from guardian_consumers._source import OVERDUE_SECONDS

if TYPE_CHECKING:
    from guardian_consumers._consumer import Consumer
    from guardian_consumers._delivery import Delivery

logger = logging.getLogger(__name__)

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 10.0
"""The backoff doubles with each refusal. A random half of it is jitter."""

WARNING_INTERVAL_SECONDS = 60.0
"""The interval of warnings about the messages that wait for a queue."""


@dataclass(eq=False)
class Transfer:
    """A failed message on its way to the delay or parking queue that ``routing_key`` leads to.

    ``future`` finishes with the broker's confirm. None: the message is to be published.
    """

    message: Message
    routing_key: str
    properties: Any
    outcome: Outcome
    future: "Future[None] | None" = None

    @property
    def delivery(self) -> "Delivery":
        return self.message._delivery


@dataclass
class Refusal:
    """A queue that accepts no messages. Its next one is published at ``retry_at``, by `time.monotonic`.

    ``probe`` is the message that was published to find out whether the queue accepts messages again.
    """

    reason: str
    backoff: float = MIN_BACKOFF_SECONDS
    retry_at: float = 0.0
    probe: Transfer | None = None

    def postpone(self) -> None:
        self.retry_at = time.monotonic() + self.backoff * random.uniform(0.5, 1)  # noqa: S311
        self.backoff = min(2 * self.backoff, MAX_BACKOFF_SECONDS)


class Transfers:
    """The transfers of a consumer. Workers begin them; a thread finishes those of kept messages.

    ``failed`` is called in that thread if it fails.
    """

    def __init__(
        self, consumer: "Consumer", connection: ConsumerConnection, failed: Callable[[BaseException], None]
    ) -> None:
        self._consumer = consumer
        self._connection = connection
        self._name = consumer.source.key
        self._failed = failed
        self._lock = threading.Lock()
        self._kept: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        # Only the thread changes these.
        self._refusals: dict[str, Refusal] = {}
        self._reported_at: dict[str, float] = {}

    @property
    def kept(self) -> int:
        return len(self._kept)

    def begin(self, transfer: Transfer) -> Outcome:
        """Publish a message and ack it, or keep it. Return its outcome, which is REQUEUE if it can't be kept."""
        if transfer.delivery.channel.open and transfer.routing_key not in self._refusals:
            self._publish(transfer)
            self._wait_for_confirm(transfer)
        if self._is_confirmed(transfer):
            self._connection.settle(transfer.delivery, transfer.outcome)
            return transfer.outcome
        if not self._can_wait(transfer.delivery):
            return self._give_up(transfer)
        with self._lock:
            self._kept.append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-kept", daemon=True)
                self._thread.start()
        self._woken.set()
        return transfer.outcome

    def wait(self, message: Message) -> None:
        while not self._connection.stopping.is_set() and any(
            transfer.message is message for transfer in list(self._kept)
        ):
            time.sleep(0.1)

    def end(self) -> list[threading.Thread]:
        """Requeue kept messages, after the connection began to stop. Return the thread that does it, if any."""
        self._woken.set()
        thread = self._thread
        return [] if thread is None else [thread]

    def _publish(self, transfer: Transfer) -> None:
        try:
            transfer.future = self._consumer.publisher.publish_async(
                transfer.routing_key, transfer.delivery.body, transfer.properties, mandatory=True
            )
        except NotPublished as failure:
            transfer.future = Future()
            transfer.future.set_exception(failure)
        transfer.future.add_done_callback(lambda _: self._woken.set())

    def _wait_for_confirm(self, transfer: Transfer) -> None:
        """Wait for the confirm, but not while the broker runs short of memory or disk."""
        until = time.monotonic() + self._consumer.settings.publish_timeout
        while transfer.future and not transfer.future.done() and transfer.delivery.channel.open:
            left = until - time.monotonic()
            if left <= 0 or self._consumer.publisher.blocked:
                return
            wait_for_futures([transfer.future], min(left, PATIENCE_CHECK_SECONDS))

    def _is_confirmed(self, transfer: Transfer) -> bool:
        future = transfer.future
        return future is not None and future.done() and not future.cancelled() and future.exception() is None

    def _can_wait(self, delivery: "Delivery") -> bool:
        """Whether a message can be kept: no shutdown has begun, and the broker's ack timeout is not near."""
        if self._connection.stopping.is_set() or not delivery.channel.open:
            return False
        limit = self._consumer.settings.time_limit
        return not limit or time.monotonic() - delivery.since < limit + OVERDUE_SECONDS

    def _give_up(self, transfer: Transfer) -> Outcome:
        """Requeue a message that can't be kept. If its connection was lost, the broker has done it already."""
        if transfer.future is not None and not transfer.future.cancel():
            wait_for_futures([transfer.future], PATIENCE_CHECK_SECONDS)  # it is finishing, or has finished
        outcome = transfer.outcome if self._is_confirmed(transfer) else Outcome.REQUEUE
        if outcome is Outcome.REQUEUE and transfer.delivery.channel.open:
            logger.error("%s: %r is requeued: %s", self._name, transfer.message, self._reason(transfer))
            self._consumer._count("unpublished")
        self._connection.settle(transfer.delivery, outcome)
        return outcome

    def _reason(self, transfer: Transfer) -> str:
        future = transfer.future
        if future is not None and future.done() and not future.cancelled():
            return str(future.exception())
        if transfer.routing_key in self._refusals:
            return self._refusals[transfer.routing_key].reason
        if self._consumer.publisher.blocked:
            return "the broker accepts no messages, since it runs short of memory or disk"
        return "the broker has not confirmed it"

    # The thread

    def _run(self) -> None:
        try:
            while True:
                self._woken.wait(self._seconds_to_retry())
                self._woken.clear()
                for transfer in list(self._kept):
                    if self._advance(transfer):
                        with self._lock:
                            self._kept.remove(transfer)
                self._report()
                with self._lock:
                    if not self._kept:
                        self._refusals.clear()
                        self._thread = None
                        return
        except BaseException as error:
            logger.exception("%s: the thread of kept messages failed", self._name)
            self._failed(error)

    def _seconds_to_retry(self) -> float:
        """Return the seconds until a message is to be published again, but look for lost connections before that."""
        unpublished = {transfer.routing_key for transfer in list(self._kept) if transfer.future is None}
        refusals = [self._refusals[routing_key] for routing_key in unpublished & self._refusals.keys()]
        times = [refusal.retry_at for refusal in refusals if refusal.probe is None]
        return max(0.0, min(min(times, default=math.inf) - time.monotonic(), MAX_BACKOFF_SECONDS))

    def _advance(self, transfer: Transfer) -> bool:
        """Do what is next for a kept message, and return whether it is settled."""
        refusal = self._refusals.get(transfer.routing_key)
        if not self._can_wait(transfer.delivery):
            if refusal is not None and refusal.probe is transfer:
                refusal.probe = None
            self._give_up(transfer)
            return True
        if transfer.future is None:
            if refusal is None:
                self._publish(transfer)
            elif refusal.probe is None and time.monotonic() >= refusal.retry_at:
                refusal.probe = transfer
                self._publish(transfer)
            return False
        if self._is_confirmed(transfer):
            self._connection.settle(transfer.delivery, transfer.outcome)
            if self._refusals.pop(transfer.routing_key, None) is not None:
                self._woken.set()  # publish the other messages for this queue
            return True
        if transfer.future.done():
            self._refused(transfer, refusal, transfer.future.exception())
        return False

    def _refused(self, transfer: Transfer, refusal: Refusal | None, failure: BaseException | None) -> None:
        transfer.future = None
        if refusal is not None and refusal.probe is not transfer:
            return  # it was published before the refusal of another one
        if failure is not None and isinstance(failure.__cause__, ConsumerError):
            self._consumer.fail(failure.__cause__)
        if isinstance(failure, Unroutable):
            logger.warning("%s: %s; declaring its queue again", self._name, failure)
            self._connection.redeclare(self._consumer.settings.publish_timeout)
        refusal = self._refusals.setdefault(transfer.routing_key, Refusal(str(failure)))
        refusal.reason, refusal.probe = str(failure), None
        refusal.postpone()

    def _report(self) -> None:
        """Log how many messages wait for which queue: at first, each minute, and when none waits any more."""
        now, kept = time.monotonic(), list(self._kept)
        for routing_key, number in Counter(transfer.routing_key for transfer in kept).items():
            if now >= self._reported_at.get(routing_key, -math.inf) + WARNING_INTERVAL_SECONDS:
                self._reported_at[routing_key] = now
                reason = next(self._reason(transfer) for transfer in kept if transfer.routing_key == routing_key)
                logger.warning(
                    "%s: unacknowledged messages wait for %s (%d): %s", self._name, routing_key, number, reason
                )
        for routing_key in self._reported_at.keys() - {transfer.routing_key for transfer in kept}:
            del self._reported_at[routing_key]
            logger.info("%s: no message waits for %s any more", self._name, routing_key)
