"""When a queue is warned about, when it is deleted, and where the thresholds come from.

``judge`` is the only rule. It is pure: it takes figures, and returns the next state and the action.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from django.conf import settings

if TYPE_CHECKING:
    from queues.comparison import StoredQueue
    from queues.models import Queue

OK, WARNED, DELETING, GONE = "ok", "warned", "deleting", "gone"  # the values of queues.models.Queue.State


class Thresholds(NamedTuple):
    """Lengths in messages: at ``warn`` owners are warned, above ``max`` the queue is deleted."""

    warn: int
    max: int


class Action(Enum):
    """What a pass does about one queue."""

    NOTHING = "nothing"
    WARN = "warn"
    RECOVER = "recover"
    DELETE = "delete"


class Verdict(NamedTuple):
    """The next state of a queue, and the action."""

    state: str
    action: Action


def judge(state: str, length: int | None, thresholds: Thresholds, *, spared: bool) -> Verdict:
    """Return the next state of a queue, and the action.

    ``length`` is ready plus unacknowledged messages; None: unknown. A queue that is ``spared`` must not be deleted now:
    it is unbounded, exclusive or registered; the list is too short to trust; or only its unacknowledged messages put it
    over its limit, for less than ``UNACKED_MINIMUM``.
    A queue in state deleting is judged again: it was declared again, or an earlier pass did not delete it.
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


UNACKED_MINIMUM = timedelta(seconds=12)
"""A queue over its limit only with its unacknowledged messages is deleted after this time, if its length lags.

The list shows such a queue as of its last tick, up to 5 s ago. Only its ready count can be rechecked.
"""


def over_unacked_since(since: datetime | None, ready: int, length: int, limit: int, now: datetime) -> datetime | None:
    """Return the time since when only its unacknowledged messages put a queue over its limit; None: they do not.

    ``since`` is the result for the previous list.
    """
    if not ready <= limit < length:
        return None
    return now if since is None else min(since, now)


@dataclass(frozen=True)
class BrokerState:
    """The state of the broker that a policy considers.

    ``memory`` is the highest memory use of any node, as a fraction of its watermark (0: unknown). ``long`` is the
    length in messages from which a queue counts among the longest.
    """

    memory: float = 0.0
    long: int = 0


class Policy(Protocol):
    """The source of thresholds for a queue without its own, whose Pulse user sets none either."""

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds without memory pressure. Under pressure, neither falls below the smaller of them."""

    @property
    def needs_memory(self) -> bool:
        """Whether the policy considers the broker's memory, so that the nodes are queried."""

    def __call__(self, length: int | None, broker: BrokerState) -> Thresholds:
        """Return the thresholds of a queue of this length."""


@dataclass(frozen=True)
class Static:
    """The same thresholds for all queues."""

    thresholds: Thresholds
    needs_memory: bool = False

    def __call__(self, length: int | None, broker: BrokerState) -> Thresholds:
        """Return the fixed thresholds."""
        return self.thresholds


@dataclass(frozen=True)
class MemoryPressure:
    """Lower the deletion limit of the longest queues as the broker's memory nears its watermark.

    From ``PRESSURE_START`` of the watermark on, the limit falls linearly. At the watermark it reaches the warning
    threshold, and never falls below it.
    """

    thresholds: Thresholds
    needs_memory: bool = True

    PRESSURE_START = 0.8

    def __call__(self, length: int | None, broker: BrokerState) -> Thresholds:
        """Return the thresholds, with a lower limit if the queue is among the longest."""
        warn, limit = self.thresholds
        if length is None or length < broker.long or broker.memory <= self.PRESSURE_START:
            return self.thresholds
        pressure = min(1.0, (broker.memory - self.PRESSURE_START) / (1 - self.PRESSURE_START))
        return Thresholds(warn, max(warn, round(limit - pressure * (limit - warn))))


POLICIES: dict[str, Callable[[Thresholds], Policy]] = {"static": Static, "memory-pressure": MemoryPressure}


def long_length(lengths: Sequence[int]) -> int:
    """Return the length of the shortest queue among the longest tenth, or among the longest one of fewer than ten."""
    if not lengths:
        return 0
    return sorted(lengths, reverse=True)[max(1, len(lengths) // 10) - 1]


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
    """Return the policy from the settings."""
    return POLICIES[settings.GUARDIAN_THRESHOLD_POLICY](
        Thresholds(settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH)
    )


def of_queue(queue: "Queue") -> Thresholds:
    """Return the thresholds of a queue without memory pressure, as pages show them."""
    user = queue.pulse_user
    of_user = (user.warn_length, user.max_length) if user else NOT_SET
    return resolve((queue.warn_length, queue.max_length), of_user, policy()(queue.length, BrokerState()))
