"""Priority: one logical queue, whose messages with a high priority are handled before those with a low one.

Two ways, by one setting. *Ranges*, as "0-4,5-9", put the messages into a queue of their own for each range, a level;
the consumer reads them all, each on a channel of its own with a prefetch that doubles with the level, and has what
arrived wait by level. *The broker's own*, "broker", is one classic queue with ``x-max-priority``.

How a message finds its level: a publisher sets the routing key and the priority, and knows no queue and no range.
`Publisher.publish` writes the priority into the property, for the broker's own, and into a header, as no exchange
routes by the property. The consumer binds a headers exchange of its own to the one exchange by its routing keys, and
its upper levels to that, one binding for each priority. What matches none goes by the alternate exchange to the lowest
level. So the consumer alone changes the ranges, and none of it is seen by those who publish or read the same key
without priorities. Routing keys by level, and no further exchange, would need publishers that know what their readers
do. All names are the Pulse user's own.

The lowest level is the queue that a plain consumer of the same key reads. What the consumer that connected last says
holds. While it changes bindings a message may go to the lowest level, or into two queues, but never nowhere.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from guardian_consumers.delivery import Delivery
from guardian_consumers.errors import SettingsError
from guardian_consumers.names import Names, level_queue, priority_exchange, priority_queue, return_key
from guardian_consumers.source import (
    OVERDUE_SECONDS,
    Binding,
    DeliveryBuffer,
    Exchange,
    PhysicalQueue,
    PlainQueue,
    Source,
)

MAX_PRIORITY = 9
"""Priorities are from 0, the lowest and the default, to this one."""

PRIORITY_HEADER = "consumer-priority"
"""The header that says the priority to the headers exchange: as text, "7". Such an exchange compares types too, and
clients write a number as one of four, and text as one alone."""

BROKER = "broker"
"""What the setting says for the broker's own priorities."""

_PRIORITY = re.compile("[0-9]")
_RANGE = re.compile(r"([0-9])(?:-([0-9]))?", re.ASCII)


def source_for(key: str, routing_keys: Sequence[str] = (), priorities: str = "", ageing: float | None = None) -> Source:
    """Return the source that the settings ask for: without ``priorities`` a plain queue.

    Raises SettingsError for what can't be used.
    """
    if not priorities:
        return PlainQueue(key, routing_keys)
    if priorities != BROKER:
        return PriorityQueues(key, priorities, routing_keys, ageing)
    if ageing is not None:
        raise SettingsError("RABBIT_PRIORITY_AGEING is for ranges: the broker's own priorities know no ageing")
    return BrokerPriorities(key, routing_keys)


def parse_ranges(text: str) -> tuple[range, ...]:
    """Return the priorities of each level, the lowest first: from "0-4,5-9", two.

    Raises SettingsError where they aren't all priorities once, in order.
    """
    found = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranges = tuple(range(int(one[1]), int(one[2] or one[1]) + 1) for one in found if one)
    if len(ranges) < len(found) or [number for one in ranges for number in one] != list(range(MAX_PRIORITY + 1)):
        raise SettingsError(
            f"RABBIT_PRIORITIES is {BROKER}, or the ranges from 0 to {MAX_PRIORITY} in order, like 0-4,5-9"
        )
    return ranges


def priority_of(properties: Any) -> int:
    """Return a message's priority, from 0 to 9: the header, and without one that can be read the property."""
    header = (properties.headers or {}).get(PRIORITY_HEADER)
    if isinstance(header, str) and _PRIORITY.fullmatch(header):
        return int(header)
    return min(max(properties.priority or 0, 0), MAX_PRIORITY)


