"""One pass of the monitor: fetch, load, compare, write, act.

The Celery task, the management command and the operator's button call ``run_pass``. The rules are elsewhere:
``comparison.py`` says what follows from a list, ``brake.py`` what an operator released, ``deletion.py`` deletes,
``outbox.py`` notifies.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Case, F, QuerySet, When
from django.utils import timezone

from accounts.models import Owner, PulseUser
from core import broker, bulk
from core.leases import HeldLease, LeaseLost, LeaseTaken, lease
from notifications import audience, enqueue
from notifications.enqueue import Telling
from queues import kinds, registered
from queues.brake import after_pass, is_news, released_queues
from queues.comparison import (
    NO_AGENTS,
    Agents,
    Changes,
    Earlier,
    Known,
    Message,
    Observation,
    PulseAccount,
    QueueName,
    Rules,
    compare,
    confirmed,
)
from queues.deletion import Deletion, Look, Outcome, write_events
from queues.facts import Facts
from queues.models import Pass, Queue, QueueEvent, QueueSample, Watch
from queues.subject import about
from queues.thresholds import GONE, policy
from rabbit import amqp, snapshot
from rabbit.management import BrokerError, Management
from rabbit.names import DEAD_LETTER_QUEUE, Kind, kind_of_exchange
from rabbit.prometheus import NotUsable
from rabbit.snapshot import Snapshot

logger = logging.getLogger(__name__)

LEASE = "pass"

EXCHANGES_EVERY = timedelta(minutes=5)
EXACT_LIST_EVERY = timedelta(minutes=1)
"""Where lengths come from figures that lag, and that say nothing else of a queue, the list still comes so often."""

FIGURES_LAG = timedelta(seconds=10)
"""So long after a list figures may be older than it, so that by them people would be told what is true no more."""

SHORT_TOLD_EVERY = timedelta(hours=1)


@dataclass
class Report:
    """What one pass did. The names are those of ``queues.models.Pass``, and of ``monitor_queues --json``.

    Of a dry run, ``condemned`` are the queues that are to go, also where the brake keeps them, and ``would_delete``
    those that would go: the second look confirms them, or has yet to.
    """

    at: datetime
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
        agents = registered.provider().vhosts()
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
        _run(report, force)
        return report
    began = time.monotonic()
    _pass(report, None, force)
    report.seconds = time.monotonic() - began
    return report


def _run(report: Report, force: bool) -> None:
    """Run a pass under the lease, save its report, and have people notified."""
    began = time.monotonic()
    try:
        with lease(LEASE) as held:
            report.at, began = timezone.now(), time.monotonic()  # so that no two reports overlap
            _pass(report, held, force)
            report.seconds = time.monotonic() - began
            save_report(report)
    except LeaseTaken:
        report.another_pass = True
    except LeaseLost as error:
        report.given_up = True
        report.errors.append(str(error))
        report.seconds = time.monotonic() - began
        logger.error("The pass was given up: %s", error)
        save_report(report)
    if report.told:
        enqueue.nudge(report.told)
    report.seconds = time.monotonic() - began


@dataclass(frozen=True)
class PassRun:
    """What the steps of one pass share. A run without a lease is a dry run, which writes nothing."""

    report: Report
    watch: Watch
    management: Management
    rules: Rules
    agents_vhosts: Mapping[str, int]
    lease: HeldLease | None
    force: bool

    @property
    def now(self) -> datetime:
        """When the pass began."""
        return self.report.at

    @property
    def vhosts(self) -> list[str] | None:
        """The vhosts to list; None: all."""
        return None if self.rules.vhosts is None else sorted(self.rules.vhosts)

    def keep_lease(self) -> None:
        """Renew the lease if it is time to."""
        if self.lease is not None:
            self.lease.keep()


def _pass(report: Report, held: HeldLease | None, force: bool) -> None:
    """Run one pass: fetch, load, compare, write, act. Without a lease, stop after the comparison."""
    watch = Watch.objects.get_or_create(id=1)[0] if held else Watch.objects.filter(id=1).first() or Watch()
    agents_vhosts = registered.provider().vhosts()
    going_by = rules(guarded_vhosts(agents_vhosts))
    try:
        run = PassRun(report, watch, broker.management(), going_by, agents_vhosts, held, force)
        observation, changes = _observe(run)
    except BrokerError as error:
        _note_outage(report, watch, str(error), held)
        return
    exchanges = _misnamed_exchanges(run)
    run.keep_lease()
    _count(report, changes)
    _note_errors(report, changes, observation)
    facts = _gather_facts(run, changes)
    deletion = Deletion(run.management, broker.amqp_url(), run.rules, facts)
    if held is None:
        _preview(report, changes, deletion.look_again(changes.condemned, exact=observation.snapshot.exact))
        return
    _write(run, held, observation, changes, facts, exchanges)
    _act(run, held, changes, deletion, exact=observation.snapshot.exact)


def _observe(run: PassRun) -> tuple[Observation, Changes]:
    """Fetch, load and compare: by the nodes' Prometheus figures if that is enough, else by the list.

    Figures lag, so nothing is deleted by them, and nothing is gone by them where too much is missing.
    """
    if _may_use_figures(run):
        known = _known()
        figures = _fetch_figures(run, known)
        if figures is not None:
            observation, changes = _compare(run, figures, known)
            if not (changes.condemned or changes.kept or changes.short):
                return observation, changes
    seen = snapshot.take(run.management, run.vhosts, run.keep_lease)
    return _compare(run, seen, _known())


def _compare(run: PassRun, seen: Snapshot, known: dict[QueueName, Known]) -> tuple[Observation, Changes]:
    """Load what is missing and compare. Confirm lengths that lag by passive declares, and compare again by these."""
    run.report.listing_seconds = seen.seconds
    observation = _load(run, seen, known)
    changes = compare(observation, run.rules, now=run.now, force=run.force)
    if changes.unconfirmed:
        depths = amqp.ask(broker.amqp_url(), changes.unconfirmed)
        seen = confirmed(seen, changes.unconfirmed, depths, observation.known)
        observation = replace(observation, snapshot=seen)
        changes = compare(observation, run.rules, now=run.now, force=run.force)
    return observation, changes


def _may_use_figures(run: PassRun) -> bool:
    """Return whether the nodes' Prometheus figures may replace the list.

    The list is fetched once a minute, and while anything is wrong that only a list shows.
    """
    watch = run.watch
    is_wrong = watch.failures or watch.short_lists or watch.braked or watch.unresponsive_since is not None
    if settings.GUARDIAN_SNAPSHOT != "prometheus" or run.lease is None or run.force or is_wrong:
        return False
    return watch.exact_at is not None and timedelta(0) <= run.now - watch.exact_at < EXACT_LIST_EVERY


def _fetch_figures(run: PassRun, known: Mapping[QueueName, Known]) -> Snapshot | None:
    """Return the snapshot by the nodes' Prometheus figures and the known rows; None: fetch the list."""
    is_behind = run.watch.exact_at is not None and run.now - run.watch.exact_at < FIGURES_LAG
    leaves_alone = run.rules.leaves_alone
    try:
        return broker.prometheus().take(
            run.management, run.vhosts, known, leaves_alone, run.keep_lease, keeps_lengths=is_behind
        )
    except NotUsable as reason:
        logger.info("The queues are listed, since %s.", reason)
    except BrokerError as error:
        logger.warning("The queues are listed, since their figures could not be had: %s", error)
        run.report.errors.append(f"the queues were listed, since their figures could not be had: {error}")
    return None


