"""The protocols of sources, delivery buffers and limiters, and the plain queue.

A *source* is a logical queue. It defines the physical queues to consume, each with its own channel and prefetch, and
creates the buffer where deliveries wait for a worker. The consumer does everything else in the same way for all
sources: declaring, consuming, acking, reconnecting, delaying, parking, shutting down. So a source has no connection and
no thread, and one argument replaces it: ``Consumer(…, source=PlainQueue("orders"))``.

A *limiter*, ``Consumer(…, limiter=…)``, may restrict the workers. One worker at a time checks that a delivery waits,
then waits for the limiter, and only then takes the delivery that is first at this moment.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from guardian_consumers._delivery import Delivery
from guardian_consumers.names import Names, moved_exchange, priority_exchange, priority_queue, return_key

OVERDUE_SECONDS = 240.0
"""How long a delivery may wait in memory: a minute less than the difference between the broker's ack timeout (30
minutes) and the default time limit of callbacks (25)."""


@dataclass(frozen=True)
class PhysicalQueue:
    """A queue on the broker, with its complete name and routing keys.

    ``level`` is passed on with deliveries; the consumer ignores it. ``arguments`` are added to those of the consumer's
    queue type.
    """

    name: str
    routing_keys: Sequence[str]
    prefetch: int
    level: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)


class DeliveryBuffer(Protocol):
    """Deliveries in memory that wait for a worker.

    One thread calls ``put``; any threads call ``take`` and ``len``. No method may block for long or raise. ``take`` may
    return deliveries of a lost connection: the consumer ignores them.
    """

    def put(self, delivery: Delivery) -> None:
        """Add a delivery."""

    def take(self) -> Delivery | None:
        """Remove and return the next delivery, or None if there is none."""

    def __len__(self) -> int:
        """Return the number of deliveries."""


@runtime_checkable
class OverdueBuffer(Protocol):
    """A buffer where deliveries may wait too long, while others are preferred or all threads are busy."""

    def overdue(self) -> Sequence[Delivery]:
        """Remove and return deliveries that have waited too long.

        The consumer requeues them, since the broker closes the channel at its ack timeout. It suspends their queues
        until the buffer is empty and a thread is idle.
        """


class Source(Protocol):
    """A logical queue."""

    @property
    def key(self) -> str:
        """The name without the exchange's prefix, as publishers use it."""

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        """Return the physical queues. Called at each connect, and when the prefetch may have changed.

        ``prefetch`` is that of a plain queue: 1 while young, 20 when grown, or less with a limiter. The queues' names
        must not change.
        """

    def create_buffer(self) -> DeliveryBuffer:
        """Return an empty buffer. Called once for each consumer."""


@dataclass(frozen=True)
class Exchange:
    """A durable exchange of a source. ``name`` is complete; ``kind`` is AMQP's type."""

    name: str
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Binding:
    """A binding from an exchange to a queue or, with ``to_exchange``, an exchange. Names and ``key`` are complete.

    ``present``: whether to add or remove it.
    """

    exchange: str
    to: str
    key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    to_exchange: bool = False
    present: bool = True


@runtime_checkable
class Routed(Protocol):
    """A source that needs more than queues bound with routing keys."""

    def routes(self, names: Names) -> Iterable[Exchange | Binding]:
        """Return the exchanges and bindings to add and remove, in order.

        Called at each connect, after the queues were declared.
        """


def no_longer_moved(names: Names, key: str, queue: str) -> Binding:
    """Return the removal of the binding with which `move_priorities` took a queue's delayed messages elsewhere."""
    return Binding(names.exchange, moved_exchange(names, key), return_key(queue), to_exchange=True, present=False)


class Limiter(Protocol):
    """Limits the rate at which workers take messages."""

    def prefetch(self, most: int) -> int:
        """Return the prefetch, from 1 to ``most``, not counting messages whose callbacks run."""

    def take(self, timeout: float) -> float:
        """Take a token, waiting up to ``timeout`` seconds.

        Return 0 if a token was taken, otherwise the seconds until there may be one. If these exceed the consumer's
        ``hold_seconds``, the consumer requeues its waiting messages for other consumers, and resumes with the next
        token. A consumer calls this from one thread at a time. It must not raise.
        """

    def give_back(self) -> None:
        """Return an unused token."""


@dataclass(frozen=True)
class PlainQueue:
    """A FIFO queue, bound to the exchange with its own key or with ``routing_keys``."""

    key: str
    routing_keys: Sequence[str] = ()

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        return [PhysicalQueue(names.queue(self.key), self._routing_keys(names), prefetch)]

    def routes(self, names: Names) -> Iterable[Exchange | Binding]:
        """Return the removals of bindings from former priority settings, which would duplicate messages.

        AMQP allows the removal of missing bindings.
        """
        own = priority_queue(names.queue(self.key))
        for key in self._routing_keys(names):
            yield Binding(names.exchange, priority_exchange(names, self.key), key, to_exchange=True, present=False)
            yield Binding(names.exchange, own, key, present=False)
        yield no_longer_moved(names, self.key, names.queue(self.key))

    def _routing_keys(self, names: Names) -> Sequence[str]:
        return [names.routing_key(key) for key in self.routing_keys or [self.key]]

    def create_buffer(self) -> DeliveryBuffer:
        return FifoBuffer()


class FifoBuffer:
    """A buffer in the order of arrival."""

    def __init__(self) -> None:
        self._deliveries: deque[Delivery] = deque()

    def put(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)

    def __len__(self) -> int:
        return len(self._deliveries)

    def take(self) -> Delivery | None:
        try:
            return self._deliveries.popleft()
        except IndexError:  # another worker took it
            return None

    def overdue(self) -> Sequence[Delivery]:
        since = time.monotonic() - OVERDUE_SECONDS
        found = []
        with suppress(IndexError):
            while self._deliveries[0].since < since:
                found.append(self._deliveries.popleft())  # a worker may have taken this one; then the next is fine, too
        return found
