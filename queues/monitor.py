"""One pass of the monitor: list, compare, act, record.

``run_pass`` is what the Celery task, the management command and the operator's button call, or ``run_shard`` for each
vhost where passes are sharded (``shards.py``). The rules are elsewhere: ``comparison.py`` says what follows from a
list, ``brake.py`` how much may go at once, ``deletion.py`` deletes, ``outbox.py`` tells.
"""

import gc
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Case, Exists, F, Q, Sum, When
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues import bulk, outbox, removals, subscriptions
from queues.brake import Demand, Grant, after_whole_pass, ask, is_news, left_by_shards, let_go, nothing_taken
from queues.comparison import (
    NO_AGENTS,
    Agents,
    Changes,
    Condemned,
    Earlier,
    Known,
    Message,
    PulseAccount,
    QueueName,
    Rules,
    compare,
    confirmed,
    name_of,
    undisturbed,
)
from queues.deletion import Deletion, Outcome, write_events
from queues.facts import Facts
from queues.lease import HeldLease, LeaseLost, LeaseTaken, is_held, lease
from queues.models import Lease, Notification, Pass, Queue, QueueEvent, QueueSample, Shard, Watch
from queues.outbox import Telling
from queues.thresholds import DELETING, GONE, policy
from rabbit import connections, directly, snapshot
from rabbit.management import BrokerError, Management
from rabbit.names import DEAD_LETTER_QUEUE, Kind, kind_of_exchange
from rabbit.prometheus import Untrusted
from rabbit.snapshot import QueueSeen, Snapshot

logger = logging.getLogger(__name__)

LEASE = "pass"
SHARD_LEASES = "pass:"
"""What the names of the shards' leases begin with; the vhost follows."""

WAIT_FOR_SHARDS_SECONDS = 15
"""So long a pass over the whole broker waits for shards under way. None begins meanwhile."""

EXCHANGES_EVERY = timedelta(minutes=5)
EXACT_LIST_EVERY = timedelta(minutes=1)
"""Where lengths come from figures that lag, and that say nothing else of a queue, the list still comes so often."""

FIGURES_LAG = timedelta(seconds=10)
"""So long after a list figures may be older than it, so that by them people would be told what is true no more."""

SHORT_TOLD_EVERY = timedelta(hours=1)


class ShardsUnderWay(LeaseTaken):
    """A shard has been at it for longer than a pass over the whole broker waits."""


