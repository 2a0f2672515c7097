"""What becomes of a message whose callback raised an exception: the pure rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """What became of a message."""

    DONE = "done"
    """Handled and acknowledged."""
    HALT = "halt"
    """The consumer stops; the message goes back into its queue. Somebody decides when it is started again."""
    DISCARD = "discard"
    """Acknowledged and gone; a line in the log is all that is left."""
    REQUEUE = "requeue"
    """Back into its queue at once, the first time; parked the second time."""
    RETRY = "retry"
    """Back into its queue after a delay, longer each time; parked when it failed once more than there are delays."""
    PARK = "park"
    """Into the parking queue, with the exception in its headers, for a person to look at."""


class ExplicitOutcome(Exception):
    """What a callback raises to say itself what becomes of its message; use one of the classes below."""

    outcome = Outcome.PARK


class Halt(ExplicitOutcome):
    """Stop the consumer, and leave the message in its queue."""

    outcome = Outcome.HALT


class Discard(ExplicitOutcome):
    """This message needs no handling: log it and forget it."""

    outcome = Outcome.DISCARD


class Requeue(ExplicitOutcome):
    """Try again at once, maybe in another process; the second time the message is parked."""

    outcome = Outcome.REQUEUE


class Retry(ExplicitOutcome):
    """Try again later. ``after``: in so many seconds or somewhat more, by the delays that there are.

    Raises TypeError where that isn't a number.
    """

    outcome = Outcome.RETRY

    def __init__(self, *args: object, after: float | None = None) -> None:
        super().__init__(*args)
        if not isinstance(after, int | float | None):  # here the callback's own line is in the trace
            raise TypeError(f"after is a number of seconds, not {after!r}")
        self.after = after


class Park(ExplicitOutcome):
    """No other try will do: put the message where a person looks at it."""

    outcome = Outcome.PARK


class Unreadable(Exception):
    """The body can't be decoded, or nobody said how. Raised before the callback; no other try will change it."""


class TimeLimitExceeded(Exception):
    """The callback had its message for longer than its time limit."""


@dataclass(frozen=True)
class Policy:
    """What an exception means. ``default`` is for all that ``by_error`` doesn't name, the nearest class first.

    ``delays`` are seconds: before the second try, the third, and so on.
    """

    default: Outcome = Outcome.RETRY
    by_error: Mapping[type[BaseException], Outcome] = field(default_factory=dict)
    delays: Sequence[float] = (10, 60, 600)


class Decision(NamedTuple):
    """What becomes of a message; ``delay`` is in seconds, with RETRY alone."""

    outcome: Outcome
    delay: float = 0


def decide(error: BaseException, policy: Policy, attempts: int, redelivered: bool) -> Decision:
    """Return what becomes of a message.

    ``attempts`` is how often it failed before and was sent on a delay; ``redelivered`` is what the broker said.
    """
    outcome = _outcome(error, policy)
    if outcome is Outcome.REQUEUE and (redelivered or attempts):
        return Decision(Outcome.PARK)
    if outcome is not Outcome.RETRY:
        return Decision(outcome)
    if attempts >= len(policy.delays):
        return Decision(Outcome.PARK)
    after = error.after if isinstance(error, Retry) else None
    if after is None:
        return Decision(Outcome.RETRY, policy.delays[attempts])
    longest = max(policy.delays)
    return Decision(Outcome.RETRY, min((delay for delay in policy.delays if delay >= after), default=longest))


def _outcome(error: BaseException, policy: Policy) -> Outcome:
    if isinstance(error, ExplicitOutcome):
        return error.outcome
    if isinstance(error, Unreadable):
        # Somebody else's message is no reason to stop, and another try would end as this one.
        return Outcome.DISCARD if policy.default is Outcome.DISCARD else Outcome.PARK
    for kind in type(error).__mro__:
        if kind in policy.by_error:
            return policy.by_error[kind]
    # SystemExit and the like: whoever raises them wants the process to end.
    return policy.default if isinstance(error, Exception) else Outcome.HALT