def _load(run: PassRun, seen: Snapshot, known: dict[QueueName, Known]) -> Observation:
    """Read what to compare the snapshot and the known rows with.

    Accounts and registrations are read after the snapshot was fetched: a registration is written before its queue is
    declared, so whatever the snapshot shows has been registered by now.
    """
    listed = {(queue.vhost, queue.name) for queue in seen.queues}
    stopped: frozenset[str] = frozenset()
    if known.keys() - listed:  # make sure that the list is whole
        snapshot.require_administrator(run.management)
        stopped = frozenset(snapshot.stopped_vhosts(run.management))
    run.keep_lease()
    return Observation(
        snapshot=seen,
        known=known | _returned(listed - known.keys()),
        accounts=_accounts(),
        agents=_agents(run.agents_vhosts),
        earlier=Earlier(frozenset(run.watch.nodes), run.watch.short_lists),
        memory=_memory(run.management) if run.rules.policy.needs_memory else 0.0,
        stopped_vhosts=stopped,
        released=released_queues(run.watch, run.now),
    )


def _preview(report: Report, changes: Changes, look: Look) -> None:
    """Put into the report of a dry run what is to be deleted, and what would be."""
    report.condemned = [_named(key) for key in sorted({one.key for one in changes.condemned} | set(changes.kept))]
    report.would_delete = [_named(one.key) for one in look.over]
    report.kept = len(look.kept)


