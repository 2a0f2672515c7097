"""The quiet period: how a queue that hovers around its warn length doesn't fill anybody's inbox.

A warning opens a period for its queue. The first recovery inside it goes out at once; further changes are counted,
and told in one message at its end, or in none where the last message still tells the truth. All of it is pure.
"""

from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from queues.thresholds import OK, WARNED


class Quiet(NamedTuple):
    """What is remembered of a queue's messages.

    ``said`` is the state (ok or warned) that the last message told; ``until`` the end of the open period, or None;
    ``recovery_said`` whether the period's one recovery went out; ``folded`` the changes that nobody was told of.
    """

    said: str = OK
    until: datetime | None = None
    recovery_said: bool = False
    folded: int = 0


class Say(Enum):
    """The message that is due, if any. The values are kinds of ``notifications.models.Notification``."""

    NOTHING = ""
    WARNING = "warning"
    RECOVERY = "recovery"
    SUMMARY = "summary"


def is_over(until: datetime | None, now: datetime) -> bool:
    """Return whether there was a quiet period and it has ended."""
    return until is not None and until <= now


def say(quiet: Quiet, state: str, *, changed: bool, now: datetime, quiet_seconds: int) -> tuple[Quiet, Say]:
    """Return what to remember and what to say of a queue that stands at ``state`` (ok or warned) at ``now``.

    ``changed`` says that it got there just now. Called for every queue that changed, and for every queue whose period
    has ended. The summary tells the ``folded`` of the ``Quiet`` that was given, plus one where ``changed``.
    """
    if is_over(quiet.until, now):
        if quiet.folded:
            return _close(quiet, state, now, quiet_seconds)
        quiet = Quiet(said=quiet.said)
    if not changed:
        return quiet, Say.NOTHING
    if quiet.until is None:
        if state == quiet.said:  # as after a second look that kept what nobody had been told was to go
            return quiet, Say.NOTHING
        if state == WARNED:
            return Quiet(WARNED, _end(now, quiet_seconds)), Say.WARNING
        return Quiet(OK), Say.RECOVERY
    if state == OK and quiet.said == WARNED and not quiet.recovery_said:
        return quiet._replace(said=OK, recovery_said=True), Say.RECOVERY
    return quiet._replace(folded=quiet.folded + 1), Say.NOTHING


def _close(quiet: Quiet, state: str, now: datetime, quiet_seconds: int) -> tuple[Quiet, Say]:
    if state == quiet.said:
        return Quiet(said=state), Say.NOTHING
    # A summary that leaves the queue above its warn length is a warning too, and opens the next period.
    return Quiet(state, _end(now, quiet_seconds) if state == WARNED else None), Say.SUMMARY


def _end(now: datetime, quiet_seconds: int) -> datetime | None:
    return now + timedelta(seconds=quiet_seconds) if quiet_seconds else None