@dataclass
class Report:
    """What one pass did. The names are those of ``queues.models.Pass``, and of ``monitor_queues --json``.

    Of a dry run, ``condemned`` are the queues that are to go, also where the brake keeps them, and ``would_delete``
    those that would go: the second look confirms them, or has yet to. Where ``another_pass`` has errors, this one
    should have been let in and was not.
    """

    at: datetime
    vhost: str = ""
    queues: int = 0
    new: int = 0
    changed: int = 0
    gone: int = 0
    unknown: int = 0
    warned: int = 0
    recovered: int = 0
    deleted: int = 0
    kept: int = 0
    brake_held: bool = False
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    listing_seconds: float = 0.0
    misnamed: list[str] = field(default_factory=list)
    misnamed_exchanges: list[str] = field(default_factory=list)
    unpatterned: int = 0
    dry_run: bool = False
    condemned: list[dict[str, str]] = field(default_factory=list)
    would_delete: list[dict[str, str]] = field(default_factory=list)
    another_pass: bool = False
    away: bool = False
    given_up: bool = False
    told: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return it in the form that ``--json`` prints."""
        return {**asdict(self), "at": self.at.isoformat()}


def guarded_vhosts(agents: Iterable[str] | None = None) -> list[str] | None:
    """Return the vhosts that are guarded; None: all there are.

    ``agents`` are the agents' vhosts, where they are known; else they are read. A list in the settings is all there is.
    """
    if settings.GUARDIAN_VHOSTS == ["*"]:
        return None
    if settings.GUARDIAN_VHOSTS:
        return list(settings.GUARDIAN_VHOSTS)
    if agents is None:
        agents = subscriptions.agent_vhosts()
    return list(dict.fromkeys(["/", settings.GUARDIAN_PULSE_VHOST, *agents]))


def rules(vhosts: Iterable[str] | None) -> Rules:
    """Return the settings that a pass over these vhosts goes by; None: over all there are."""
    ignored = settings.GUARDIAN_IGNORED_QUEUES
    return Rules(
        policy=policy(),
        pulse_vhost=settings.GUARDIAN_PULSE_VHOST,
        vhosts=frozenset(vhosts) if vhosts is not None else None,
        ignored=re.compile(ignored) if ignored else None,
        namespace_policy=settings.GUARDIAN_NAMESPACE_POLICY,
        brake=settings.GUARDIAN_DELETE_BRAKE,
        quiet_seconds=settings.GUARDIAN_QUIET_SECONDS,
    )


def is_due() -> bool:
    """Return whether a pass may run now: after failures to reach the broker the wait grows."""
    watch = Watch.objects.filter(id=1).first()
    return watch is None or watch.next_pass_at is None or watch.next_pass_at <= timezone.now()


def seconds_to_wait() -> float:
    """Return the seconds to wait after a pass: the poll interval, longer after failures to reach the broker."""
    watch = Watch.objects.filter(id=1).first()
    return _wait(watch.failures if watch else 0)


def run_pass(*, force: bool = False, dry_run: bool = False) -> Report:
    """Run one pass and return its report.

    ``force`` lifts the brake on bulk deletion and believes a list that is far too short; ``dry_run`` looks and decides,
    and changes nothing. Where another process is at it, the report says so and nothing is done.
    """
    report = Report(at=timezone.now(), dry_run=dry_run)
    if not dry_run:
        _run(report, LEASE, force)
        return report
    began = time.monotonic()
    _pass(report, None, force)
    report.seconds = time.monotonic() - began
    return report


def run_shard(vhost: str) -> Report:
    """Run one pass over this vhost alone and return its report. The round that it is one of is begun in ``shards.py``.

    Where another process is at this vhost or at the whole broker, the report says so and nothing is done.
    """
    report = Report(at=timezone.now(), vhost=vhost)
    _run(report, f"{SHARD_LEASES}{vhost}", force=False)
    return report


def _run(report: Report, name: str, force: bool) -> None:
    """Run a pass under the lease of this name, keep its report, and have people told."""
    began = time.monotonic()
    try:
        with lease(name) as held, _no_search_for_garbage():
            report.at, began = timezone.now(), time.monotonic()  # so that no two reports overlap
            _pass(report, held, force)
            report.seconds = time.monotonic() - began
            file(report)
    except ShardsUnderWay as error:
        report.another_pass = True
        report.errors.append(str(error))
    except LeaseTaken:
        report.another_pass = True
    except LeaseLost as error:
        report.given_up = True
        report.errors.append(str(error))
        report.seconds = time.monotonic() - began
        logger.error("The pass was given up: %s", error)
        file(report)
    if report.told:
        outbox.nudge(report.told)
    report.seconds = time.monotonic() - began


@contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """Have Python not look for cycles of garbage meanwhile.

    A pass makes objects by the hundred thousand that stay until its end and are in no cycle. (Its AMQP connections are
    in some. They are few.) To look through all takes 0.06 s at 10,000 queues, and came in the middle of the deletions.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


