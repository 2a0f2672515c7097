"""The rule that decides the outcome of a message whose callback raised an exception."""

from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    DONE = "done"
    """Handled and acknowledged."""
    HALT = "halt"
    """Requeue the message and stop the consumer until an operator restarts it."""
    DISCARD = "discard"
    """Log the message and acknowledge it."""
    REQUEUE = "requeue"
    """Requeue immediately; park at the second failure."""
    RETRY = "retry"
    """Requeue after a delay that grows with each attempt; park when all delays are used up."""
    PARK = "park"
    """Move to the parking queue, with the exception in its headers, for an operator to inspect."""


class ExplicitOutcome(Exception):
    """Base class of the exceptions with which a callback chooses the outcome of its message."""

    outcome = Outcome.PARK


class Halt(ExplicitOutcome):
    """Stop the consumer and requeue the message."""

    outcome = Outcome.HALT


class Discard(ExplicitOutcome):
    """Log and acknowledge the message without handling it."""

    outcome = Outcome.DISCARD


class Requeue(ExplicitOutcome):
    """Requeue the message immediately, for any consumer; park it the second time."""

    outcome = Outcome.REQUEUE


class Retry(ExplicitOutcome):
    """Retry the message later. ``after`` seconds are rounded up to one of the policy's delays, at most the longest.

    Raises TypeError if ``after`` isn't a number.
    """

    outcome = Outcome.RETRY

    def __init__(self, *args: object, after: float | None = None) -> None:
        super().__init__(*args)
        if not isinstance(after, int | float | None):  # raised here, the traceback shows the callback's line
            raise TypeError(f"after must be a number of seconds, not {after!r}")
        self.after = after


class Park(ExplicitOutcome):
    """Move the message to the parking queue: retries would not help."""

    outcome = Outcome.PARK


class Unreadable(Exception):
    """The body can't be decoded, or has no decoder. Raised before the callback; retries would not help."""


class TimeLimitExceeded(Exception):
    """The callback exceeded its time limit."""


@dataclass(frozen=True)
class Policy:
    """Outcomes of exceptions: ``by_error`` for an exception's nearest class, or ``default``.

    ``delays`` are the seconds before the second attempt, the third, and so on.
    """

    default: Outcome = Outcome.RETRY
    by_error: Mapping[type[BaseException], Outcome] = field(default_factory=dict)
    delays: Sequence[float] = (10, 60, 600)


class Decision(NamedTuple):
    """The outcome of a message. ``delay`` is in seconds, for RETRY only."""

    outcome: Outcome
    delay: float = 0


def decide(error: BaseException, policy: Policy, attempts: int, redelivered: bool) -> Decision:
    """Return the outcome of a message.

    ``attempts`` is how often it failed and was delayed; ``redelivered`` is the broker's flag.
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
        # A bad message must not stop the consumer, and retries would not help.
        return Outcome.DISCARD if policy.default is Outcome.DISCARD else Outcome.PARK
    for kind in type(error).__mro__:
        if kind in policy.by_error:
            return policy.by_error[kind]
    # SystemExit and the like are meant to end the process, but a cancelled task of a callback is not.
    return policy.default if isinstance(error, Exception | CancelledError) else Outcome.HALT
