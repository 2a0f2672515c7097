"""When a queue is warned about, when it is deleted, and where the thresholds come from.

``judge`` is the only rule about lengths. It is pure: it takes figures, and returns the next state and the action.
``comparison.py`` deletes queues for their names.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from django.conf import settings

from rabbit.memory import NodeMemory
from rabbit.snapshot import TYPES_WITHOUT_LENGTH

if TYPE_CHECKING:
    from queues.models import Queue
    from queues.rules.rows import StoredQueue

OK, WARNED, DELETING, GONE = "ok", "warned", "deleting", "gone"  # the values of queues.models.Queue.State


class Thresholds(NamedTuple):
    """Lengths in messages: at ``warn`` owners are warned, above ``max`` the queue is deleted."""

    warn: int
    max: int


class Action(Enum):
    NOTHING = "nothing"
    WARN = "warn"
    RECOVER = "recover"
    DELETE = "delete"


class Verdict(NamedTuple):
    state: str
    action: Action


def judge(state: str, length: int | None, thresholds: Thresholds, *, spared: bool) -> Verdict:
    """Return the next state of a queue, and the action.

    ``length`` is ready plus unacknowledged messages, or None if unknown. A queue that is ``spared`` must not be deleted
    now: it is unbounded, exclusive or registered; the list is too short to trust; only its unacknowledged messages put
    it over its limit, for less than ``UNACKED_MINIMUM``; or its messages are not fetched, and one list shows it too
    long.
    """
    if length is None:
        return Verdict(state, Action.NOTHING)
    if length > thresholds.max and not spared:
        return Verdict(DELETING, Action.DELETE)
    if length >= thresholds.warn:
        return Verdict(WARNED, Action.NOTHING if state == WARNED else Action.WARN)
    return Verdict(OK, Action.NOTHING if state == OK else Action.RECOVER)


def is_spared(queue: "Queue | StoredQueue") -> bool:
    """Return whether a queue is never deleted for its length."""
    return queue.unbounded or queue.exclusive or queue.registered


def has_limit(queue: "Queue | StoredQueue") -> bool:
    """Return whether a deletion limit applies to a queue. A stream may be deleted for its name only."""
    return not is_spared(queue) and queue.type not in TYPES_WITHOUT_LENGTH


UNACKED_MINIMUM = timedelta(seconds=12)
"""A queue over its limit only with its unacknowledged messages is deleted after this time, if its length lags.

The list shows such a queue as of its last tick, up to 5 s ago. Only its ready count can be rechecked.
"""


FETCH_PAUSE = timedelta(hours=1)
"""How long the messages of a queue are not fetched after they were returned to it, if that counts as a delivery.

The broker drops messages that were delivered too often. So until then the queue stays up to twice its limit, and is
deleted past that without a copy.
"""


def is_fetch_paused(returned_at: datetime | None, now: datetime) -> bool:
    """Return whether the messages of a queue must not be fetched now, to decide about its deletion."""
    return returned_at is not None and now - returned_at < FETCH_PAUSE


def fetch_paused_until(queue: "Queue", now: datetime) -> datetime | None:
    """Return until when the messages of a queue must not be fetched, or None if they may be."""
    return queue.returned_at + FETCH_PAUSE if queue.returned_at and is_fetch_paused(queue.returned_at, now) else None


class QueueLoad(NamedTuple):
    """What a policy considers of a queue: its length in messages, and the bytes of memory it holds, or 0 if unknown."""

    length: int | None
    memory: int = 0


@dataclass(frozen=True)
class BrokerState:
    """The state of a queue's node that a policy considers.

    ``memory`` is the node's used memory, as a fraction of its watermark, or 0 if unknown. ``relief`` is the result of
    ``relief_bytes``.
    """

    memory: float = 0.0
    relief: float = math.inf


class Policy(Protocol):
    """The source of thresholds for a queue without its own, whose Pulse user sets none either."""

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds without memory pressure. Under pressure, neither falls below the smaller of them."""

    @property
    def needs_memory(self) -> bool:
        """Whether the policy considers the broker's memory, so that the nodes are queried."""

    def __call__(self, queue: QueueLoad, broker: BrokerState) -> Thresholds:
        """Return the thresholds of a queue."""