def _pass(report: Report, held: HeldLease | None, force: bool, *, exactly: bool = False) -> None:
    """Run a pass under this lease; without one, look and decide only. ``exactly``: by exact lengths.

    Raises:
        LeaseTaken: one is running that this must not run beside.
    """
    now = report.at
    watch = _recall(report.vhost, held) if held else Watch.objects.filter(id=1).first() or Watch()
    memory = _recall_shard(report.vhost, watch, held) if held and report.vhost else watch
    agents_vhosts = subscriptions.agent_vhosts()
    vhosts = guarded = guarded_vhosts(agents_vhosts)
    if report.vhost:
        # One that isn't guarded any more is listed no more, and what is known of it is let go.
        vhosts = [report.vhost] if guarded is None or report.vhost in guarded else []
    going_by = rules(vhosts)
    try:
        management = connections.management()
        expect = cache(partial(_expected, report.vhost, going_by, agents_vhosts))
        figures = None
        if held and not (exactly or force):
            figures = _by_figures(report, management, going_by, memory, held, expect)
        keep = held.keep if held else lambda: None
        seen = figures or snapshot.take(management, vhosts, keep, lambda: {one: one for one in expect().undisturbed})
        in_use = _memory(management) if going_by.policy.needs_memory else 0.0
        report.listing_seconds = seen.seconds
        known, accounts_before, agents_before, as_before = expect()
        listed = set(map(name_of, seen.queues))
        stopped: frozenset[str] = frozenset()
        is_short = not known.keys() <= listed
        if is_short:
            # Something is missing: make sure that the list may be believed, and that nobody let go of it meanwhile.
            snapshot.require_administrator(management)
            stopped = frozenset(snapshot.stopped_vhosts(management))
            known = _known(report.vhost)
    except BrokerError as error:
        if isinstance(memory, Shard):
            _not_listed(report, memory, watch, error, held)
        else:
            note_outage(report, watch, str(error), held)
        return
    if guarded is None:
        seen = seen._replace(no_such_vhosts=[])  # nobody said that it is there
    if held:
        held.keep()
    if listed != known.keys():
        known.update(_returned(listed - known.keys()))
    accounts, agents = _accounts(report.vhost, going_by, known), _agents(agents_vhosts, report.vhost)
    if is_short or (accounts, agents) != (accounts_before, agents_before):
        as_before = undisturbed(known, accounts, agents, going_by)
    may_go = let_go(watch, now)

    def judge(**options: Any) -> Changes:
        return compare(
            seen,
            known,
            accounts,
            going_by,
            _earlier(memory),
            memory=in_use,
            now=now,
            force=force,
            stopped_vhosts=stopped,
            agents=agents,
            as_before=as_before,
            **{"let_go": may_go, **options},
        )

    def first() -> Changes:
        if isinstance(memory, Shard):
            return judge(most=len(seen.queues))  # the brake is asked with the decision
        changes = judge()
        if watch.braked and settings.GUARDIAN_SHARD_BY_VHOST:
            changes = judge(most=left_by_shards(watch, changes.seen, going_by.brake))
        return changes

    changes = first()
    if changes.unconfirmed:
        unconfirmed = frozenset(changes.unconfirmed)
        seen = confirmed(seen, unconfirmed, directly.ask(connections.amqp_url(), unconfirmed), known)
        changes = first()
    if seen.lagging and (changes.condemned or changes.kept or changes.short):
        _pass(report, held, force, exactly=True)  # nothing is deleted by figures that lag, or gone by a short list
        return
    exchanges = None
    if report.vhost in ("", going_by.pulse_vhost):
        exchanges = _misnamed_exchanges(management, watch, going_by, report)
        report.misnamed_exchanges = exchanges if exchanges is not None else watch.misnamed_exchanges
    if held:
        held.keep()
    _count(report, changes)
    _note_errors(report, changes, seen, agents)
    facts = _gather_facts(management, changes, now)
    deletion = Deletion(management, connections.amqp_url(), going_by, facts)
    if held is None:
        look = deletion.look_again(changes.condemned, exact=seen.exact)
        report.condemned = [_named(key) for key in sorted({one.key for one in changes.condemned} | set(changes.kept))]
        report.would_delete = [_named(one.key) for one in look.over]
        report.kept = len(look.kept)
        return
    returned = {row.id for row in known.values() if row.state == GONE}
    decide = partial(_decide, report, changes, judge, known, watch, memory, seen, going_by)
    changes, condemned, report.told = _write(decide, returned, seen, watch, memory, facts, exchanges, held, now)
    finished = deletion.finish(changes.deleted, held)
    gives_way = _is_whole_pass_waiting if report.vhost else lambda: False
    outcome = deletion.carry_out(condemned, held, exact=seen.exact, gives_way=gives_way)
    report.deleted = finished.deleted + outcome.deleted
    report.kept = outcome.kept
    report.told += finished.told + outcome.told
    report.errors += outcome.errors
    if outcome.left:
        report.errors.append(f"gave way to a pass over the whole broker, which goes on with {outcome.left} queues")
    report.told += _note_refusals(watch, memory, outcome, held, now)


class Expected(NamedTuple):
    """What the database says while the broker works at its list.

    Accounts and registrations are read again when that is there, since what the list has was registered before. Where
    they are what they were, the queues ``undisturbed`` by them are the same.
    """

    known: dict[QueueName, Known]
    accounts: dict[str, PulseAccount]
    agents: Agents
    undisturbed: Mapping[QueueSeen, bool]


def _expected(vhost: str, going_by: Rules, agents_vhosts: Mapping[str, int]) -> Expected:
    known = _known(vhost)
    accounts, agents = _accounts(vhost, going_by, known), _agents(agents_vhosts, vhost)
    return Expected(known, accounts, agents, undisturbed(known, accounts, agents, going_by))


def _by_figures(
    report: Report,
    management: Management,
    going_by: Rules,
    memory: Watch | Shard,
    held: HeldLease,
    expect: Callable[[], Expected],
) -> Snapshot | None:
    """Return what the nodes' Prometheus endpoints and the rows say together; None: the list is to be asked for.

    That is so once a minute, and while anything is wrong that only a list tells of.
    """
    since = report.at - memory.exact_at if memory.exact_at is not None else EXACT_LIST_EVERY
    is_due = not timedelta(0) <= since < EXACT_LIST_EVERY
    is_wrong = memory.failures or memory.short_lists or memory.braked or memory.unresponsive_since is not None
    if settings.GUARDIAN_SNAPSHOT != "prometheus" or is_due or is_wrong:
        return None
    vhosts = None if going_by.vhosts is None else sorted(going_by.vhosts)
    try:
        scrape = connections.prometheus().scrape(management, vhosts, held.keep, expect)
        is_behind = since < FIGURES_LAG
        return scrape.complete(management, expect().known, going_by.leaves_alone, held.keep, keeps_lengths=is_behind)
    except Untrusted as news:
        logger.info("The queues are listed, since %s.", news)
    except BrokerError as error:
        logger.warning("The queues are listed, since their figures could not be had: %s", error)
        report.errors.append(f"the queues were listed, since their figures could not be had: {error}")
    return None


