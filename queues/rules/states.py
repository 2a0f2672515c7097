"""The condition of a queue: one of four levels, and a word. Lists, pages, the front page and the API ask for it.

Critical is what is lost, or will be within half an hour. What is normal is shown by nothing.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from core.formatting import short_duration
from queues.models import Queue
from queues.rules.thresholds import Thresholds, is_spared
from rabbit.names import DEAD_LETTER_QUEUE
from rabbit.snapshot import MQTT_QOS_0, STREAM

CRITICAL_SECONDS = 30 * 60
PREDICTED_SECONDS = 24 * 60 * 60
"""A queue that reaches its limit later than this may as well not reach it."""

UNCONSUMED_NAMES = r"\.(parked|retry\.[0-9]+m?s)\Z"
"""The names of the consumer toolkit's parking and delay queues (``guardian_consumers.names``). They have no consumer:
their messages wait for an operator, or for their next attempt."""


class Level(StrEnum):
    NORMAL = "normal"
    UNKNOWN = "unknown"
    WARNING = "warning"
    CRITICAL = "critical"


class Condition(NamedTuple):
    level: Level
    word: str

    @property
    def needs_attention(self) -> bool:
        """Whether something is to be done about it."""
        return self.level in (Level.WARNING, Level.CRITICAL)


def condition(
    queue: Queue, limits: Thresholds, seconds_to_max: float | None = None, *, was_deleted: bool = False
) -> Condition:
    """Return the condition of a queue. ``was_deleted``: it is gone, because Guardian deleted it."""
    if queue.state == Queue.State.GONE:
        return Condition(Level.CRITICAL, "deleted") if was_deleted else Condition(Level.NORMAL, "gone")
    if queue.is_blocked:
        return Condition(Level.CRITICAL, "deletion blocked")
    if queue.state == Queue.State.DELETING:
        return Condition(Level.CRITICAL, "about to be deleted")
    if queue.length is None:
        return Condition(Level.UNKNOWN, "length unknown") if has_length(queue) else Condition(Level.NORMAL, "no length")
    if not is_spared(queue):
        if queue.length > limits.max:
            return Condition(Level.CRITICAL, "over deletion limit")
        if seconds_to_max is not None and seconds_to_max < CRITICAL_SECONDS:
            return Condition(Level.CRITICAL, f"deleted in {short_duration(seconds_to_max)}")
    if queue.state == Queue.State.WARNED and queue.length:  # an empty one was purged since the last pass
        is_predicted = seconds_to_max is not None and seconds_to_max < PREDICTED_SECONDS and not is_spared(queue)
        left = f"deleted in {short_duration(seconds_to_max)}" if seconds_to_max is not None and is_predicted else ""
        return Condition(Level.WARNING, left or "over threshold")
    if is_stalled(queue):
        return Condition(Level.WARNING, "stalled")
    if is_unread(queue):
        return Condition(Level.WARNING, "no consumers")
    return Condition(Level.NORMAL, "healthy")


def has_length(queue: Queue) -> bool:
    """Return whether a queue of this type has a length, by which it is judged."""
    return queue.type not in (STREAM, MQTT_QOS_0)


def should_have_consumer(name: str, *, exclusive: bool, registered: bool) -> bool:
    """Return whether this queue is meant to have a consumer. ``listing.WITHOUT_CONSUMER`` is the same rule as a query.

    Dead-letter, parking and delay queues need none. An exclusive queue belongs to one connection, which may consume it
    at any time.
    """
    return not exclusive and not (registered and name == DEAD_LETTER_QUEUE) and not re.search(UNCONSUMED_NAMES, name)


def is_unread(queue: Queue) -> bool:
    """Return whether a queue has messages, and lacks a consumer that it should have."""
    missed = should_have_consumer(queue.name, exclusive=queue.exclusive, registered=queue.registered)
    return queue.consumers == 0 and missed and bool(queue.ready or queue.unacknowledged)


def is_stalled(queue: Queue) -> bool:
    """Return whether owners were notified of a stall that is not over, as in ``listing.STALLED``."""
    return queue.stalled_notified_at is not None and queue.consumers != 0
