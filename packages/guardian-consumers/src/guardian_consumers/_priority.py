"""Priorities: messages of a logical queue with a higher priority are handled first.

A setting chooses one of two ways. *Ranges*, such as "0-4,5-9", have a physical queue for each range, called a level.
The consumer reads each level on its own channel, with a prefetch that doubles with each level, and buffers deliveries
by level. *Broker*, "broker", uses a single classic queue with ``x-max-priority``.

Routing to levels: publishers only set a routing key and a priority. `Publisher.publish` writes the priority into the
property, for the broker, and into a header, since exchanges can't route by the property. The consumer declares a
headers exchange, binds it to the main exchange with its routing keys, and binds the upper levels to it, once for each
priority. The alternate exchange routes all other messages to the lowest level. So only consumers need to know the
ranges, and publishers or plain consumers of the same key notice nothing. All names belong to the Pulse user.

The lowest level is the queue that a plain consumer of the same key reads. The last connected consumer determines the
bindings. While it changes them, a message may go to the lowest level or to two queues, but is never lost.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from guardian_consumers._delivery import Delivery
from guardian_consumers._errors import SettingsError
from guardian_consumers._source import (
    OVERDUE_SECONDS,
    Binding,
    DeliveryBuffer,
    Exchange,
    PhysicalQueue,
    PlainQueue,
    Source,
    no_longer_moved,
)
from guardian_consumers.names import Names, level_queue, priority_exchange, priority_queue

MAX_PRIORITY = 9
"""The highest priority. The lowest and default is 0."""

PRIORITY_HEADER = "consumer-priority"
"""The header with the priority as text, "7". A headers exchange also compares types, and clients encode numbers as one
of four types, but text as a single one."""

BROKER = "broker"
"""The setting for the broker's own priorities."""

_PRIORITY = re.compile("[0-9]")
_RANGE = re.compile(r"([0-9])(?:-([0-9]))?", re.ASCII)


def source_for(key: str, routing_keys: Sequence[str] = (), priorities: str = "", ageing: float | None = None) -> Source:
    """Return the source for these settings: a plain queue without ``priorities``.

    Raises SettingsError for invalid settings.
    """
    if not priorities:
        return PlainQueue(key, routing_keys)
    if priorities != BROKER:
        return PriorityQueues(key, priorities, routing_keys, ageing)
    if ageing is not None:
        raise SettingsError("RABBIT_PRIORITY_AGEING needs ranges: the broker's own priorities have no ageing")
    return BrokerPriorities(key, routing_keys)


def parse_ranges(text: str) -> tuple[range, ...]:
    """Parse ranges such as "0-4,5-9". Return the priorities of each level, the lowest first.

    Raises SettingsError unless the ranges contain all priorities once, in order.
    """
    found = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranges = tuple(range(int(one[1]), int(one[2] or one[1]) + 1) for one in found if one)
    if len(ranges) < len(found) or [number for one in ranges for number in one] != list(range(MAX_PRIORITY + 1)):
        raise SettingsError(
            f"RABBIT_PRIORITIES must be {BROKER}, or ranges from 0 to {MAX_PRIORITY} in order, such as 0-4,5-9"
        )
    return ranges


def priority_of(properties: Any) -> int:
    """Return a message's priority, from 0 to 9: a valid header, or else the property."""
    header = (properties.headers or {}).get(PRIORITY_HEADER)
    if isinstance(header, str) and _PRIORITY.fullmatch(header):
        return int(header)
    return min(max(properties.priority or 0, 0), MAX_PRIORITY)


@dataclass(frozen=True)
class PriorityQueues:
    """A logical queue with a physical queue for each range of priorities.

    Higher levels come strictly first, and within a level the oldest message. With ``ageing``, in seconds, a waiting
    message rises one level per interval. ``key`` and ``routing_keys`` are as in `PlainQueue`.
    Raises SettingsError for invalid values.
    """

    key: str
    ranges: str = "0-4,5-9"
    routing_keys: Sequence[str] = ()
    ageing: float | None = None

    def __post_init__(self) -> None:
        _ = self.levels
        if self.ageing is not None and not 0 < self.ageing < float("inf"):
            raise SettingsError("RABBIT_PRIORITY_AGEING must be a number of seconds above 0")

    @property
    def levels(self) -> tuple[range, ...]:
        """The priorities of each level, the lowest first."""
        return parse_ranges(self.ranges)

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        """Return a queue for each level, the highest first. The prefetch doubles with each level.

        There are one and a half times as many threads as the lowest level's prefetch, and at least two. So the lowest
        level never occupies all threads, and higher messages find an idle one. Any other level with a backlog fills all
        threads, so that none takes a lower message while the next of this level is in transit.
        """
        queue = names.queue(self.key)
        return [
            PhysicalQueue(level_queue(queue, level), (), min(prefetch * 2**level, 65535), level)
            for level in reversed(range(len(self.levels)))
        ]

    def create_buffer(self) -> DeliveryBuffer:
        return RankedBuffer(len(self.levels), lambda delivery: delivery.level, self.ageing)

    def routes(self, names: Names) -> Iterator[Exchange | Binding]:
        """Return the exchanges and bindings.

        Bindings of other ranges are removed first, and those of these ranges added last; in between, messages go to the
        lowest level. AMQP allows the removal of missing bindings.
        """
        queue, ranked, unranked = (
            names.queue(self.key),
            priority_exchange(names, self.key),
            _fallback_exchange(names, self.key),
        )
        yield Exchange(unranked, "fanout")
        yield Binding(unranked, queue)
        yield Exchange(ranked, "headers", {"alternate-exchange": unranked})
        wanted = {(level, number) for level, numbers in enumerate(self.levels) for number in numbers if level}
        # A level has at least one priority, so no configuration has a priority below the level's own number.
        possible = {
            (level, number) for level in range(1, MAX_PRIORITY + 1) for number in range(level, MAX_PRIORITY + 1)
        }
        for level, number in sorted(possible - wanted):
            yield _priority_binding(ranked, queue, level, number, present=False)
        for key in _routing_keys(self, names):
            yield Binding(names.exchange, ranked, key, to_exchange=True)
            yield Binding(names.exchange, queue, key, present=False)
            yield Binding(names.exchange, priority_queue(queue), key, present=False)
        for level, number in sorted(wanted):
            yield _priority_binding(ranked, queue, level, number)
        for level in range(len(self.levels)):
            yield no_longer_moved(names, self.key, level_queue(queue, level))