def _recall(vhost: str, held: HeldLease) -> Watch:
    """Return what earlier passes left to be remembered, once nothing runs that this pass must not run beside.

    That is a pass over the whole broker for a shard, and shards for a pass over the whole broker. Either has its lease
    before it looks for the other's, so that one of the two sees it. A shard gives way; the other one waits a while, and
    no shard begins meanwhile.

    Raises:
        LeaseTaken: something is still running.
        ShardsUnderWay: that something is a shard.
    """
    others = Q(name=LEASE) if vhost else Q(name__startswith=SHARD_LEASES)
    until = time.monotonic() + WAIT_FOR_SHARDS_SECONDS
    while True:
        rows = Watch.objects.annotate(is_beside=Exists(Lease.objects.filter(others & is_held())))
        watch = rows.filter(id=1).first()
        if watch is None:
            Watch.objects.get_or_create(id=1)
        elif not watch.is_beside:
            return watch
        elif vhost:
            raise LeaseTaken(held.name)
        elif time.monotonic() > until:
            raise ShardsUnderWay(
                f"a pass over one vhost has been under way for more than {WAIT_FOR_SHARDS_SECONDS} s, so that none "
                "over the whole broker could begin; nothing was done, try again"
            )
        else:
            time.sleep(0.1)
            held.keep()


def _recall_shard(vhost: str, watch: Watch, held: HeldLease) -> Shard:
    """Return what earlier passes over this vhost left to be remembered.

    Two lists in a row are compared by their nodes. Where the last one was of the whole broker, no shard's is; and after
    this pass the next one of the whole broker has none before it.
    """
    if watch.nodes:
        with transaction.atomic():
            held.renew()
            Watch.objects.filter(id=watch.id).update(nodes=[])
            forget_lists()
    return Shard.objects.get_or_create(vhost=vhost)[0]


def forget_lists() -> None:
    """Have the shards forget what their lists were like, since one of the whole broker has come in between."""
    Shard.objects.update(nodes=[], failures=0, short_lists=0, missing=0)


def _earlier(memory: Watch | Shard) -> Earlier:
    """Return what was remembered of the last list, and of the other vhosts' what they have in common with this one."""
    earlier = Earlier(frozenset(memory.nodes), memory.short_lists)
    if isinstance(memory, Watch):
        return earlier
    others = Shard.objects.exclude(pk=memory.pk).filter(failures=0)
    missing = others.aggregate(number=Sum("missing", default=0))["number"]
    if not missing:
        return earlier
    elsewhere = Queue.objects.exclude(state=GONE).exclude(vhost=memory.vhost).count()
    return earlier._replace(missing_elsewhere=missing, known_elsewhere=elsewhere)


def _is_whole_pass_waiting() -> bool:
    """Return whether a pass over the whole broker waits for this shard."""
    return Lease.objects.filter(is_held(), name=LEASE).exists()


def _decide(
    report: Report,
    changes: Changes,
    judge: Callable[..., Changes],
    known: Mapping[QueueName, Known],
    watch: Watch,
    memory: Watch | Shard,
    seen: Snapshot,
    going_by: Rules,
) -> tuple[Changes, Grant | None]:
    """Return what follows once the brake was asked, in the transaction that writes it. Only shards have to ask.

    One whose list can't be gone by has nothing to ask for, and what the brake keeps of it stays kept.
    """
    if isinstance(memory, Watch) or not (changes.condemned or memory.braked or let_go(watch, report.at)):
        return changes, None
    if not changes.condemned and (changes.short or seen.unlisted):
        return changes, None
    condemned = frozenset(one.key for one in changes.condemned)
    again = frozenset(key for key in condemned if key in known and known[key].state == DELETING)
    grant = ask(memory, Demand(condemned, again, changes.seen, changes.unknown), going_by.brake, report.at)
    if not grant.is_given:
        changes = judge(most=0, let_go=grant.let_go)
        _count(report, changes)
        _note_brake(report, grant.waiting)
    return changes, grant


def _note_refusals(watch: Watch, memory: Watch | Shard, outcome: Outcome, held: HeldLease, now: datetime) -> int:
    """Tell the operators once while the broker refuses to delete queues; return the number of notifications."""
    if bool(outcome.refused) == bool(memory.refused_since):
        return 0
    with transaction.atomic():
        held.renew()
        since = now if outcome.refused else None
        is_first = Watch.objects.filter(id=watch.id, refused_since=None).update(refused_since=since)
        if isinstance(memory, Shard):
            Shard.objects.filter(id=memory.id).update(refused_since=since)
        elif not outcome.refused:
            Watch.objects.filter(id=watch.id).update(refused_since=None)
            Shard.objects.update(refused_since=None)
        if not outcome.refused or not is_first:
            return 0
        facts = {"count": outcome.refused, "error": outcome.errors[0]}
        return outbox.tell([Telling(Notification.Kind.REFUSED, facts)], now)


