"""Whose recorded deletion is carried out next, and when a queue is deleted without a copy. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from queues.rules.rows import StoredQueue

LONGEST_GAP = timedelta(seconds=45)
"""If the deleter did not look for decisions for longer, it counts as not running. It does so each second.

After a kill, its lease keeps the next one waiting for 60 to 90 s: that time must not count.
"""

MAX_ATTEMPTS = 2
"""After this number of interrupted attempts to archive its messages, a queue is deleted without a copy."""
FORGET_ATTEMPTS_AFTER = timedelta(days=1)

Group = int | None
"""An owner, by primary key. Queues without owner are the group None."""


class Waiting(NamedTuple):
    """A recorded deletion that was not carried out yet."""

    queue: StoredQueue
    group: Group


def next_in_turn(
    waiting: Iterable[Waiting], running: Mapping[Group, int], last_turns: Mapping[Group, int], deleters: int
) -> Waiting | None:
    """Return the deletion to begin next, or None if those that wait must wait for others of their group.

    Groups take turns: the one whose last turn is longest ago is next. In a group the oldest decision is first.
    ``running`` counts the deletions under way in each group, of ``deleters`` at most. A group has half of the deleters
    while others wait. Otherwise it has all but one, so that the first queue of another group need not wait.
    """
    oldest: dict[Group, Waiting] = {}
    for one in waiting:
        first = oldest.setdefault(one.group, one)
        if _since(one) < _since(first):
            oldest[one.group] = one
    most = max(1, deleters // 2 if len(oldest) > 1 else deleters - 1)
    ready = [one for group, one in oldest.items() if running.get(group, 0) < most]
    return min(ready, key=lambda one: (last_turns.get(one.group, 0), _since(one)), default=None)


def _since(one: Waiting) -> float:
    return one.queue.decided_at.timestamp() if one.queue.decided_at is not None else 0.0


def seconds_to_archive(waiting: int, groups: int, deleters: int, most: float, patience: float) -> float:
    """Return the seconds for the archive of one queue, of ``most``, while this many of its group wait.

    While many wait, each gets less: the time it would have if all began now and ended within ``patience`` seconds. So
    part of each is archived, rather than all of a few. A group has half of the deleters, or as many as each of the
    ``groups`` that wait.
    """
    deleters_of_group = min(max(1, deleters // 2), deleters / max(1, groups))
    return min(most, patience * deleters_of_group / max(1, waiting))


def interrupted_attempts(attempts: int, attempted_at: datetime | None, now: datetime) -> int:
    """Return how many attempts to archive a queue's messages count, of which the last began at ``attempted_at``."""
    return 0 if attempted_at is None or now - attempted_at > FORGET_ATTEMPTS_AFTER else attempts


def has_waited_too_long(
    queue: StoredQueue,
    limit: int,
    now: datetime,
    *,
    deleter_since: datetime,
    patience: timedelta,
    is_alarm_raised: bool,
) -> bool:
    """Return whether waiting endangers the broker, so that the queue is deleted without a copy.

    Only time counts for which the deleter was running.
    """
    if queue.decided_at is None:  # by an older version, at an unknown time
        return False
    is_dangerous = is_alarm_raised or (queue.length is not None and queue.length > 2 * limit)
    since = max(queue.decided_at, deleter_since)
    return is_dangerous and now - since >= patience