def _act(run: PassRun, held: HeldLease, changes: Changes, deletion: Deletion, *, exact: bool) -> None:
    """Record the deletions that an earlier pass asked for, and delete the condemned queues."""
    report = run.report
    finished = deletion.finish(changes.deleted, held)
    outcome = deletion.carry_out(changes.condemned, held, exact=exact)
    report.deleted = finished.deleted + outcome.deleted
    report.kept = outcome.kept
    report.told += finished.told + outcome.told + _note_refusals(run.watch, outcome, held, run.now)
    report.errors += outcome.errors


def _note_refusals(watch: Watch, outcome: Outcome, held: HeldLease, now: datetime) -> int:
    """Notify the operators once while the broker refuses to delete queues; return the number of notifications."""
    if bool(outcome.refused) == bool(watch.refused_since):
        return 0
    with transaction.atomic():
        held.renew()
        Watch.objects.filter(id=watch.id).update(refused_since=now if outcome.refused else None)
        if not outcome.refused:
            return 0
        facts = {"count": outcome.refused, "error": outcome.errors[0]}
        return enqueue.tell([Telling(kinds.REFUSED, facts)], now)


def _note_outage(report: Report, watch: Watch, error: str, held: HeldLease | None) -> None:
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
            report.told = enqueue.tell([Telling(kinds.OUTAGE, {"error": error})], report.at)


def _wait(failures: int) -> float:
    longest = max(settings.GUARDIAN_POLL_SECONDS, settings.GUARDIAN_POLL_MAX_SECONDS)
    return float(min(settings.GUARDIAN_POLL_SECONDS * 2 ** min(failures, 20), longest))


def _known() -> dict[QueueName, Known]:
    """Return the rows of the queues that aren't gone, by (vhost, name)."""
    return _by_name(Queue.objects.exclude(state=GONE))


def _returned(unknown: Collection[QueueName]) -> dict[QueueName, Known]:
    """Return the rows of those of these listed queues, by (vhost, name), that were gone."""
    if not unknown:
        return {}
    return _by_name(Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), list(unknown)), state=GONE))


def _by_name(queues: QuerySet[Queue]) -> dict[QueueName, Known]:
    rows = map(Known._make, queues.order_by().values_list(*Known._fields))
    return {(row.vhost, row.name): row for row in rows}


def _accounts() -> dict[str, PulseAccount]:
    """Return the Pulse users by their names."""
    rows = PulseUser.objects.order_by().values_list("username", "id", "warn_length", "max_length", "removing_since")
    return {username: PulseAccount(id_, warn, most, since is not None) for username, id_, warn, most, since in rows}


def _agents(vhosts: Mapping[str, int]) -> Agents:
    """Return what agents registered in these vhosts, which are theirs."""
    if not vhosts:
        return NO_AGENTS
    agents = registered.provider()
    return Agents(agents.queues(), vhosts, agents.leaving())


def _memory(management: Management) -> float:
    """Return the memory use of the fullest running node, as a fraction of its watermark."""
    shares = [
        node.mem_used / node.mem_limit
        for node in management.nodes()
        if node.running and node.mem_used is not None and node.mem_limit
    ]
    return max(shares, default=0.0)


