"""The brake on bulk deletion, and the release of blocked queues by an operator.

A queue whose deletion is blocked has a ``block_reason`` on its row. It stays blocked until an operator releases it, or
its length is back to normal. A release names queues; the next pass decides to delete them, whatever their number.
Passes (``comparison.py``) and sweeps (``agents/sweeps/reports.py``) apply the brake. Operators release queues on the
page ``status.blocked_queues``.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from django.db import transaction
from django.utils import timezone

from accounts import audit
from accounts.models import Owner
from queues.models import Queue, Watch
from rabbit.names import QueueName

logger = logging.getLogger(__name__)

MAX_BLOCKED_GROUPS = 3

RELEASE_VALID_FOR = timedelta(minutes=10)

NO_RELEASE: dict[str, Any] = {"released": None, "released_at": None, "released_by": ""}

Group = TypeVar("Group")


def brake_limit(brake: int, listed: int) -> int:
    """Return how many queues may wait to be deleted: the brake or a quarter of all listed, whichever is larger."""
    return max(brake, listed // 4)


def groups_to_block(sizes: Mapping[Group, int], limit: int) -> Sequence[Group]:
    """Return the groups whose queues a pass must not delete. ``sizes`` is the number of queues to delete in each.

    Within the limit none is blocked. Otherwise the fewest groups, at most ``MAX_BLOCKED_GROUPS``, that leave the rest
    within it; if there are no such groups, all.
    """
    largest_first = sorted(sizes, key=lambda group: -sizes[group])
    for number in range(MAX_BLOCKED_GROUPS + 1):
        if sum(sizes[group] for group in largest_first[number:]) <= limit:
            return largest_first[:number]
    return largest_first


class Release(NamedTuple):
    """The outcome of a release. ``released`` counts the queues that it released.

    ``earlier`` counts those that were already released, last by ``earlier_by``, and ``not_blocked`` all others.
    """

    released: int
    earlier: int
    earlier_by: str
    not_blocked: int


def release_brake(by: Owner, queues: Collection[QueueName]) -> Release:
    """Let the next pass within ten minutes delete these queues, by vhost and name, if they are still to be deleted.

    All other queues stay blocked. A valid earlier release stays, and only queues that are blocked now are released.
    Raises ValueError without queues.
    """
    names = frozenset(queues)
    if not names:
        raise ValueError("name the queues to release from the brake")
    now = timezone.now()
    with transaction.atomic():
        watch = Watch.objects.select_for_update().filter(id=1).first() or Watch()
        blocked = set(Queue.objects.blocked().values_list("vhost", "name"))
        earlier = released_queues(watch, now) & blocked
        new = names & blocked - earlier
        if new:
            release = {"released": sorted(earlier | new), "released_at": now, "released_by": by.email}
            Watch.objects.filter(id=watch.id).update(**release)
            audit.record(by, "released the brake", None, queues=len(new))
            logger.warning("%s released the brake: the next pass may delete %d queues", by.email, len(new))
    return Release(len(new), len(names & earlier), watch.released_by, len(names - blocked))


def released_queues(watch: Watch, now: datetime) -> frozenset[QueueName]:
    """Return the queues that an operator released, if the release is still valid."""
    if watch.released_at is None or abs(now - watch.released_at) >= RELEASE_VALID_FOR:
        return frozenset()
    return frozenset((vhost, name) for vhost, name in watch.released or ())


def after_pass(watch: Watch, blocked: int, short: bool, now: datetime) -> dict[str, Any]:
    """End the release, and return the columns of the watch to update after a pass that blocked this many queues.

    A list that is too ``short`` to delete anything changes neither. A release given after the pass began stays.
    """
    if short and not blocked:
        return {}
    if watch.released_at is not None:
        Watch.objects.filter(id=watch.id, released_at=watch.released_at).update(**NO_RELEASE)
    return {"brake_since": (watch.brake_since or now) if blocked else None, "blocked": blocked}
