"""The brake on bulk deletion: what it keeps, what an operator let go, and how shards share one budget.

How much may go at once is said by ``thresholds.brake_limit``. A pass over the whole broker has that for itself. Shards
have it together for each round: what one takes of it stands on its row, in the transaction that has the decision, so
that no crash loses or doubles it. A round ends when each of its shards has decided (``shards.py``), and never while the
brake holds: what is kept waits for an operator, or until all that is to go fits in, and not for the next budget. A
vhost that can't be listed keeps nobody waiting meanwhile.

A release names queues. These go, whatever their number, and so does what was decided on before: the brake is asked for
the others alone.
"""

import logging
from collections import Counter
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Q, Sum
from django.utils import timezone

from accounts import audit
from accounts.models import Owner
from queues.lease import lock
from queues.models import Notification, Queue, Shard, Watch
from queues.outbox import Telling
from queues.thresholds import GONE, brake_limit

logger = logging.getLogger(__name__)

QueueName = tuple[str, str]

LOCK = "brake"
"""Whoever decides by what several shards have taken holds this lock meanwhile."""

RELEASE_HOLDS = timedelta(minutes=10)

USED_UP: dict[str, Any] = {"released": None, "released_at": None, "released_by": ""}

WAITING = Sum("braked", filter=Q(failures=0), default=0)
"""The queues that wait with their shards. Those of a vhost that can't be listed count again once it can be."""


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
        lock(LOCK)
        held = Watch.objects.filter(id=1, brake_since__isnull=False)
        if not held.update(released=names, released_at=now, released_by=by.email):
            return
        audit.note(by, "released the brake", None, queues=len(names))
    logger.warning("%s released the brake: the next pass may delete %d queues", by.email, len(names))


def released(watch: Watch, now: datetime) -> int:
    """Return how many queues an operator let go, as far as that holds now."""
    return len(let_go(watch, now))


def let_go(watch: Watch, now: datetime) -> frozenset[QueueName]:
    """Return the queues that an operator let go, as far as that holds now."""
    if watch.released_at is None or abs(now - watch.released_at) >= RELEASE_HOLDS:
        return frozenset()
    return frozenset((vhost, name) for vhost, name in watch.released or ())


def left_by_shards(watch: Watch, seen: int, setting: int) -> int:
    """Return how many of so many queues may go in a pass beside what the shards took of this round's budget."""
    taken: int = Shard.objects.filter(round=watch.round).aggregate(number=Sum("reserved", default=0))["number"]
    return max(0, brake_limit(setting, seen + taken) - taken)


def after_whole_pass(watch: Watch, kept: Collection[QueueName], short: bool, now: datetime) -> dict[str, Any]:
    """Write down, after a pass over the whole broker, what the brake keeps, and return what of it is the watch's own.

    A list too ``short`` to delete anything by says nothing of that. Else a release is used up, whatever it was enough
    for; not one that was given since the pass began.
    """
    if short and not kept:
        return {}
    if kept or watch.braked:
        _spread(kept)
    if watch.released_at is not None:
        Watch.objects.filter(id=watch.id, released_at=watch.released_at).update(**USED_UP)
    return {"brake_since": (watch.brake_since or now) if kept else None, "braked": len(kept)}


def is_news(watch: Watch, braked: int) -> bool:
    """Return whether operators are to hear that the brake keeps so many: it began to, or a release was not enough."""
    return braked > 0 and (watch.brake_since is None or watch.released_at is not None)


def _spread(kept: Collection[QueueName]) -> None:
    """Write down how many queues the brake keeps in each vhost, so that no shard takes them for its own few."""
    number = Counter(vhost for vhost, _ in kept)
    Shard.objects.filter(braked__gt=0).update(braked=0)
    rows = [Shard(vhost=vhost, braked=queues) for vhost, queues in number.items()]
    Shard.objects.bulk_create(rows, update_conflicts=True, unique_fields=["vhost"], update_fields=["braked"])


def nothing_taken(shard: Shard, watch: Watch) -> dict[str, Any]:
    """Return what is to be written of a shard that had a pass in this round, and had nothing to ask the brake for."""
    return {"round": watch.round, "reserved": shard.reserved if shard.round == watch.round else 0}


class Grant(NamedTuple):
    """Whether a shard may delete all that it condemned, and what is to be written with its decision.

    Without it, the queues ``let_go`` by an operator go, and those decided on before. ``waiting`` are the queues that
    the brake keeps then, in all vhosts; ``telling`` is what operators are to hear.
    """

    is_given: bool
    let_go: frozenset[QueueName]
    waiting: int
    of_shard: dict[str, Any]
    of_watch: dict[str, Any]
    telling: Telling | None


class Demand(NamedTuple):
    """What a shard asks the brake for: the queues that it condemned, and ``again`` those of them condemned before.

    These took their part of the budget then. ``seen`` are the queues that it lists, ``unknown`` those of them whose
    length is unknown.
    """

    condemned: frozenset[QueueName]
    again: frozenset[QueueName]
    seen: int
    unknown: int


def ask(shard: Shard, demand: Demand, setting: int, now: datetime) -> Grant:
    """Return whether this shard may delete these queues, which it has to write down before the transaction ends.

    ``setting`` is the brake's. What others have taken and what waits with them counts like its own, and so does what
    the brake kept and is of unknown length.
    """
    lock(LOCK)
    watch = Watch.objects.get(id=1)
    others = Shard.objects.exclude(pk=shard.pk).aggregate(
        waiting=WAITING, taken=Sum("reserved", filter=Q(round=watch.round), default=0)
    )
    named = let_go(watch, now)
    new = len(demand.condemned - demand.again - named)
    again = len(demand.again - named)
    before = shard.reserved if shard.round == watch.round else 0
    unmeasured = max(0, min(shard.braked - len(demand.condemned), demand.unknown))
    already = before + others["taken"]
    elsewhere = Queue.objects.exclude(state=GONE).exclude(vhost=shard.vhost).count()
    all_seen = demand.seen + elsewhere + max(0, already - again)
    taken = max(before, again)
    fits = taken + new + others["taken"] + unmeasured + others["waiting"] <= brake_limit(setting, all_seen)
    is_given = fits or not new
    kept = unmeasured + (0 if is_given else new)
    waiting = others["waiting"] + kept
    of_watch: dict[str, Any] = {"braked": waiting, "brake_since": (watch.brake_since or now) if waiting else None}
    if watch.released_at is not None:
        elsewhere_named = sorted(name for name in named if name[0] != shard.vhost)
        of_watch |= {"released": elsewhere_named} if elsewhere_named else USED_UP
    telling = None
    was_named = any(vhost == shard.vhost for vhost, _ in named)
    if not is_given and (was_named or (watch.brake_since is None and not shard.braked)):
        telling = Telling(Notification.Kind.BRAKE, {"count": waiting, "seen": all_seen, "already": already})
    return Grant(
        is_given,
        named,
        waiting,
        {"round": watch.round, "reserved": taken + (new if is_given else 0), "braked": kept},
        {name: value for name, value in of_watch.items() if value != getattr(watch, name)},
        telling,
    )
