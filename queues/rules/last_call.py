"""The last call: a critical warning that a queue is about to reach its deletion limit. Pure.

It is due once for each limit. It is due again after the owners were notified that the queue is back to normal, and
after the limit was changed.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from queues.rules import growth, quiet
from queues.rules.changes import Message
from queues.rules.quiet import MessageKind
from queues.rules.rows import StoredQueue
from queues.rules.states import CRITICAL_SECONDS
from queues.rules.thresholds import Thresholds, is_spared

SHARE = 0.8
"""A queue is near its limit from this share of the way from its warning threshold to the limit."""


def may_be_due(queue: StoredQueue, thresholds: Thresholds, limit: int) -> bool:
    """Return whether a last call about this queue was not sent, and Guardian will delete the queue past its limit.

    ``limit`` is the limit without memory pressure, which moves it in each pass.
    """
    is_over = queue.length is None or queue.length > thresholds.max
    return not (is_over or is_spared(queue) or queue.block_reason or queue.last_call_limit == limit)


def is_near(length: int, thresholds: Thresholds) -> bool:
    warn, limit = thresholds
    return length >= warn + SHARE * (limit - warn)


def is_soon(samples: Sequence[growth.Sample], length: int, limit: int, now: datetime) -> bool:
    """Return whether a queue reaches its limit within half an hour, by its growth for at least as long as a burst."""
    if not samples or now - samples[0][0] < timedelta(seconds=growth.RECENT_SECONDS):
        return False
    grows = growth.growth([*samples, (now, length)], limit)
    return grows is not None and grows.seconds_to_max is not None and grows.seconds_to_max <= CRITICAL_SECONDS


def with_last_call(
    queue: StoredQueue, thresholds: Thresholds, limit: int, now: datetime, quiet_seconds: int
) -> tuple[StoredQueue, Message]:
    """Return a queue about which the last call is sent, and the message. It replaces any other message of this pass."""
    period = quiet.after_last_call(queue.quiet_period, now, quiet_seconds)
    after = queue.with_quiet_period(period)._replace(last_call_limit=limit)
    return after, Message(after, MessageKind.LAST_CALL, thresholds)