def note_outage(report: Report, watch: Watch, error: str, held: HeldLease | None) -> None:
    """Note that the broker could not be asked, and tell the operators once for each outage."""
    report.away = True
    report.errors.append(error)
    logger.error("The broker could not be asked: %s", error)
    if held is None:
        return
    failures = watch.failures + 1
    news = {
        "failures": failures,
        "next_pass_at": report.at + timedelta(seconds=_wait(failures)),
        "outage_since": watch.outage_since or report.at,
    }
    with transaction.atomic():
        held.renew()
        Watch.objects.filter(id=watch.id).update(**news)
        if watch.outage_since is None:
            report.told = outbox.tell([Telling(Notification.Kind.OUTAGE, {"error": error})], report.at)


def _not_listed(report: Report, shard: Shard, watch: Watch, error: BrokerError, held: HeldLease | None) -> None:
    """Note that a shard's vhost could not be listed. Whether the broker is away is for the next round to say."""
    report.away = True
    report.errors.append(f"vhost '{shard.vhost}' could not be listed: {error}")
    logger.error("The vhost '%s' could not be listed: %s", shard.vhost, error)
    if held is None:
        return
    with transaction.atomic():
        held.renew()
        news = {"failures": shard.failures + 1, "passed_at": report.at, **nothing_taken(shard, watch)}
        Shard.objects.filter(id=shard.id).update(**news)


def _wait(failures: int) -> float:
    longest = max(settings.GUARDIAN_POLL_SECONDS, settings.GUARDIAN_POLL_MAX_SECONDS)
    return float(min(settings.GUARDIAN_POLL_SECONDS * 2 ** min(failures, 20), longest))


SHARED = ("vhost", "type", "node", "state", "said")
"""Fields that have the same few texts in all rows. Each text is one object, also where the list names it: rows are
compared in a third less time, and need less memory."""


def _known(vhost: str) -> dict[QueueName, Known]:
    """Return the rows of the queues that are there as far as is known, by (vhost, name): of this vhost; empty: all."""
    rows = Queue.objects.exclude(state=GONE)
    if vhost:
        rows = rows.filter(vhost=vhost)
    columns = bulk.columns(rows.order_by(), Known._fields)
    for name in SHARED if columns else ():
        columns[name] = tuple(map(sys.intern, columns[name]))
    return {row[1:3]: row for row in map(Known._make, zip(*columns.values(), strict=True))}


def _returned(unknown: Collection[QueueName]) -> dict[QueueName, Known]:
    """Return the rows of those of these listed queues, by (vhost, name), that were gone."""
    if not unknown:
        return {}
    rows = Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), list(unknown)), state=GONE).order_by()
    return {(row[1], row[2]): Known._make(row) for row in rows.values_list(*Known._fields)}


def _accounts(vhost: str, going_by: Rules, known: Mapping[QueueName, Known]) -> dict[str, PulseAccount]:
    """Return the Pulse users by their names, where queues of this vhost may be theirs; an empty one means all."""
    if vhost not in ("", going_by.pulse_vhost) and all(row.pulse_user_id is None for row in known.values()):
        return {}
    rows = PulseUser.objects.order_by().values_list("username", "id", "warn_length", "max_length", "removing_since")
    return {username: PulseAccount(id_, warn, most, since is not None) for username, id_, warn, most, since in rows}


def _agents(vhosts: Mapping[str, int], vhost: str) -> Agents:
    """Return what agents registered, where these vhosts are theirs. Where they have none, nobody registered anything.

    Of one ``vhost`` that isn't theirs, only what is to go is asked for; an empty one means all.
    Call it when the queues are listed: a registration is written before its queue is made, so what the list has is
    known to be registered.
    """
    if not vhosts:
        return NO_AGENTS
    if vhost and vhost not in vhosts:
        return Agents(leaving=removals.pending())
    return Agents(subscriptions.registered(), vhosts, removals.pending())


def _memory(management: Management) -> float:
    """Return the memory use of the fullest running node, as a fraction of its watermark."""
    shares = [
        node.mem_used / node.mem_limit
        for node in management.nodes()
        if node.running and node.mem_used is not None and node.mem_limit
    ]
    return max(shares, default=0.0)


def _misnamed_exchanges(management: Management, watch: Watch, going_by: Rules, report: Report) -> list[str] | None:
    """Return the exchanges in the queues' namespace; None: they were looked at a short while ago, or can't be now."""
    since = report.at - watch.exchanges_listed_at if watch.exchanges_listed_at is not None else EXCHANGES_EVERY
    if timedelta(0) <= since < EXCHANGES_EVERY:
        return None
    try:
        exchanges = management.exchanges(going_by.pulse_vhost)
    except BrokerError as error:
        report.errors.append(f"the exchanges could not be listed: {error}")
        return None
    return sorted(
        exchange.name.replace("\0", "\N{REPLACEMENT CHARACTER}")
        for exchange in exchanges
        if kind_of_exchange(exchange.name) is Kind.MISNAMED
    )


