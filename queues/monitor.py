"""One pass of the monitor: list, compare, act, record.

``run_pass`` is what the Celery task, the management command and the operator's button call. The rules are elsewhere:
``comparison.py`` says what follows from a list, ``deletion.py`` deletes, ``outbox.py`` tells.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Case, F, When
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues import bulk, outbox, removals, subscriptions
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
)
from queues.deletion import Deletion, Outcome, write_events
from queues.facts import Facts
from queues.lease import HeldLease, LeaseLost, LeaseTaken, lease
from queues.models import Notification, Pass, Queue, QueueEvent, QueueSample, Watch
from queues.outbox import Telling
from queues.thresholds import GONE, policy
from rabbit import connections, snapshot
from rabbit.management import BrokerError, Management
from rabbit.names import DEAD_LETTER_QUEUE, Kind, kind_of_exchange
from rabbit.snapshot import Snapshot

logger = logging.getLogger(__name__)

LEASE = "pass"
EXCHANGES_EVERY = timedelta(minutes=5)
SHORT_TOLD_EVERY = timedelta(hours=1)


@dataclass
class Report:
    """What one pass did. The names are those of ``queues.models.Pass``, and of ``monitor_queues --json``."""

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
    if watch is None or watch.next_pass_at is None:
        return True
    # Later than the longest wait from now it can't be, unless the clock was set back.
    return not timezone.now() < watch.next_pass_at <= timezone.now() + timedelta(seconds=_longest_wait())


def seconds_to_wait() -> float:
    """Return the seconds to wait after a pass: the poll interval, longer after failures to reach the broker."""
    watch = Watch.objects.filter(id=1).first()
    return _wait(watch.failures if watch else 0)


def run_pass(*, force: bool = False, dry_run: bool = False) -> Report:
    """Run one pass and return its report.

    ``force`` lifts the brake on bulk deletion and believes a list that is far too short; ``dry_run`` looks and decides,
    and changes nothing. Where another process is at it, the report says so and nothing is done.
    """
    began = time.monotonic()
    report = Report(at=timezone.now(), dry_run=dry_run)
    if dry_run:
        _pass(report, None, force)
    else:
        try:
            with lease(LEASE) as held:
                _pass(report, held, force)
                report.seconds = time.monotonic() - began
                _file(report)
        except LeaseTaken:
            report.another_pass = True
        except LeaseLost as error:
            report.given_up = True
            report.errors.append(str(error))
            report.seconds = time.monotonic() - began
            logger.error("The pass was given up: %s", error)
            _file(report)
        if report.told:
            outbox.nudge()
    report.seconds = time.monotonic() - began
    return report


def _pass(report: Report, held: HeldLease | None, force: bool) -> None:
    """Run a pass under this lease; without one, look and decide only."""
    now = report.at
    watch = Watch.objects.get_or_create(id=1)[0] if held else Watch.objects.filter(id=1).first() or Watch()
    agents_vhosts = subscriptions.agent_vhosts()
    vhosts = guarded_vhosts(agents_vhosts)
    going_by = rules(vhosts)
    try:
        management = connections.management()
        seen = snapshot.take(management, vhosts, held.keep if held else lambda: None)
        memory = _memory(management) if going_by.policy.needs_memory else 0.0
        report.listing_seconds = seen.seconds
        known = _known()
        stopped: frozenset[str] = frozenset()
        if known.keys() - {(queue.vhost, queue.name) for queue in seen.queues}:
            # Something is missing: make sure that the list may be believed.
            snapshot.require_administrator(management)
            stopped = frozenset(snapshot.stopped_vhosts(management))
    except BrokerError as error:
        _away(report, watch, error, held)
        return
    if held:
        held.keep()
    known.update(_returned(seen, known))
    agents = _agents(agents_vhosts)
    changes = compare(
        seen,
        known,
        _accounts(),
        going_by,
        Earlier(frozenset(watch.nodes), watch.short_lists),
        memory=memory,
        now=now,
        force=force,
        stopped_vhosts=stopped,
        agents=agents,
    )
    exchanges = _misnamed_exchanges(management, watch, going_by, report)
    if held:
        held.keep()
    _count(report, changes, seen, agents)
    report.misnamed_exchanges = exchanges if exchanges is not None else watch.misnamed_exchanges
    facts = _gather_facts(management, changes, now)
    deletion = Deletion(management, connections.amqp_url(), going_by, facts)
    if held is None:
        look = deletion.look_again(changes.condemned, exact=seen.exact)
        report.would_delete = [{"vhost": one.queue.vhost, "queue": one.queue.name} for one in look.over]
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


def _note_refusals(watch: Watch, outcome: Outcome, held: HeldLease, now: datetime) -> int:
    """Tell the operators once while the broker refuses to delete queues; return the number of notifications."""
    if bool(outcome.refused) == bool(watch.refused_since):
        return 0
    with transaction.atomic():
        held.renew()
        Watch.objects.filter(id=watch.id).update(refused_since=now if outcome.refused else None)
        if not outcome.refused:
            return 0
        facts = {"count": outcome.refused, "error": outcome.errors[0]}
        return outbox.tell([Telling(Notification.Kind.REFUSED, facts)], now)


def _away(report: Report, watch: Watch, error: BrokerError, held: HeldLease | None) -> None:
    """Note that the broker could not be asked, and tell the operators once for each outage."""
    report.away = True
    report.errors.append(str(error))
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
            report.told = outbox.tell([Telling(Notification.Kind.OUTAGE, {"error": str(error)})], report.at)


def _wait(failures: int) -> float:
    return float(min(settings.GUARDIAN_POLL_SECONDS * 2 ** min(failures, 20), _longest_wait()))


def _longest_wait() -> float:
    return float(max(settings.GUARDIAN_POLL_SECONDS, settings.GUARDIAN_POLL_MAX_SECONDS))


def _known() -> dict[QueueName, Known]:
    """Return the rows of the queues that are there as far as is known, by (vhost, name)."""
    rows = Queue.objects.exclude(state=GONE)
    return {(row[1], row[2]): Known._make(row) for row in rows.order_by().values_list(*Known._fields)}


def _returned(seen: Snapshot, known: Mapping[QueueName, Known]) -> dict[QueueName, Known]:
    """Return the rows of queues that were gone and are listed again."""
    unknown = [key for queue in seen.queues if (key := (queue.vhost, queue.name)) not in known]
    if not unknown:
        return {}
    rows = Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), unknown), state=GONE).order_by()
    return {(row[1], row[2]): Known._make(row) for row in rows.values_list(*Known._fields)}


def _accounts() -> dict[str, PulseAccount]:
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


def _count(report: Report, changes: Changes, seen: Snapshot, agents: Agents) -> None:
    """Put the figures of these changes into the report, and what was wrong with the list."""
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
        report.errors.append(f"the brake holds: {changes.braked} queues are to be deleted; look, then use --force")


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
    return Facts.gather(management, connections.amqp_url(), told, now)


WRITTEN = tuple(
    name for name in Known._fields if name not in ("id", "vhost", "name", "unbounded", "warn_length", "max_length")
)
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
        lost = [(queue.id, queue.misses, watch.listed_at or now) for queue in changes.missed if queue.misses == 1]
        bulk.update(Queue, ("misses", "last_seen"), lost)
        absent = [queue for queue in changes.missed if queue.misses != 1] + changes.gone
        bulk.update(Queue, WRITTEN, [(queue.id, *(getattr(queue, name) for name in WRITTEN)) for queue in absent])
        if changes.vanished:
            subscriptions.mark_vanished([(queue.vhost, queue.name) for queue in changes.vanished])
        if changes.returned:
            subscriptions.mark_returned([(queue.vhost, queue.name) for queue in changes.returned])

        def with_id(queue: Known) -> Known:
            return queue if queue.id is not None else queue._replace(id=ids[queue.vhost, queue.name])

        samples = [(with_id(queue).id, now, queue.length) for queue in changes.samples]
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

    Three statements at most, which lock what is about to be written: accounts and owners first, as whoever removes one
    does.
    """
    whole = [*changes.new, *changes.changed, *changes.missed, *changes.gone]
    removed = _removed(PulseUser, {queue.pulse_user_id for queue in whole} - {None})
    departed = _removed(Owner, {queue.owner_id for queue in whole} - {None})
    written = [*changes.changed, *changes.lengths, *changes.missed, *changes.gone]
    touched = {queue.id for queue in written} | {one.queue.id for one in changes.condemned} - {None}
    gone: set[int | None] = set()
    if touched:
        these = bulk.among(Queue, ("id",), [(id_,) for id_ in touched])
        rows = Queue.objects.select_for_update().filter(these).order_by("id")
        went = Case(When(state=GONE, then=F("last_seen")))
        # A row that went since this pass began may be in its list all the same, and is no queue that came back. One
        # last seen later than now was written before the clock was set back.
        at_last = timezone.now()
        gone = {
            id_
            for id_, went_at in rows.annotate(went_at=went).values_list("id", "went_at")
            if went_at is not None and (id_ not in returned or now <= went_at <= at_last)
        }
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
    if changes.braked and watch.brake_since is None:
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
    """Write down what the next pass needs to know of this one."""
    news: dict[str, Any] = {
        "failures": 0,
        "outage_since": None,
        "next_pass_at": None,
        "nodes": sorted(seen.nodes) if seen.steady else [],
        "listed_at": now,
        "short_lists": changes.short_lists,
        "brake_since": (watch.brake_since or now) if changes.braked else None,
        "unresponsive_since": None if seen.exact else (watch.unresponsive_since or now),
    }
    if _short_is_news(changes, watch, now):
        news["short_told_at"] = now
    if exchanges is not None:
        news.update(exchanges_listed_at=now, misnamed_exchanges=exchanges)
    Watch.objects.filter(id=watch.id).update(**news)


def _file(report: Report) -> None:
    """Keep the report as a row."""
    lists = {"misnamed": len(report.misnamed), "misnamed_exchanges": len(report.misnamed_exchanges)}
    left_out = ("dry_run", "would_delete", "another_pass", "away", "given_up", "told", *lists)
    Pass.objects.create(**lists, **{name: value for name, value in asdict(report).items() if name not in left_out})
