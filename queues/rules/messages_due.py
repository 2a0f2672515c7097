"""The next state of one queue that stays, and the message that is due about it. Pure."""

from datetime import datetime

from queues.rules import quiet
from queues.rules.changes import Message
from queues.rules.quiet import MessageKind
from queues.rules.rows import Rules, StoredQueue
from queues.rules.thresholds import Thresholds, judge, over_unacked_since
from rabbit.snapshot import CLASSIC


def judge_kept(
    queue: StoredQueue, thresholds: Thresholds, rules: Rules, now: datetime
) -> tuple[StoredQueue, Message | None]:
    """Return a deletable queue that stays, in its new state, and the message that is due."""
    state = judge(queue.last_notified_state, queue.length, thresholds, spared=True).state
    return with_state(queue, state, thresholds, rules, now)


def with_state(
    queue: StoredQueue, state: str, thresholds: Thresholds, rules: Rules, now: datetime
) -> tuple[StoredQueue, Message | None]:
    """Return a queue in its new state, and the message that is due."""
    last_notified_state = queue.last_notified_state
    after = queue
    if state != queue.state or queue.delete_sent_at is not None:
        after = queue._replace(state=state, delete_sent_at=None)
    if state == last_notified_state and not quiet.is_over(queue.quiet_until, now):
        return after, None
    period, due = quiet.next_message(
        queue.quiet_period, state, changed=state != last_notified_state, now=now, quiet_seconds=rules.quiet_seconds
    )
    after = after.with_quiet_period(period)
    if due is MessageKind.NONE:
        return after, None
    return after, Message(
        after, due, thresholds, queue.merged + (state != last_notified_state) if due is MessageKind.SUMMARY else 0
    )


def with_over_unacked(queue: StoredQueue, thresholds: Thresholds, now: datetime) -> StoredQueue:
    """Return the queue with the time since when only its unacknowledged messages put it over its limit."""
    since = None
    if queue.type != CLASSIC and queue.ready is not None and queue.length is not None:
        since = over_unacked_since(queue.over_unacked_since, queue.ready, queue.length, thresholds.max, now)
    return queue if since == queue.over_unacked_since else queue._replace(over_unacked_since=since)
