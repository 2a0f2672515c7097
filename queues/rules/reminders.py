"""Reminders of queues that stay over their warning threshold, and the acknowledgement that stops them. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from queues.rules.thresholds import DELETING, WARNED
from rabbit.names import QueueName

if TYPE_CHECKING:
    from queues.models import Queue
    from queues.rules.rows import StoredQueue


def is_acknowledged(queue: "Queue | StoredQueue") -> bool:
    """Return whether somebody acknowledged the present warning. It ends when the queue is back to normal."""
    if queue.state not in (WARNED, DELETING) or queue.acknowledged_at is None or queue.warned_since is None:
        return False
    return queue.acknowledged_at >= queue.warned_since


def due(queues: Iterable["StoredQueue"], interval: timedelta, now: datetime) -> frozenset[QueueName]:
    """Return the queues about which their owners are reminded now, those of one Pulse user or owner together.

    A queue is due when it has been over its warning threshold for an interval. If one is, the others that have been for
    half of it are reminded of, too. So an owner of many queues gets one message a day about all of them.
    """
    if not interval:
        return frozenset()
    over = defaultdict(list)
    for queue in queues:
        if queue.warned_since and _may_be_due(queue):
            over[queue.ownership].append((now - queue.warned_since, queue))
    reminded_now: list[StoredQueue] = []
    for group in over.values():
        reminded = max((queue.reminded_at for _, queue in group if queue.reminded_at), default=None)
        if (not reminded or now - reminded >= interval) and any(time >= interval for time, _ in group):
            reminded_now += [queue for time, queue in group if time >= interval / 2]
    return frozenset((queue.vhost, queue.name) for queue in reminded_now)


def _may_be_due(queue: "StoredQueue") -> bool:
    return queue.state == queue.notified_state == WARNED and not is_acknowledged(queue)