def _misnamed_exchanges(run: PassRun) -> list[str] | None:
    """Return the exchanges in the queues' namespace, and report them; None: not listed in this pass."""
    watch, report = run.watch, run.report
    report.misnamed_exchanges = watch.misnamed_exchanges
    since = run.now - watch.exchanges_listed_at if watch.exchanges_listed_at is not None else EXCHANGES_EVERY
    if timedelta(0) <= since < EXCHANGES_EVERY:
        return None
    try:
        exchanges = run.management.exchanges(run.rules.pulse_vhost)
    except BrokerError as error:
        report.errors.append(f"the exchanges could not be listed: {error}")
        return None
    report.misnamed_exchanges = sorted(
        exchange.name.replace("\0", "\N{REPLACEMENT CHARACTER}")
        for exchange in exchanges
        if kind_of_exchange(exchange.name) is Kind.MISNAMED
    )
    return report.misnamed_exchanges


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


def _note_errors(report: Report, changes: Changes, observation: Observation) -> None:
    """Put into the report what was wrong with the list, and that the brake holds."""
    seen, agents = observation.snapshot, observation.agents
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
        report.errors.append(
            f"the brake holds: {changes.braked} queues are to be deleted; look, then release it in the admin "
            "or use --force"
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


def _gather_facts(run: PassRun, changes: Changes) -> Facts:
    """Ask about the queues that somebody is to be notified about."""
    candidates = [message.queue for message in changes.messages] + [one.queue for one in changes.condemned]
    people = audience.recipients_of(queue.whose for queue in candidates)
    told = [queue for queue in candidates if audience.is_anybody_told(queue.whose, people)]
    return Facts.gather(run.management, broker.amqp_url(), told, run.now, among=changes.seen)


LIMITS = ("unbounded", "warn_length", "max_length")
WRITTEN = tuple(name for name in Known._fields if name not in ("id", "vhost", "name", *LIMITS))
"""The fields that a pass writes. The others are people's."""


def _write(
    run: PassRun,
    held: HeldLease,
    observation: Observation,
    changes: Changes,
    facts: Facts,
    exchanges: list[str] | None,
) -> None:
    """Write everything that changed in one transaction, but for concurrent edits, and give new queues their ids."""
    returned = {row.id for row in observation.known.values() if row.state == GONE}
    with transaction.atomic():
        held.renew()
        _drop_concurrent_edits(changes, returned, run.now)
        _insert(changes, run.now)
        _update(changes, run.watch.listed_at or run.now, run.now)
        _write_history(changes, facts, run.now)
        tellings = [_telling(message, facts) for message in changes.messages]
        news = _news_for_operators(changes, observation.snapshot, run.watch, run.now)
        run.report.told = enqueue.tell(tellings + news, run.now)
        _remember(run.watch, changes, observation.snapshot, exchanges, run.now)


def _insert(changes: Changes, now: datetime) -> None:
    """Insert the new queues, and set their ids in the changes."""
    fields = ("uuid", *Known._fields[1:], "first_seen", "last_seen")
    rows = [(uuid.uuid4(), *queue[1:], now, now) for queue in changes.new]
    inserted = bulk.insert(Queue, fields, rows, returning=("id", "vhost", "name"))
    changes.set_ids({(vhost, name): id_ for id_, vhost, name in inserted})


def _update(changes: Changes, last_listed: datetime, now: datetime) -> None:
    """Update the rows that changed. A queue that is missing was last seen when it was ``last_listed``."""
    changed = [(queue.id, *_written(queue), now) for queue in changes.changed]
    bulk.update(Queue, (*WRITTEN, "last_seen"), changed)
    grown = [(queue.id, queue.ready, queue.unacknowledged, now) for queue in changes.lengths]
    bulk.update(Queue, ("ready", "unacknowledged", "last_seen"), grown)
    lost = [queue for queue in changes.missed if queue.misses == 1] + changes.listed_last
    bulk.update(
        Queue,
        ("misses", "over_unacked_since", "last_seen"),
        [(queue.id, queue.misses, queue.over_unacked_since, last_listed) for queue in lost],
    )
    absent = [queue for queue in changes.missed if queue.misses != 1] + changes.gone
    bulk.update(Queue, WRITTEN, [(queue.id, *_written(queue)) for queue in absent])
    if changes.vanished:
        registered.provider().vanished([(queue.vhost, queue.name) for queue in changes.vanished])
    if changes.returned:
        registered.provider().returned([(queue.vhost, queue.name) for queue in changes.returned])


def _written(queue: Known) -> list[Any]:
    return [getattr(queue, name) for name in WRITTEN]


def _write_history(changes: Changes, facts: Facts, now: datetime) -> None:
    """Insert samples and events. An event of a condemned queue has the facts that it was condemned by."""
    samples = [(queue.id, now, queue.length) for queue in changes.samples]
    bulk.insert(QueueSample, ("queue", "at", "length"), samples)
    condemned = {one.queue.id: facts.of(one.queue, one.thresholds) for one in changes.condemned}
    events = [
        (queue, kind, condemned[queue.id] if kind == QueueEvent.Kind.CONDEMNED else {"length": queue.length})
        for queue, kind in changes.events
    ]
    write_events(events, now)


def _drop_concurrent_edits(changes: Changes, returned: Collection[int | None], now: datetime) -> None:
    """Leave out what people changed since the rows were read.

    A queue that was given other limits is left to the next pass, which goes by these. Three statements at most, which
    lock what is about to be written: accounts and owners first, as the removal of one does.
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


def _telling(message: Message, facts: Facts) -> Telling:
    queue = message.queue
    told = facts.of(queue, message.thresholds, message.folded)
    return Telling(message.say.value, told, about(queue.id), *queue.whose)


def _news_for_operators(changes: Changes, seen: Snapshot, watch: Watch, now: datetime) -> list[Telling]:
    """Return what the operators have not been told yet about the broker itself."""
    news = []
    if watch.outage_since is not None:
        seconds = (now - watch.outage_since).total_seconds()
        news.append(Telling(kinds.OUTAGE_OVER, {"seconds": seconds}))
    if is_news(watch, changes.braked):
        news.append(Telling(kinds.BRAKE, {"count": changes.braked, "seen": changes.seen}))
    if _short_is_news(changes, watch, now):
        news.append(Telling(kinds.SHORT_LIST, {"missing": changes.short, "seen": changes.seen}))
    if not seen.exact and watch.unresponsive_since is None:
        news.append(Telling(kinds.UNRESPONSIVE, {}))
    if seen.exact and watch.unresponsive_since is not None:
        seconds = (now - watch.unresponsive_since).total_seconds()
        news.append(Telling(kinds.RESPONSIVE, {"seconds": seconds}))
    return news


def _short_is_news(changes: Changes, watch: Watch, now: datetime) -> bool:
    """Return whether operators are to hear of a short list: a node that stops makes lists short now and then."""
    told_lately = watch.short_told_at is not None and now - watch.short_told_at < SHORT_TOLD_EVERY
    return changes.short > 0 and not told_lately


def _remember(watch: Watch, changes: Changes, seen: Snapshot, exchanges: list[str] | None, now: datetime) -> None:
    """Write what the next pass needs to know of this one."""
    news: dict[str, Any] = {
        "failures": 0,
        "nodes": sorted(seen.nodes) if seen.steady else [],
        "listed_at": now,
        "short_lists": changes.short_lists,
        "unresponsive_since": None if seen.exact else (watch.unresponsive_since or now),
        "outage_since": None,
        "next_pass_at": None,
        **after_pass(watch, changes.kept, changes.short > 0, now),
    }
    if not seen.lagging:
        news["exact_at"] = now
    if exchanges is not None:
        news |= {"exchanges_listed_at": now, "misnamed_exchanges": exchanges}
    if _short_is_news(changes, watch, now):
        news["short_told_at"] = now
    Watch.objects.filter(id=watch.id).update(**news)


def save_report(report: Report) -> None:
    """Save the report as a row."""
    lists = {"misnamed": len(report.misnamed), "misnamed_exchanges": len(report.misnamed_exchanges)}
    left_out = ("dry_run", "condemned", "would_delete", "another_pass", "away", "given_up", "told", *lists)
    Pass.objects.create(**lists, **{name: value for name, value in asdict(report).items() if name not in left_out})
