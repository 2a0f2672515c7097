"""One pass of the monitor: list, compare, act, record.

The Celery task, the management command and the operator's button call ``run_pass``. The rules are elsewhere:
``comparison.py`` says what follows from a list, ``brake.py`` what an operator released, ``deletion.py`` deletes,
``outbox.py`` notifies.
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
from django.db.models import Case, F, When
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues import bulk, outbox, removals, subscriptions
from queues.brake import after_pass, is_news, released_queues
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
from queues.lease import HeldLease, LeaseLost, LeaseTaken, lease
from queues.models import Notification, Pass, Queue, QueueEvent, QueueSample, Watch
from queues.outbox import Telling
from queues.thresholds import GONE, policy
from rabbit import connections, directly, snapshot
from rabbit.management import BrokerError, Management
from rabbit.names import DEAD_LETTER_QUEUE, Kind, kind_of_exchange
from rabbit.prometheus import Untrusted
from rabbit.snapshot import QueueSeen, Snapshot

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
        with lease(LEASE) as held, _no_search_for_garbage():
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
    """Run a pass under this lease; without one, look and decide only. ``exactly``: by exact lengths."""
    now = report.at
    watch = Watch.objects.get_or_create(id=1)[0] if held else Watch.objects.filter(id=1).first() or Watch()
    agents_vhosts = subscriptions.agent_vhosts()
    vhosts = guarded_vhosts(agents_vhosts)
    going_by = rules(vhosts)
    try:
        management = connections.management()
        expect = cache(partial(_expected, going_by, agents_vhosts))
        figures = None
        if held and not (exactly or force):
            figures = _by_figures(report, management, going_by, watch, held, expect)
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
            known = _known()
    except BrokerError as error:
        _note_outage(report, watch, str(error), held)
        return
    if held:
        held.keep()
    if listed != known.keys():
        known.update(_returned(listed - known.keys()))
    accounts, agents = _accounts(), _agents(agents_vhosts)
    if is_short or (accounts, agents) != (accounts_before, agents_before):
        as_before = undisturbed(known, accounts, agents, going_by)

    def judge() -> Changes:
        return compare(
            seen,
            known,
            accounts,
            going_by,
            Earlier(frozenset(watch.nodes), watch.short_lists),
            memory=in_use,
            now=now,
            force=force,
            stopped_vhosts=stopped,
            agents=agents,
            let_go=released_queues(watch, now),
            as_before=as_before,
        )

    changes = judge()
    if changes.unconfirmed:
        unconfirmed = frozenset(changes.unconfirmed)
        seen = confirmed(seen, unconfirmed, directly.ask(connections.amqp_url(), unconfirmed), known)
        changes = judge()
    if seen.lagging and (changes.condemned or changes.kept or changes.short):
        _pass(report, held, force, exactly=True)  # nothing is deleted by figures that lag, or gone by a short list
        return
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
    condemned, report.told = _write(changes, returned, seen, watch, facts, exchanges, held, now)
    finished = deletion.finish(changes.deleted, held)
    outcome = deletion.carry_out(condemned, held, exact=seen.exact)
    report.deleted = finished.deleted + outcome.deleted
    report.kept = outcome.kept
    report.told += finished.told + outcome.told
    report.errors += outcome.errors
    report.told += _note_refusals(watch, outcome, held, now)


class Expected(NamedTuple):
    """What the database says while the broker works at its list.

    Accounts and registrations are read again when that is there, since what the list has was registered before. Where
    they are what they were, the queues ``undisturbed`` by them are the same.
    """

    known: dict[QueueName, Known]
    accounts: dict[str, PulseAccount]
    agents: Agents
    undisturbed: Mapping[QueueSeen, bool]


def _expected(going_by: Rules, agents_vhosts: Mapping[str, int]) -> Expected:
    known = _known()
    accounts, agents = _accounts(), _agents(agents_vhosts)
    return Expected(known, accounts, agents, undisturbed(known, accounts, agents, going_by))


def _by_figures(
    report: Report,
    management: Management,
    going_by: Rules,
    watch: Watch,
    held: HeldLease,
    expect: Callable[[], Expected],
) -> Snapshot | None:
    """Return what the nodes' Prometheus endpoints and the rows say together; None: the list is to be asked for.

    That is so once a minute, and while anything is wrong that only a list tells of.
    """
    since = report.at - watch.exact_at if watch.exact_at is not None else EXACT_LIST_EVERY
    is_due = not timedelta(0) <= since < EXACT_LIST_EVERY
    is_wrong = watch.failures or watch.short_lists or watch.braked or watch.unresponsive_since is not None
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
        return outbox.tell([Telling(Notification.Kind.REFUSED, facts)], now)


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
            report.told = outbox.tell([Telling(Notification.Kind.OUTAGE, {"error": error})], report.at)


def _wait(failures: int) -> float:
    longest = max(settings.GUARDIAN_POLL_SECONDS, settings.GUARDIAN_POLL_MAX_SECONDS)
    return float(min(settings.GUARDIAN_POLL_SECONDS * 2 ** min(failures, 20), longest))


SHARED = ("vhost", "type", "node", "state", "said")
"""Fields that have the same few texts in all rows. Each text is one object, also where the list names it: rows are
compared in a third less time, and need less memory."""


def _known() -> dict[QueueName, Known]:
    """Return the rows of the queues that aren't gone, by (vhost, name)."""
    columns = bulk.columns(Queue.objects.exclude(state=GONE).order_by(), Known._fields)
    for name in SHARED if columns else ():
        columns[name] = tuple(map(sys.intern, columns[name]))
    return {row[1:3]: row for row in map(Known._make, zip(*columns.values(), strict=True))}