@dataclass(frozen=True)
class PriorityQueues:
    """One logical queue over one physical queue for each range of priorities.

    Higher levels come first, whatever waits below; within a level what arrived first. That is strict: while there is
    work above, nothing below is handled. With ``ageing``, which is in seconds, a message rises by one level each time
    it has waited here for so long. ``key`` and ``routing_keys`` are as those of a `PlainQueue`.
    Raises SettingsError for what can't be used.
    """

    key: str
    ranges: str = "0-4,5-9"
    routing_keys: Sequence[str] = ()
    ageing: float | None = None

    def __post_init__(self) -> None:
        _ = self.levels
        if self.ageing is not None and not 0 < self.ageing < float("inf"):
            raise SettingsError("RABBIT_PRIORITY_AGEING is a number of seconds above 0")

    @property
    def levels(self) -> tuple[range, ...]:
        """The priorities of each level, the lowest first."""
        return parse_ranges(self.ranges)

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        """Return a queue for each level, the highest first, with a prefetch that doubles from one to the next.

        There are half as many threads again as the prefetch of the lowest, and at least two. So the lowest never has
        them all, and what is higher finds one at once; and any other level with a backlog has as many here as there are
        threads, or more, so that none of them turns to a lower one while the next of this level is on its way.
        """
        queue = names.queue(self.key)
        return [
            PhysicalQueue(level_queue(queue, level), (), min(prefetch * 2**level, 65535), level)
            for level in reversed(range(len(self.levels)))
        ]

    def create_buffer(self) -> DeliveryBuffer:
        """Return a place where higher levels come first."""
        return RankedBuffer(len(self.levels), lambda delivery: delivery.level, self.ageing)

    def routes(self, names: Names) -> Iterator[Exchange | Binding]:
        """Return the exchanges and bindings.

        Bindings of other ranges go first, while what they led elsewhere goes to the lowest level, and those of these
        ranges come last. One that was never there may be taken away all the same.
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
            # The move to the broker's own, or to fewer levels, had led it away.
            again = return_key(level_queue(queue, level))
            yield Binding(names.exchange, ranked, again, to_exchange=True, present=False)
            yield Binding(names.exchange, priority_queue(queue), again, present=False)
            if level:
                yield Binding(names.exchange, queue, again, present=False)


@dataclass(frozen=True)
class BrokerPriorities:
    """One logical queue that is one physical queue too, with the broker's own priorities.

    The broker sends what is highest of what waits there; what came already waits here by its priority. RabbitMQ has
    them for classic queues alone.
    """

    key: str
    routing_keys: Sequence[str] = ()

    def queues(self, names: Names, prefetch: int) -> Sequence[PhysicalQueue]:
        """Return the one queue."""
        name = priority_queue(names.queue(self.key))
        return [PhysicalQueue(name, (), prefetch, arguments={"x-max-priority": MAX_PRIORITY})]

    def create_buffer(self) -> DeliveryBuffer:
        """Return a place where higher priorities come first."""
        return RankedBuffer(MAX_PRIORITY + 1, lambda delivery: priority_of(delivery.properties), single_queue=True)

    def routes(self, names: Names) -> Iterator[Exchange | Binding]:
        """Return the bindings of this queue, and those of the ranges' queues, which go."""
        queue, ranked = names.queue(self.key), priority_exchange(names, self.key)
        own = priority_queue(queue)
        for key in _routing_keys(self, names):
            yield Binding(names.exchange, own, key)
            yield Binding(names.exchange, ranked, key, to_exchange=True, present=False)
            yield Binding(names.exchange, queue, key, present=False)
        yield Binding(names.exchange, ranked, return_key(own), to_exchange=True, present=False)


class RankedBuffer:
    """DeliveryBuffer by rank, from 0 to ``ranks`` - 1: the highest first, and of one rank what arrived first.

    With ``ageing`` a message's rank rises by one with each so many seconds that it waits, so that one of the lowest is
    before all that arrive later than ``ageing`` times the difference of their ranks. What is overdue is so later by the
    time that it takes to rise. ``clock`` gives seconds.
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
        """Add one at the end of its rank."""
        line = self._queues[self._rank(delivery)]
        with self._lock:
            line.append((self._clock(), delivery))
            self._length += 1

    def __len__(self) -> int:
        return self._length

    def take(self) -> Delivery | None:
        """Remove and return the first of the highest rank."""
        with self._lock:
            waiting = [rank for rank in range(len(self._queues) - 1, -1, -1) if self._queues[rank]]
            if not waiting:
                return None
            ageing = self._ageing
            if ageing is None or len(waiting) == 1:
                first = waiting[0]
            else:
                # As if those of a higher rank had come earlier: what is added by waiting is the same for all.
                first = min(waiting, key=lambda rank: self._queues[rank][0][0] - rank * ageing)
            self._length -= 1
            return self._queues[first].popleft()[1]

    def overdue(self) -> Sequence[Delivery]:
        """Remove and return what has waited too long, and what has to go with it; see `OverdueBuffer`.

        Those are all that would come before it, as its queue rests, and shouldn't: what is of its rank or below; and
        where all ranks come ``together``, from one queue, what is above, which would keep out what is higher still.
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
    """Return the name of the exchange that gets what has no priority of an upper level."""
    return f"{names.routing_key(key)}.unranked"


def _routing_keys(source: PriorityQueues | BrokerPriorities, names: Names) -> list[str]:
    return [names.routing_key(key) for key in source.routing_keys or [source.key]]


def _priority_binding(exchange: str, queue: str, level: int, priority: int, *, present: bool = True) -> Binding:
    arguments = {"x-match": "all", PRIORITY_HEADER: str(priority)}
    return Binding(exchange, level_queue(queue, level), arguments=arguments, present=present)
