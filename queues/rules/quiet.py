"""The quiet period: limit the messages about a queue whose length hovers around its warning threshold.

A warning opens a quiet period for its queue. The first recovery inside it is sent immediately. Later changes are
counted, and reported in one summary at the end; no summary is sent if the last message is still true. All pure.
"""

from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from queues.rules.thresholds import OK, WARNED


class QuietPeriod(NamedTuple):
    """The messages already sent about a queue.

    ``notified_state`` is the state (ok or warned) in the last message. ``until`` is the end of the open period, or
    None. ``recovery_sent``: this period's one recovery was sent. ``merged`` counts the changes left for the summary.
    """

    notified_state: str = OK
    until: datetime | None = None
    recovery_sent: bool = False
    merged: int = 0


class MessageKind(Enum):
    """The message that is due, if any. The values are kinds of ``notifications.models.Notification``."""

    NONE = ""
    WARNING = "warning"
    LAST_CALL = "last-call"
    RECOVERY = "recovery"
    SUMMARY = "summary"
    REMINDER = "reminder"


def is_over(until: datetime | None, now: datetime) -> bool:
    """Return whether there was a quiet period and it has ended."""
    return until is not None and until <= now


def next_message(
    period: QuietPeriod, state: str, *, changed: bool, now: datetime, quiet_seconds: int
) -> tuple[QuietPeriod, MessageKind]:
    """Return the next quiet period, and the message that is due, for a queue in ``state`` (ok or warned) at ``now``.

    ``changed``: this pass moved the queue into that state. Call it for every queue that changed, and for every queue
    whose period has ended. A summary reports the ``merged`` changes of the given period, plus one if ``changed``.
    """
    if is_over(period.until, now):
        if period.merged:
            return _close(period, state, now, quiet_seconds)
        period = QuietPeriod(period.notified_state)
    if not changed:
        return period, MessageKind.NONE
    if period.until is None:
        if state == period.notified_state:  # a recheck kept the queue before anybody was notified
            return period, MessageKind.NONE
        if state == WARNED:
            return QuietPeriod(WARNED, _end(now, quiet_seconds)), MessageKind.WARNING
        return QuietPeriod(OK), MessageKind.RECOVERY
    if state == OK and period.notified_state == WARNED and not period.recovery_sent:
        return period._replace(notified_state=OK, recovery_sent=True), MessageKind.RECOVERY
    return period._replace(merged=period.merged + 1), MessageKind.NONE


def after_last_call(period: QuietPeriod, now: datetime, quiet_seconds: int) -> QuietPeriod:
    """Return the quiet period after a last call, which is sent in any. Without an open one, it opens one."""
    if period.until is None or is_over(period.until, now):
        return QuietPeriod(WARNED, _end(now, quiet_seconds))
    return period._replace(notified_state=WARNED, merged=0)


def _close(period: QuietPeriod, state: str, now: datetime, quiet_seconds: int) -> tuple[QuietPeriod, MessageKind]:
    if state == period.notified_state:
        return QuietPeriod(state), MessageKind.NONE
    # A summary that leaves the queue above its warning threshold is a warning too, and opens the next period.
    return QuietPeriod(state, _end(now, quiet_seconds) if state == WARNED else None), MessageKind.SUMMARY


def _end(now: datetime, quiet_seconds: int) -> datetime | None:
    return now + timedelta(seconds=quiet_seconds) if quiet_seconds else None
