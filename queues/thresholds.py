"""When a queue is warned about, when it is deleted, and where the thresholds come from.

``judge`` is the rule, the only one. It is pure: it sees figures, and answers with the next state and what to do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from django.conf import settings

if TYPE_CHECKING:
    from queues.models import Queue

OK, WARNED, DELETING, GONE = "ok", "warned", "deleting", "gone"  # the values of queues.models.Queue.State


class Thresholds(NamedTuple):
    """Both in messages: at ``warn`` owners are warned, past ``max`` the queue is deleted."""

    warn: int
    max: int


class Action(Enum):
    """What a pass has to do about one queue."""

    NOTHING = "nothing"
    WARN = "warn"
    RECOVER = "recover"
    DELETE = "delete"


class Verdict(NamedTuple):
    """Where a queue stands now, and what follows."""

    state: str
    action: Action


def judge(state: str, length: int | None, thresholds: Thresholds, *, spared: bool) -> Verdict:
    """Return the next state of a queue and what to do.

    ``state`` is where it stood, ``length`` its ready plus unacknowledged messages (None: unknown), and ``spared`` says
    that it must not be deleted now: it is unbounded, exclusive, ignored or registered, the brake holds, or only its
    unacknowledged messages keep it over its limit, and not for ``UNACKED_MINIMUM`` yet.
    A queue in state deleting is judged anew: it came back, or the pass that wanted to delete it did not get there.
    """
    if length is None:
        return Verdict(state, Action.NOTHING)
    if length > thresholds.max and not spared:
        return Verdict(DELETING, Action.DELETE)
    if length >= thresholds.warn:
        return Verdict(WARNED, Action.NOTHING if state == WARNED else Action.WARN)
    return Verdict(OK, Action.NOTHING if state == OK else Action.RECOVER)


UNACKED_MINIMUM = timedelta(seconds=12)
"""How long unacknowledged messages must keep a queue over its limit before it is deleted, if its listed length lags.

The list shows such a queue as of its last tick, which is up to 5 s old. Only its ready count can be rechecked.
"""


def over_unacked_since(since: datetime | None, ready: int, length: int, limit: int, now: datetime) -> datetime | None:
    """Return since when a queue has been over its limit only with its unacknowledged messages; None: it is not.

    ``since`` is the answer for the previous list.
    """
    if not ready <= limit < length:
        return None
    return now if since is None else min(since, now)


@dataclass(frozen=True)
class BrokerState:
    """What a policy may know of the broker.

    ``memory`` is the highest use of any node as a fraction of its watermark (0 where unknown); ``long`` the length in
    messages from which a queue counts among the longest.
    """

    memory: float = 0.0
    long: int = 0


class Policy(Protocol):
    """Where the thresholds come from for a queue that has none of its own, nor its Pulse user."""

    @property
    def thresholds(self) -> Thresholds:
        """The pair while the broker has memory to spare. No other one it gives has less than the lesser of these."""

    @property
    def needs_memory(self) -> bool:
        """Whether it goes by the broker's memory, which then has to be asked for."""

    def __call__(self, length: int | None, broker: BrokerState) -> Thresholds:
        """Return the thresholds of a queue of this length."""


@dataclass(frozen=True)
class Static:
    """One pair of thresholds for everybody."""

    thresholds: Thresholds
    needs_memory: bool = False

    def __call__(self, length: int | None, broker: BrokerState) -> Thresholds:
        """Return the pair."""
        return self.thresholds


@dataclass(frozen=True)
class MemoryPressure:
    """The longest queues have to go earlier as the broker's memory nears its watermark.

    From ``PRESSURE_START`` of the watermark on, the maximum of the longest queues falls evenly, to the warn length at the
    watermark, and never below it.
    """

    thresholds: Thresholds
    needs_memory: bool = True

    PRESSURE_START = 0.8

    def __call__(self, length: int | None, broker: BrokerState) -> Thresholds:
        """Return the pair, its maximum lowered where the queue is among the longest."""
        warn, most = self.thresholds
        if length is None or length < broker.long or broker.memory <= self.PRESSURE_START:
            return self.thresholds
        pressure = min(1.0, (broker.memory - self.PRESSURE_START) / (1 - self.PRESSURE_START))
        return Thresholds(warn, max(warn, round(most - pressure * (most - warn))))


POLICIES: dict[str, Callable[[Thresholds], Policy]] = {"static": Static, "memory-pressure": MemoryPressure}


def long_length(lengths: Sequence[int]) -> int:
    """Return the length from which a queue is among the longest: the longest tenth, one at least."""
    if not lengths:
        return 0
    return sorted(lengths, reverse=True)[len(lengths) // 10]


NOT_SET = (None, None)


def resolve(
    own: tuple[int | None, int | None], of_user: tuple[int | None, int | None], policy: Thresholds
) -> Thresholds:
    """Return the thresholds that apply: the queue's own, else its Pulse user's, else the policy's, each by itself.

    The two may come from different places: then nobody is warned later than at the maximum.
    """
    if own == of_user == NOT_SET:  # nearly all, and this is asked for every queue in every pass
        return policy
    warn, most = (
        next(value for value in values if value is not None) for values in zip(own, of_user, policy, strict=True)
    )
    return Thresholds(min(warn, most), most)


def policy() -> Policy:
    """Return the policy that the settings choose."""
    return POLICIES[settings.GUARDIAN_THRESHOLD_POLICY](
        Thresholds(settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH)
    )


def of_queue(queue: "Queue") -> Thresholds:
    """Return the thresholds of a queue while the broker has memory to spare, as a page shows them."""
    user = queue.pulse_user
    of_user = (user.warn_length, user.max_length) if user else NOT_SET
    return resolve((queue.warn_length, queue.max_length), of_user, policy()(queue.length, BrokerState()))


def brake_limit(brake: int, seen: int) -> int:
    """Return how many queues may go at once: the brake or a quarter of all that can be seen, whichever is larger."""
    return max(brake, seen // 4)
