"""The state of the brake on bulk deletion, and its release by an operator.

:func:`brake_limit` returns how many queues one pass may delete. A release names queues: the brake does not count them,
and a pass deletes them whatever their number.
"""

import logging
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.utils import timezone

from accounts import audit
from accounts.models import Owner
from queues.models import Watch
from rabbit.names import QueueName

logger = logging.getLogger(__name__)

RELEASE_VALID_FOR = timedelta(minutes=10)

NO_RELEASE: dict[str, Any] = {"released": None, "released_at": None, "released_by": ""}


class Brake(NamedTuple):
    """The state of the brake. ``since`` is None while it blocks nothing; ``queues`` counts the blocked queues.

    ``released`` counts the queues that ``released_by`` released at ``released_at``; 0: no release is valid now.
    """

    since: datetime | None = None
    queues: int = 0
    released: int = 0
    released_at: datetime | None = None
    released_by: str = ""


def brake() -> Brake:
    """Return the state of the brake on bulk deletion."""
    watch = Watch.objects.filter(id=1).first()
    if watch is None:
        return Brake()
    number = released(watch, timezone.now())
    release = (watch.released_at, watch.released_by) if number else (None, "")
    return Brake(watch.brake_since, watch.braked, number, *release)


def release_brake(by: Owner, queues: Collection[QueueName]) -> None:
    """Let the next pass within ten minutes delete these queues, by vhost and name, if they are still too long.

    The brake still applies to all other queues. If it blocks nothing, nothing is written.

    Raises:
        ValueError: ``queues`` is empty.
    """
    names = sorted(set(queues))
    if not names:
        raise ValueError("name the queues to release from the brake")
    now = timezone.now()
    with transaction.atomic():
        blocking = Watch.objects.filter(id=1, brake_since__isnull=False)
        if not blocking.update(released=names, released_at=now, released_by=by.email):
            return
        audit.record(by, "released the brake", None, queues=len(names))
    logger.warning("%s released the brake: the next pass may delete %d queues", by.email, len(names))


def released(watch: Watch, now: datetime) -> int:
    """Return how many queues an operator released, if the release is still valid."""
    return len(released_queues(watch, now))


def released_queues(watch: Watch, now: datetime) -> frozenset[QueueName]:
    """Return the queues that an operator released, if the release is still valid."""
    if watch.released_at is None or abs(now - watch.released_at) >= RELEASE_VALID_FOR:
        return frozenset()
    return frozenset((vhost, name) for vhost, name in watch.released or ())


def after_pass(watch: Watch, blocked: Collection[QueueName], short: bool, now: datetime) -> dict[str, Any]:
    """End the release, and return the columns of the watch to update after a pass that blocked these queues.

    A list that is too ``short`` to delete anything changes neither. A release given after the pass began stays.
    """
    if short and not blocked:
        return {}
    if watch.released_at is not None:
        Watch.objects.filter(id=watch.id, released_at=watch.released_at).update(**NO_RELEASE)
    return {"brake_since": (watch.brake_since or now) if blocked else None, "braked": len(blocked)}


def needs_notice(watch: Watch, blocked: int) -> bool:
    """Return whether to notify operators of blocked queues: for the first ones, or after an insufficient release."""
    return blocked > 0 and (watch.brake_since is None or watch.released_at is not None)


def brake_limit(brake: int, listed: int) -> int:
    """Return how many queues one pass may delete: the brake or a quarter of all listed, whichever is larger."""
    return max(brake, listed // 4)
