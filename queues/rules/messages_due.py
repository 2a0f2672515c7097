"""The next state of one queue that stays, and the message that is due about it. Pure."""

from datetime import datetime, timedelta
from typing import NamedTuple

from queues.rules import quiet
from queues.rules.changes import Message
from queues.rules.quiet import MessageKind
from queues.rules.rows import StoredQueue
from queues.rules.thresholds import DELETING, OK, WARNED, Thresholds, judge
from rabbit.snapshot import CLASSIC


class Timing(NamedTuple):
    """When messages about a queue are due.

    Its owners are warned when it has been over its warning threshold for ``hold_off``. ``reminds``: they are reminded
    now if it still is.
    """

    now: datetime
    quiet_seconds: int
    hold_off: timedelta = timedelta(0)
    reminds: bool = False


def judge_kept(queue: StoredQueue, thresholds: Thresholds, timing: Timing) -> tuple[StoredQueue, Message | None]:
    """Return a deletable queue that stays, in its new state, and the message that is due."""
    state = judge(queue.last_notified_state, queue.length, thresholds, spared=True).state
    return with_state(queue, state, thresholds, timing)


def with_state(
    queue: StoredQueue, state: str, thresholds: Thresholds, timing: Timing
) -> tuple[StoredQueue, Message | None]:
    """Return a queue in its new state, and the message that is due."""
    after, now = _with_warned_since(queue, state, timing.now), timing.now
    if state != queue.state or queue.delete_sent_at is not None:
        after = after._replace(state=state, delete_sent_at=None)
    is_quiet = queue.quiet_until is not None and not quiet.is_over(queue.quiet_until, now)
    announced = OK if not is_quiet and _is_held_off(after, timing) else state
    changed = announced != (queue.last_notified_state if is_quiet else queue.notified_state)
    due = MessageKind.NONE
    if changed or quiet.is_over(queue.quiet_until, now):
        period, due = quiet.next_message(
            queue.quiet_period, announced, changed=changed, now=now, quiet_seconds=timing.quiet_seconds
        )
        after = after.with_quiet_period(period)
    if due is MessageKind.NONE and timing.reminds and announced == WARNED:
        after, due = after._replace(reminded_at=now), MessageKind.REMINDER
    if due is MessageKind.NONE:
        return after, None
    merged = queue.merged + (state != queue.last_notified_state) if due is MessageKind.SUMMARY else 0
    return after, Message(after, due, thresholds, merged)


def _with_warned_since(queue: StoredQueue, state: str, now: datetime) -> StoredQueue:
    """Return a queue with the time since when it has been over its warning threshold, or None if it isn't."""
    since = None
    if state == WARNED:
        since = queue.warned_since if queue.state in (WARNED, DELETING) and queue.warned_since else now
    return queue if since == queue.warned_since else queue._replace(warned_since=since)


def _is_held_off(queue: StoredQueue, timing: Timing) -> bool:
    """Return whether the owners of a queue over its threshold are not warned yet. A blocked deletion does not wait."""
    if queue.state != WARNED or queue.notified_state == WARNED or queue.block_reason or queue.warned_since is None:
        return False
    return timing.now - queue.warned_since < timing.hold_off


def with_over_unacked(queue: StoredQueue, thresholds: Thresholds, now: datetime) -> StoredQueue:
    """Return the queue with the time since when only its unacknowledged messages put it over its limit."""
    since = None
    if queue.type != CLASSIC and queue.ready is not None and queue.length is not None:
        is_over = queue.ready <= thresholds.max < queue.length
        since = min(queue.over_unacked_since or now, now) if is_over else None
    return queue if since == queue.over_unacked_since else queue._replace(over_unacked_since=since)