def _count(report: Report, changes: Changes) -> None:
    """Put the figures of these changes into the report."""
    kinds = [event.kind for event in changes.events]
    returned = kinds.count(QueueEvent.Kind.RETURNED)
    report.queues = changes.seen
    report.new = len(changes.new) + returned
    report.changed = len(changes.changed) + len(changes.lengths) - returned
    report.gone = len(changes.gone)
    report.unknown = changes.unknown
    report.warned = kinds.count(QueueEvent.Kind.WARNED)
    report.recovered = kinds.count(QueueEvent.Kind.RECOVERED)
    report.brake_held = changes.braked > 0
    report.misnamed = changes.misnamed
    report.unpatterned = changes.unpatterned


def _note_errors(report: Report, changes: Changes, seen: Snapshot, agents: Agents) -> None:
    """Put into the report what was wrong with the list, and that the brake holds."""
    report.errors += [f"vhost '{vhost}' could not be listed: {reason}" for vhost, reason in seen.unlisted.items()]
    report.errors += [words for vhost in seen.no_such_vhosts if (words := _no_such_vhost(vhost, agents))]
    report.errors += [
        f"the queue {name!r} can't be guarded: a name has a NUL in it, or is too long" for name in seen.unreadable
    ]
    if not seen.exact:
        report.errors.append("a queue's process doesn't respond; lengths are the broker's statistics, which lag")
    if changes.short:
        report.errors.append(
            f"the list lacks {changes.short} known queues, which is more than the brake allows "
            f"(list {changes.short_lists} in a row)"
        )
    if changes.braked:
        _note_brake(report, changes.braked)


def _note_brake(report: Report, queues: int) -> None:
    report.errors.append(
        f"the brake holds: {queues} queues are to be deleted; look, then release it in the admin or use --force"
    )


def _named(key: QueueName) -> dict[str, str]:
    return {"vhost": key[0], "queue": key[1]}


def _no_such_vhost(vhost: str, agents: Agents) -> str:
    """Return what is wrong where a guarded vhost isn't on the broker; empty: nothing, since its owner was deleted."""
    if vhost not in agents.vhosts:
        return f"vhost '{vhost}' isn't on the broker; see GUARDIAN_VHOSTS"
    if (vhost, DEAD_LETTER_QUEUE) not in agents.queues:
        return ""
    return f"vhost '{vhost}', which is an owner's agents', is gone from the broker; the next sweep makes it again"


def _gather_facts(management: Management, changes: Changes, now: datetime) -> Facts:
    """Ask about the queues that somebody is to be told about."""
    candidates = [message.queue for message in changes.messages] + [one.queue for one in changes.condemned]
    people = outbox.recipients_of(queue.whose for queue in candidates)
    told = [queue for queue in candidates if outbox.is_anybody_told(queue.whose, people)]
    return Facts.gather(management, connections.amqp_url(), told, now, among=changes.seen)


LIMITS = ("unbounded", "warn_length", "max_length")
WRITTEN = tuple(name for name in Known._fields if name not in ("id", "vhost", "name", *LIMITS))
"""The fields that a pass writes. The others are people's."""