@dataclass(frozen=True)
class Static:
    thresholds: Thresholds
    needs_memory: bool = False

    def __call__(self, queue: QueueLoad, broker: BrokerState) -> Thresholds:
        return self.thresholds


@dataclass(frozen=True)
class MemoryPressure:
    """Lower the deletion limit of the queues that hold the most memory of a node as it nears its watermark.

    From ``PRESSURE_START`` of the watermark on, the limit falls linearly. At the watermark it reaches the warning
    threshold, and never falls below it.
    """

    thresholds: Thresholds
    needs_memory: bool = True

    PRESSURE_START = 0.8

    def __call__(self, queue: QueueLoad, broker: BrokerState) -> Thresholds:
        """Return the thresholds, with a lower limit if the queue is among those that hold the most memory."""
        warn, limit = self.thresholds
        if queue.memory < broker.relief or broker.memory <= self.PRESSURE_START:
            return self.thresholds
        pressure = min(1.0, (broker.memory - self.PRESSURE_START) / (1 - self.PRESSURE_START))
        return Thresholds(warn, max(warn, round(limit - pressure * (limit - warn))))


POLICIES: dict[str, Callable[[Thresholds], Policy]] = {"static": Static, "memory-pressure": MemoryPressure}


MIN_RELIEF = 0.01
"""A queue that holds less than this fraction of the watermark is never deleted for the memory that it holds."""


def relief_bytes(node: NodeMemory, held: Iterable[int]) -> float:
    """Return the size above which queues are deleted to free memory, in bytes, or infinity for none.

    ``held`` are the bytes that the queues hold that may be deleted. The largest are deleted, until the node's memory
    would be back at ``PRESSURE_START``.
    """
    excess = node.used - MemoryPressure.PRESSURE_START * node.watermark
    smallest = math.inf
    for size in sorted(held, reverse=True):
        if excess <= 0 or size < MIN_RELIEF * node.watermark:
            break
        excess -= size
        smallest = size
    return smallest


NOT_SET = (None, None)


def resolve(
    own: tuple[int | None, int | None], of_user: tuple[int | None, int | None], policy: Thresholds
) -> Thresholds:
    """Return the thresholds that apply, each separately: the queue's own, else its Pulse user's, else the policy's.

    As the two may come from different sources, the warning threshold is capped at the deletion limit.
    """
    if own == of_user == NOT_SET:  # true for nearly every queue, and a pass calls this for each
        return policy
    warn, limit = (
        next(value for value in values if value is not None) for values in zip(own, of_user, policy, strict=True)
    )
    return Thresholds(min(warn, limit), limit)


def policy() -> Policy:
    return POLICIES[settings.GUARDIAN_THRESHOLD_POLICY](
        Thresholds(settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH)
    )


def of_decision(queue: "Queue") -> Thresholds:
    """Return the thresholds by which a recorded decision to delete a queue is carried out.

    They are those of now, with a limit that is not below that of the decision. A limit that memory pressure lowered
    stays, unless the queue or its Pulse user has a limit now.
    """
    now = of_queue(queue)
    user = queue.pulse_user
    decided = queue.decided_limit or 0
    has_own = queue.max_length is not None or (user is not None and user.max_length is not None)
    for_memory = queue.decided_for == queue.DecidedFor.MEMORY and not has_own
    limit = decided if for_memory else max(now.max, decided)
    return Thresholds(min(now.warn, limit), limit)


def of_queue(queue: "Queue") -> Thresholds:
    """Return the thresholds of a queue without memory pressure, as pages show them."""
    user = queue.pulse_user
    of_user = (user.warn_length, user.max_length) if user else NOT_SET
    return resolve((queue.warn_length, queue.max_length), of_user, policy()(QueueLoad(queue.length), BrokerState()))
