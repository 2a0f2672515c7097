"""Where messages come from, and in which order workers take them: the protocol, and the plain queue.

A *source* is one logical queue. It says which physical queues are read, each on a channel of its own with a prefetch of
its own, and gives the place in memory where what arrived waits for a worker. Everything else is the consumer's and the
same for all sources: declaring, reading, acknowledging, reconnecting, delays, parking, SIGTERM. So a source holds no
connection and no thread, and is exchanged by one argument: ``Consumer(…, source=PlainQueue("orders"))``.

Between source and workers stands at most one *limiter*, ``Consumer(…, limiter=…)``. A worker first sees that something
waits, then waits for the limiter, and only then takes: what is worked on is what is first when there is room for it.
One worker at a time waits there.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from guardian_consumers.delivery import Delivery
from guardian_consumers.names import Names, priority_exchange, priority_queue

OVERDUE_SECONDS = 240.0
"""For how long a message may wait here: a minute less than what a callback's time limit, 25 minutes, leaves of the
broker's timeout for an acknowledgement, 30."""


@dataclass(frozen=True)
class PhysicalQueue:
    """One queue on the broker. ``name`` and ``routing_keys`` are whole, as the broker knows them.

    ``prefetch`` is how many of its messages may be here unacknowledged. ``level`` is handed on with its messages; the
    consumer doesn't look at it. ``arguments`` are added to those of the consumer's queue type.
    """

    name: str
    routing_keys: Sequence[str]
    prefetch: int
    level: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)


class DeliveryBuffer(Protocol):
    """What arrived and no worker has taken yet, in memory.

    One thread puts, any number take and ask for the length; nothing here may block for long, or raise. A delivery that
    is void, because its connection was lost, may be given all the same: the consumer leaves it out.
    """

    def put(self, delivery: Delivery) -> None:
        """Add a message that arrived."""

    def take(self) -> Delivery | None:
        """Remove and return what is to be worked on next; None: nothing waits."""

    def __len__(self) -> int:
        """Return how many wait."""


@runtime_checkable
class OverdueBuffer(Protocol):
    """A place in which a message may wait too long: while others are preferred to it, or while all threads are busy."""

    def overdue(self) -> Sequence[Delivery]:
        """Remove and return what has waited too long to be kept.

        The consumer gives it back to the broker, which would else close the channel when its timeout is over, and
        reads no more from those queues until nothing else waits here and a thread is free.
        """


class Source(Protocol):
    """One logical queue."""

    @property
    def key(self) -> str:
        """Its name without the exchange's prefix, as a publisher sees it."""

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        """Return the physical queues. Called at each connect, and again when the prefetch may have changed.

        ``prefetch`` is what a plain queue would have: 1 while young, 20 when grown, or less by the limiter. The names
        must be the same each time.
        """

    def create_buffer(self) -> DeliveryBuffer:
        """Return an empty place to wait in. Called once for each consumer."""


@dataclass(frozen=True)
class Exchange:
    """An exchange of a source's own, durable. ``name`` is whole; ``kind`` is AMQP's type."""

    name: str
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Binding:
    """A binding from an exchange to a queue, or ``to_exchange``; not ``there``: one that must not be there.

    Names and ``key`` are whole.
    """

    exchange: str
    to: str
    key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    to_exchange: bool = False
    present: bool = True


@runtime_checkable
class Routed(Protocol):
    """A source that needs more than queues bound by routing keys."""

    def routes(self, names: Names) -> Iterable[Exchange | Binding]:
        """Return what is to be there and what isn't, in the order in which it is to be done.

        Called at each connect; the queues are declared then.
        """


class Limiter(Protocol):
    """What keeps workers from taking messages too fast."""

    def prefetch(self, most: int) -> int:
        """Return how many messages are worth holding here beside those in hand, from 1 to ``most``."""

    def take(self, timeout: float) -> float:
        """Take a token, and block for at most ``timeout`` seconds until there is one.

        Return 0 where it was taken. Else return in how many seconds there may be one: when that is longer than the
        consumer's ``hold_seconds``, it gives the messages that wait here back to the broker, so that others can work on
        them, and reads on when it has a token. A consumer calls this by one thread at a time. It may not raise.
        """

    def give_back(self) -> None:
        """Put back a token that was taken and not used."""


@dataclass(frozen=True)
class PlainQueue:
    """One queue, first in, first out, bound by its own key, or by those given, to the exchange.

    It is what a source looks like that does nothing special.
    """

    key: str
    routing_keys: Sequence[str] = ()

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        """Return the one queue."""
        return [PhysicalQueue(names.queue(self.key), self._routing_keys(names), prefetch)]

    def routes(self, names: Names) -> Iterable[Exchange | Binding]:
        """Return the bindings of the time when priorities were kept apart, which go: by them messages came twice.

        One that was never there may be taken away all the same.
        """
        own = priority_queue(names.queue(self.key))
        for key in self._routing_keys(names):
            yield Binding(names.exchange, priority_exchange(names, self.key), key, to_exchange=True, present=False)
            yield Binding(names.exchange, own, key, present=False)

    def _routing_keys(self, names: Names) -> Sequence[str]:
        return [names.routing_key(key) for key in self.routing_keys or [self.key]]

    def create_buffer(self) -> DeliveryBuffer:
        """Return a first-in, first-out place."""
        return FifoBuffer()


class FifoBuffer:
    """DeliveryBuffer in the order of arrival."""

    def __init__(self) -> None:
        self._deliveries: deque[Delivery] = deque()

    def put(self, delivery: Delivery) -> None:
        """Add one at the end."""
        self._deliveries.append(delivery)

    def __len__(self) -> int:
        return len(self._deliveries)

    def take(self) -> Delivery | None:
        """Remove and return the oldest."""
        try:
            return self._deliveries.popleft()
        except IndexError:  # another worker was faster
            return None

    def overdue(self) -> Sequence[Delivery]:
        """Remove and return what has waited too long; see `OverdueBuffer`."""
        since = time.monotonic() - OVERDUE_SECONDS
        found = []
        with suppress(IndexError):
            while self._deliveries[0].since < since:
                found.append(self._deliveries.popleft())  # or the next one, where a worker is faster
        return found