def _write(
    decide: Callable[[], tuple[Changes, Grant | None]],
    returned: Collection[int | None],
    seen: Snapshot,
    watch: Watch,
    memory: Watch | Shard,
    facts: Facts,
    exchanges: list[str] | None,
    held: HeldLease,
    now: datetime,
) -> tuple[Changes, list[Condemned], int]:
    """Write everything that changed in one transaction. ``returned`` are the ids of rows that were known to be gone.

    Return the changes that were decided on, the condemned queues with their ids, and the number of notifications.
    """
    with transaction.atomic():
        held.renew()
        changes, grant = decide()
        _leave_to_people(changes, returned, now)
        ids = {(vhost, name): id_ for id_, vhost, name in _insert(changes.new, now)}
        bulk.update(
            Queue,
            (*WRITTEN, "last_seen"),
            [(queue.id, *(getattr(queue, name) for name in WRITTEN), now) for queue in changes.changed],
        )
        grown = [(queue.id, queue.ready, queue.unacknowledged, now) for queue in changes.lengths]
        bulk.update(Queue, ("ready", "unacknowledged", "last_seen"), grown)
        lost = [queue for queue in changes.missed if queue.misses == 1] + changes.listed_last
        last_seen = memory.listed_at or now  # a row of which nothing changes isn't written while its queue is there
        bulk.update(Queue, ("misses", "last_seen"), [(queue.id, queue.misses, last_seen) for queue in lost])
        absent = [queue for queue in changes.missed if queue.misses != 1] + changes.gone
        bulk.update(Queue, WRITTEN, [(queue.id, *(getattr(queue, name) for name in WRITTEN)) for queue in absent])
        if changes.vanished:
            subscriptions.mark_vanished([(queue.vhost, queue.name) for queue in changes.vanished])
        if changes.returned:
            subscriptions.mark_returned([(queue.vhost, queue.name) for queue in changes.returned])

        def with_id(queue: Known) -> Known:
            return queue if queue.id is not None else queue._replace(id=ids[queue.vhost, queue.name])

        samples = [(queue.id or ids[queue.vhost, queue.name], now, queue.length) for queue in changes.samples]
        bulk.insert(QueueSample, ("queue", "at", "length"), samples)
        condemned = [one._replace(queue=with_id(one.queue)) for one in changes.condemned]
        figures = {one.queue.id: facts.of(one.queue, one.thresholds) for one in condemned}
        events = [(with_id(event.queue), event.kind) for event in changes.events]
        write_events(
            [
                (queue, kind, figures[queue.id] if kind == QueueEvent.Kind.CONDEMNED else {"length": queue.length})
                for queue, kind in events
            ],
            now,
        )
        tellings = [_telling(message._replace(queue=with_id(message.queue)), facts) for message in changes.messages]
        if isinstance(memory, Shard):
            told = outbox.tell(tellings + _news_of_shard(memory, changes, grant, now), now)
            _remember_shard(watch, memory, changes, grant, seen, exchanges, now)
        else:
            told = outbox.tell(tellings + _news_for_operators(changes, seen, watch, now), now)
            _remember(watch, changes, seen, exchanges, now)
    return changes, condemned, told


def _leave_to_people(changes: Changes, returned: Collection[int | None], now: datetime) -> None:
    """Leave out what people did since the list was taken: it is older, and must not be written over that.

    A queue that was given other limits since is left to the next pass, which goes by these. Three statements at most,
    which lock what is about to be written: accounts and owners first, as whoever removes one does.
    """
    whole = [*changes.new, *changes.changed, *changes.missed, *changes.gone]
    removed = _removed(PulseUser, {queue.pulse_user_id for queue in whole} - {None})
    departed = _removed(Owner, {queue.owner_id for queue in whole} - {None})
    written = [*changes.changed, *changes.lengths, *changes.missed, *changes.gone]
    judged = [one.queue for one in changes.condemned] + [one.queue for one in changes.messages]
    touched = {queue.id for queue in (*written, *judged)} - {None}
    limits = {queue.id: [getattr(queue, name) for name in LIMITS] for queue in judged}
    gone: set[int | None] = set()
    if touched:
        these = bulk.among(Queue, ("id",), [(id_,) for id_ in touched])
        rows = Queue.objects.select_for_update().filter(these).order_by("id")
        went = Case(When(state=GONE, then=F("last_seen")))
        # A queue that was deleted after this pass began may still be in its list. It has not come back.
        for id_, went_at, *own in rows.annotate(went_at=went).values_list("id", "went_at", *LIMITS):
            has_gone = went_at is not None and (id_ not in returned or went_at >= now)
            touched.remove(id_)
            if has_gone or limits.get(id_, own) != own:
                gone.add(id_)
        gone |= touched  # it had been gone for so long that its row was removed
    if gone or removed or departed:
        changes.leave_out(gone, removed, departed)


def _removed(model: type[PulseUser | Owner], ids: set[int | None]) -> set[int | None]:
    """Return which of these aren't there any more, and lock the others until their ids are written."""
    if not ids:
        return set()
    rows = model._default_manager.select_for_update(no_key=True).filter(bulk.among(model, ("id",), [(i,) for i in ids]))
    return ids - set(rows.order_by("id").values_list("id", flat=True))


def _insert(new: list[Known], now: datetime) -> list[Any]:
    fields = ("uuid", *Known._fields[1:], "first_seen", "last_seen")
    rows = [(uuid.uuid4(), *queue[1:], now, now) for queue in new]
    return bulk.insert(Queue, fields, rows, returning=("id", "vhost", "name"))


def _telling(message: Message, facts: Facts) -> Telling:
    queue = message.queue
    told = facts.of(queue, message.thresholds, message.folded)
    return Telling(message.say.value, told, queue.id, *queue.whose)


def _news_for_operators(changes: Changes, seen: Snapshot, watch: Watch, now: datetime) -> list[Telling]:
    """Return what the operators have not been told yet about the broker itself."""
    news = []
    if watch.outage_since is not None:
        news.append(outage_over(watch, now))
    if is_news(watch, changes.braked):
        news.append(Telling(Notification.Kind.BRAKE, {"count": changes.braked, "seen": changes.seen}))
    if _short_is_news(changes, watch, now):
        news.append(Telling(Notification.Kind.SHORT_LIST, {"missing": changes.short, "seen": changes.seen}))
    return news + responsiveness(watch, None if seen.exact else now, now)