def _returned(unknown: Collection[QueueName]) -> dict[QueueName, Known]:
    """Return the rows of those of these listed queues, by (vhost, name), that were gone."""
    if not unknown:
        return {}
    rows = Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), list(unknown)), state=GONE).order_by()
    return {(row[1], row[2]): Known._make(row) for row in rows.values_list(*Known._fields)}


def _accounts() -> dict[str, PulseAccount]:
    """Return the Pulse users by their names."""
    rows = PulseUser.objects.order_by().values_list("username", "id", "warn_length", "max_length", "removing_since")
    return {username: PulseAccount(id_, warn, most, since is not None) for username, id_, warn, most, since in rows}


def _agents(vhosts: Mapping[str, int]) -> Agents:
    """Return what agents registered, where these vhosts are theirs. Where they have none, nobody registered anything.

    Call it when the queues are listed: a registration is written before its queue is made, so what the list has is
    known to be registered.
    """
    if not vhosts:
        return NO_AGENTS
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
    changes: Changes,
    returned: Collection[int | None],
    seen: Snapshot,
    watch: Watch,
    facts: Facts,
    exchanges: list[str] | None,
    held: HeldLease,
    now: datetime,
) -> tuple[list[Condemned], int]:
    """Write everything that changed in one transaction. ``returned`` are the ids of rows that were known to be gone.

    Return the condemned queues with their ids, and the number of notifications.
    """
    with transaction.atomic():
        held.renew()
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
        last_seen = watch.listed_at or now  # a row of which nothing changes isn't written while its queue is there
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
        told = outbox.tell(tellings + _news_for_operators(changes, seen, watch, now), now)
        _remember(watch, changes, seen, exchanges, now)
    return condemned, told


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
        seconds = (now - watch.outage_since).total_seconds()
        news.append(Telling(Notification.Kind.OUTAGE_OVER, {"seconds": seconds}))
    if is_news(watch, changes.braked):
        news.append(Telling(Notification.Kind.BRAKE, {"count": changes.braked, "seen": changes.seen}))
    if _short_is_news(changes, watch, now):
        news.append(Telling(Notification.Kind.SHORT_LIST, {"missing": changes.short, "seen": changes.seen}))
    if not seen.exact and watch.unresponsive_since is None:
        news.append(Telling(Notification.Kind.UNRESPONSIVE, {}))
    if seen.exact and watch.unresponsive_since is not None:
        seconds = (now - watch.unresponsive_since).total_seconds()
        news.append(Telling(Notification.Kind.RESPONSIVE, {"seconds": seconds}))
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
