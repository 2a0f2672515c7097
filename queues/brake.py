"""The brake on bulk deletion: how it stands, and which queues an operator released.

``thresholds.brake_limit`` says how many queues one pass may delete. A release names queues: they are deleted whatever
their number, and the brake counts the others alone.
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
    """How the brake stands. ``since`` is None where it doesn't hold; ``queues`` are those that it keeps.

    ``released`` is how many queues may go all the same in the next pass, as ``released_by`` said at ``released_at``; 0:
    nobody has released it, or that was too long ago.
    """

    since: datetime | None = None
    queues: int = 0
    released: int = 0
    released_at: datetime | None = None
    released_by: str = ""


def brake() -> Brake:
    """Return how the brake on bulk deletion stands."""
    watch = Watch.objects.filter(id=1).first()
    if watch is None:
        return Brake()
    number = released(watch, timezone.now())
    by_whom = (watch.released_at, watch.released_by) if number else (None, "")
    return Brake(watch.brake_since, watch.braked, number, *by_whom)


def release_brake(by: Owner, queues: Collection[QueueName]) -> None:
    """Let the next pass within ten minutes delete these queues, by vhost and name, once, where they are still too long.

    Where there are others, the brake holds for these as it does without. Where it doesn't hold, there is nothing to
    release, and nothing is written.

    Raises:
        ValueError: no queue is named.
    """
    names = sorted(set(queues))
    if not names:
        raise ValueError("name the queues that the brake is to let go")
    now = timezone.now()
    with transaction.atomic():
        blocked = Watch.objects.filter(id=1, brake_since__isnull=False)
        if not blocked.update(released=names, released_at=now, released_by=by.email):
            return
        audit.note(by, "released the brake", None, queues=len(names))
    logger.warning("%s released the brake: the next pass may delete %d queues", by.email, len(names))


def released(watch: Watch, now: datetime) -> int:
    """Return how many queues an operator released, as far as that holds now."""
    return len(released_queues(watch, now))


def released_queues(watch: Watch, now: datetime) -> frozenset[QueueName]:
    """Return the queues that an operator released, as far as that holds now."""
    if watch.released_at is None or abs(now - watch.released_at) >= RELEASE_VALID_FOR:
        return frozenset()
    return frozenset((vhost, name) for vhost, name in watch.released or ())


def after_pass(watch: Watch, kept: Collection[QueueName], short: bool, now: datetime) -> dict[str, Any]:
    """Return what to write to the watch about the queues that the brake kept in a pass, and end the release.

    A list too ``short`` to delete anything by says nothing about the brake. Any other ends the release, unless that was
    given after the pass began.
    """
    if short and not kept:
        return {}
    if watch.released_at is not None:
        Watch.objects.filter(id=watch.id, released_at=watch.released_at).update(**NO_RELEASE)
    return {"brake_since": (watch.brake_since or now) if kept else None, "braked": len(kept)}


def needs_notice(watch: Watch, braked: int) -> bool:
    """Return whether operators are to hear that the brake keeps so many: it began to, or a release was not enough."""
    return braked > 0 and (watch.brake_since is None or watch.released_at is not None)