def outage_over(watch: Watch, now: datetime) -> Telling:
    """Return what operators are told when the broker answers again."""
    seconds = (now - (watch.outage_since or now)).total_seconds()
    return Telling(Notification.Kind.OUTAGE_OVER, {"seconds": seconds})


def responsiveness(watch: Watch, unresponsive_since: datetime | None, now: datetime) -> list[Telling]:
    """Return what operators are to hear of queues' processes that don't answer, now that one hasn't since then."""
    if unresponsive_since is not None and watch.unresponsive_since is None:
        return [Telling(Notification.Kind.UNRESPONSIVE, {})]
    if unresponsive_since is None and watch.unresponsive_since is not None:
        seconds = (now - watch.unresponsive_since).total_seconds()
        return [Telling(Notification.Kind.RESPONSIVE, {"seconds": seconds})]
    return []


def _news_of_shard(shard: Shard, changes: Changes, grant: Grant | None, now: datetime) -> list[Telling]:
    """Return what the operators have not been told yet about this vhost. What concerns the broker, a round tells."""
    news = [grant.telling] if grant is not None and grant.telling is not None else []
    if _short_is_news(changes, shard, now):
        facts = {"missing": changes.short, "seen": changes.seen, "vhost": shard.vhost}
        news.append(Telling(Notification.Kind.SHORT_LIST, facts))
    return news


def _short_is_news(changes: Changes, memory: Watch | Shard, now: datetime) -> bool:
    """Return whether operators are to hear of a short list: a node that stops makes lists short now and then.

    A vhost that loses its few queues is none: it happens every day.
    """
    told_lately = memory.short_told_at is not None and now - memory.short_told_at < SHORT_TOLD_EVERY
    few = isinstance(memory, Shard) and changes.short <= settings.GUARDIAN_DELETE_BRAKE
    return changes.short > 0 and not told_lately and not few


def _remember(watch: Watch, changes: Changes, seen: Snapshot, exchanges: list[str] | None, now: datetime) -> None:
    """Write down what the next pass needs to know of this one."""
    news = {
        **_of_list(watch, changes, seen, now),
        **_of_exchanges(exchanges, now),
        **after_whole_pass(watch, changes.kept, changes.short > 0, now),
        "outage_since": None,
        "next_pass_at": None,
    }
    Watch.objects.filter(id=watch.id).update(**news)
    if seen.exact and watch.unresponsive_since is not None:
        Shard.objects.update(unresponsive_since=None)


def _remember_shard(
    watch: Watch,
    shard: Shard,
    changes: Changes,
    grant: Grant | None,
    seen: Snapshot,
    exchanges: list[str] | None,
    now: datetime,
) -> None:
    """Write down what the next pass over this vhost needs to know of this one, and the next round."""
    of_watch = {**_of_exchanges(exchanges, now), **(grant.of_watch if grant is not None else {})}
    if of_watch:
        Watch.objects.filter(id=watch.id).update(**of_watch)
    news = {
        **_of_list(shard, changes, seen, now),
        **(grant.of_shard if grant is not None else nothing_taken(shard, watch)),
        "passed_at": now,
        "missing": changes.missing,
    }
    Shard.objects.filter(id=shard.id).update(**news)


def _of_list(memory: Watch | Shard, changes: Changes, seen: Snapshot, now: datetime) -> dict[str, Any]:
    """Return what is to be remembered of a list."""
    if isinstance(memory, Shard) and seen.unlisted:
        return {"failures": memory.failures + 1}
    news: dict[str, Any] = {
        "failures": 0,
        "nodes": sorted(seen.nodes) if seen.steady else [],
        "listed_at": now,
        **({} if seen.lagging else {"exact_at": now}),
        "short_lists": changes.short_lists,
        "unresponsive_since": None if seen.exact else (memory.unresponsive_since or now),
    }
    if _short_is_news(changes, memory, now):
        news["short_told_at"] = now
    return news


def _of_exchanges(exchanges: list[str] | None, now: datetime) -> dict[str, Any]:
    return {} if exchanges is None else {"exchanges_listed_at": now, "misnamed_exchanges": exchanges}


def file(report: Report) -> None:
    """Keep the report as a row."""
    lists = {"misnamed": len(report.misnamed), "misnamed_exchanges": len(report.misnamed_exchanges)}
    left_out = ("dry_run", "condemned", "would_delete", "another_pass", "away", "given_up", "told", *lists)
    Pass.objects.create(**lists, **{name: value for name, value in asdict(report).items() if name not in left_out})
