"""Passes sharded by vhost, over many workers: which shards there are, and when a round of them begins and ends.

A round sees first that the broker answers, and hands over one pass for each vhost (``monitor.run_shard``). It tells the
operators what concerns the broker as a whole, so that they hear of it once and not once for each vhost.
"""

import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models.functions import Coalesce
from django.utils import timezone

from queues import brake, monitor, outbox
from queues.lease import SECONDS, HeldLease, LeaseLost, LeaseTaken, is_held, lease, lock
from queues.models import Lease, Notification, Queue, Shard, Watch
from queues.monitor import SHARD_LEASES, Report
from queues.outbox import Telling
from queues.thresholds import GONE
from rabbit import connections, snapshot
from rabbit.management import BrokerError
from rabbit.names import readable

logger = logging.getLogger(__name__)

LEASE = "round"

ROUND_LASTS = timedelta(seconds=SECONDS)
"""A shard that hasn't decided by then was lost, or its vhost hangs. The others get a new budget for deletions."""

MOST_NAMED = 20
"""Vhosts that a message names."""

FAILURES_TOLD = 3
"""Passes in a row that could not list a vhost, before operators hear of it."""


class Round(NamedTuple):
    """What a round begins with: the vhosts that are to have a pass, and a report where the broker can't be asked."""

    vhosts: Sequence[str]
    report: Report


def begin_round() -> Round:
    """Begin a round and return it. The vhosts that have waited longest come first.

    They are the guarded ones, and those whose queues are known and not gone. Where another process is beginning one,
    there are none.
    """
    report = Report(at=timezone.now())
    vhosts: list[str] = []
    try:
        with lease(LEASE) as held:
            vhosts = _begin(report, held)
            if report.away:
                monitor.file(report)
    except LeaseTaken:
        report.another_pass = True
    except LeaseLost as error:
        report.given_up = True
        report.errors.append(str(error))
        logger.error("The round was given up: %s", error)
        vhosts = []
    if report.told:
        outbox.nudge(report.told)
    return Round(vhosts, report)


def _begin(report: Report, held: HeldLease) -> list[str]:
    watch = Watch.objects.get_or_create(id=1)[0]
    try:
        management = connections.management()
        snapshot.require_administrator(management)
        there = [vhost.name for vhost in management.vhosts()]
    except BrokerError as error:
        # That is why no shard could list its vhost either, if any has tried. They begin anew when it is back.
        Shard.objects.filter(failures__gt=0).update(failures=0)
        monitor.note_outage(report, watch, str(error), held)
        return []
    vhosts = _vhosts(there)
    if watch.nodes:
        monitor.forget_lists()
    shards = _shards(vhosts)
    if vhosts and all(shards[vhost].failures for vhost in vhosts):
        words = "the broker answers, and none of the guarded vhosts can be listed; their passes' reports say why"
        monitor.note_outage(report, watch, words, held)
    _open(report, held, [shards[vhost] for vhost in sorted(vhosts)], shards.keys() - vhosts)
    return sorted(vhosts, key=lambda vhost: _waits_since(shards[vhost]))


def _vhosts(there: Collection[str]) -> set[str]:
    """Return the vhosts that have something to be guarded, or to be let go, where these are on the broker."""
    guarded = monitor.guarded_vhosts()
    vhosts = {vhost for vhost in (there if guarded is None else guarded) if snapshot.can_be_kept(vhost)}
    for vhost in set(there if guarded is None else guarded) - vhosts:
        logger.error("The vhost %r can't be guarded: its name has a NUL in it, or is too long.", vhost)
    return vhosts | set(Queue.objects.exclude(state=GONE).order_by().values_list("vhost", flat=True).distinct())


def _shards(vhosts: Collection[str]) -> dict[str, Shard]:
    """Return what is remembered of vhosts, by their names. These are among them from now on, if they weren't before."""
    shards = {shard.vhost: shard for shard in Shard.objects.all()}
    new = set(vhosts) - shards.keys()
    if not new:
        return shards
    Shard.objects.bulk_create([Shard(vhost=vhost) for vhost in new], ignore_conflicts=True)
    return _shards(vhosts)