@dataclass(frozen=True)
class BrokerPriorities:
    """A logical queue with a single physical queue and the broker's own priorities.

    The broker delivers the highest messages first, and the consumer buffers deliveries by priority. RabbitMQ only has
    priorities for classic queues.
    """

    key: str
    routing_keys: Sequence[str] = ()

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        name = priority_queue(names.queue(self.key))
        return [PhysicalQueue(name, (), prefetch, arguments={"x-max-priority": MAX_PRIORITY})]

    def create_buffer(self) -> DeliveryBuffer:
        return RankedBuffer(MAX_PRIORITY + 1, lambda delivery: priority_of(delivery.properties), single_queue=True)

    def routes(self, names: Names) -> Iterator[Exchange | Binding]:
        """Return the bindings of this queue, and the removals of the ranges' bindings."""
        queue, ranked = names.queue(self.key), priority_exchange(names, self.key)
        own = priority_queue(queue)
        for key in _routing_keys(self, names):
            yield Binding(names.exchange, own, key)
            yield Binding(names.exchange, ranked, key, to_exchange=True, present=False)
            yield Binding(names.exchange, queue, key, present=False)
        yield no_longer_moved(names, self.key, own)


class RankedBuffer:
    """A buffer of deliveries with ranks from 0 to ``ranks`` - 1: the highest rank first, then the oldest.

    A waiting message rises one rank each ``ageing`` seconds. So it precedes messages of a higher rank that arrive later
    than ``ageing`` times the difference of ranks. Messages become overdue later by the time of rising through all
    ranks. ``clock`` returns seconds.
    """

    def __init__(
        self,
        ranks: int,
        rank: Callable[[Delivery], int],
        ageing: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        single_queue: bool = False,
    ) -> None:
        self._rank = rank
        self._ageing = ageing
        self._single_queue = single_queue
        self._overdue = OVERDUE_SECONDS + ranks * (ageing or 0)
        self._clock = clock
        self._queues: list[deque[tuple[float, Delivery]]] = [deque() for _ in range(ranks)]
        self._length = 0
        self._lock = threading.Lock()

    def put(self, delivery: Delivery) -> None:
        line = self._queues[self._rank(delivery)]
        with self._lock:
            line.append((self._clock(), delivery))
            self._length += 1

    def __len__(self) -> int:
        return self._length

    def take(self) -> Delivery | None:
        with self._lock:
            waiting = [rank for rank in range(len(self._queues) - 1, -1, -1) if self._queues[rank]]
            if not waiting:
                return None
            ageing = self._ageing
            if ageing is None or len(waiting) == 1:
                first = waiting[0]
            else:
                # Waiting adds the same to all ranks, so a higher rank is equivalent to an earlier arrival.
                first = min(waiting, key=lambda rank: self._queues[rank][0][0] - rank * ageing)
            self._length -= 1
            return self._queues[first].popleft()[1]

    def overdue(self) -> Sequence[Delivery]:
        """Remove and return overdue deliveries, and those that must be requeued with them; see `OverdueBuffer`.

        The queues of overdue deliveries are suspended, so others would overtake them: those of the same or a lower
        rank. With a ``single_queue`` for all ranks, higher ranks are requeued too: they would block even higher ones.
        """
        since = self._clock() - self._overdue
        found: list[Delivery] = []
        with self._lock:
            late = [rank for rank, line in enumerate(self._queues) if line and line[0][0] < since]
            back = len(self._queues) if late and self._single_queue else max(late, default=-1) + 1
            for line in self._queues[:back]:
                found += [delivery for _, delivery in line]
                line.clear()
            self._length -= len(found)
        return found


def _fallback_exchange(names: Names, key: str) -> str:
    """Return the name of the alternate exchange, for messages without a priority of an upper level."""
    return f"{names.routing_key(key)}.unranked"


def _routing_keys(source: PriorityQueues | BrokerPriorities, names: Names) -> list[str]:
    return [names.routing_key(key) for key in source.routing_keys or [source.key]]


def _priority_binding(exchange: str, queue: str, level: int, priority: int, *, present: bool = True) -> Binding:
    arguments = {"x-match": "all", PRIORITY_HEADER: str(priority)}
    return Binding(exchange, level_queue(queue, level), arguments=arguments, present=present)