def _waits_since(shard: Shard) -> float:
    return shard.passed_at.timestamp() if shard.passed_at is not None else 0.0


def _open(report: Report, held: HeldLease, shards: Sequence[Shard], left: Collection[str]) -> None:
    """Write down what the shards say of the broker, drop those that are ``left`` over, and begin a round if it is time.

    It is where each shard has decided in the last one, or has had its time, and the brake keeps nothing.
    """
    now = report.at
    with transaction.atomic():
        held.renew()
        lock(brake.LOCK)
        watch = Watch.objects.select_for_update().get(id=1)
        waiting = Shard.objects.exclude(vhost__in=left).aggregate(number=brake.WAITING)["number"]
        news: dict[str, Any] = {"braked": waiting, "brake_since": (watch.brake_since or now) if waiting else None}
        have_decided = all(shard.round == watch.round for shard in shards)
        has_lasted = watch.round_at is None or abs(now - watch.round_at) >= ROUND_LASTS
        if not waiting and (have_decided or has_lasted):
            news |= {"round": watch.round + 1, "round_at": now}
        tellings: list[Telling] = []
        if not report.away and watch.outage_since is not None:
            news |= {"failures": 0, "outage_since": None, "next_pass_at": None}
            tellings.append(monitor.outage_over(watch, now))
        if not watch.nodes:  # else a pass over the whole broker was the last, and knows more than they
            summary = _summary(shards)
            tellings += monitor.responsiveness(watch, summary["unresponsive_since"], now)
            news |= summary
        if not report.away:
            tellings += _note_outages(shards, now)
        Watch.objects.filter(id=watch.id).update(**news)
        Shard.objects.filter(vhost__in=left).delete()
        Lease.objects.filter(~is_held(), name__in=[f"{SHARD_LEASES}{vhost}" for vhost in left]).delete()
        report.told += outbox.tell(tellings, now)


def _note_outages(shards: Sequence[Shard], now: datetime) -> list[Telling]:
    """Note which vhosts can't be listed, while others can, and which can be again. Return what operators are to hear.

    They hear of each once, and of all those of one round together.
    """
    tellings = []
    lost = [shard for shard in shards if shard.failures >= FAILURES_TOLD and shard.outage_since is None]
    back = [shard for shard in shards if shard.outage_since is not None and _is_listed_since(shard, shard.outage_since)]
    if lost:
        Shard.objects.filter(id__in=[shard.id for shard in lost]).update(outage_since=Coalesce("listed_at", "made_at"))
        tellings.append(Telling(Notification.Kind.OUTAGE, _facts_of_outage(lost)))
    if back:
        Shard.objects.filter(id__in=[shard.id for shard in back]).update(outage_since=None)
        seconds = max((now - (shard.outage_since or now)).total_seconds() for shard in back)
        tellings.append(Telling(Notification.Kind.OUTAGE_OVER, {"seconds": seconds, **_facts_of_outage(back)}))
    return tellings


def _is_listed_since(shard: Shard, then: datetime) -> bool:
    return not shard.failures and shard.listed_at is not None and shard.listed_at > then


def _facts_of_outage(shards: Sequence[Shard]) -> dict[str, Any]:
    named = [readable(shard.vhost) for shard in shards[:MOST_NAMED]]
    return {"vhosts": named, "count": len(shards), "more": len(shards) - len(named)}


def _summary(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return what the shards say of the broker as a whole: the worst of each, but for those that can't be listed."""
    listed = [shard.listed_at for shard in shards if shard.listed_at is not None and not shard.failures]
    refused = [shard.refused_since for shard in shards if shard.refused_since is not None]
    unresponsive = [shard.unresponsive_since for shard in shards if shard.unresponsive_since is not None]
    return {
        **({"listed_at": min(listed)} if listed else {}),
        "short_lists": max((shard.short_lists for shard in shards), default=0),
        "refused_since": min(refused, default=None),
        "unresponsive_since": min(unresponsive, default=None),
    }
