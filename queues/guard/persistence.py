"""Read and write the rows of a pass, in a constant number of statements for any number of queues."""

import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Case, F, QuerySet, When

from accounts.models import Owner, PulseUser
from core import bulk
from core.leases import HeldLease
from notifications import enqueue
from notifications.enqueue import Notice
from queues.archives import writing
from queues.guard import alarms, limits_end, recovering, registered, unguarded
from queues.guard.destroying import PASSED_OVER, Target, why_not
from queues.guard.earlier_settings import earlier_rules, settings_to_store
from queues.guard.facts import Facts
from queues.guard.pass_run import PassRun
from queues.guard.recording import stored, write_events
from queues.mails import kinds
from queues.mails.subject import subject_key
from queues.models import Archive, Queue, QueueEvent, QueueSample, Watch
from queues.rules.brake import after_pass, released_queues
from queues.rules.changes import Changes, Message
from queues.rules.quiet import MessageKind
from queues.rules.rows import NO_REGISTRATIONS, Earlier, Observation, Registrations, StoredPulseUser, StoredQueue
from queues.rules.temporary_limits import LIMITS
from queues.rules.thresholds import DELETING, GONE, MemoryPressure
from queues.rules.turns import LONGEST_GAP
from rabbit import memory, snapshot
from rabbit.errors import BrokerError
from rabbit.memory import NodeMemory
from rabbit.names import QueueName
from rabbit.snapshot import Snapshot

SHORT_LIST_NOTICE_INTERVAL = timedelta(hours=1)

RELIEF_INTERVAL = timedelta(seconds=30)
"""The broker releases the memory of deleted queues over several seconds. Until then no others are deleted for it."""


def load(run: PassRun, listing: Snapshot, stored: dict[QueueName, StoredQueue]) -> Observation:
    """Read the rows to compare with the snapshot, in addition to the stored queues.

    Pulse users and registrations are read after the snapshot was fetched. A registration is written before its queue is
    declared, so the registration of every listed queue is already stored.
    """
    listed = {(queue.vhost, queue.name) for queue in listing.queues}
    earlier = Earlier(
        frozenset(run.watch.nodes),
        run.watch.short_lists,
        earlier_rules(run, listing),
        recovering=frozenset(_recovering(run.watch, listing, run.now)),
        recovered=frozenset(run.watch.recovering or ()),
    )
    stopped: frozenset[str] = frozenset()
    if stored.keys() - listed or earlier.rules is not None:  # check that the list is complete
        snapshot.require_administrator(run.management)
        stopped = frozenset(snapshot.stopped_vhosts(run.management, listing.nodes))
    run.keep_lease()
    nodes = memory.of_nodes(run.management) if run.rules.policy.needs_memory else {}
    return Observation(
        snapshot=listing,
        stored=stored | _returned_queues(listed - stored.keys()),
        pulse_users=_pulse_users(),
        registrations=_registrations(run.agents_vhosts),
        earlier=earlier,
        memory=nodes,
        held=_held(run, nodes),
        stopped_vhosts=stopped,
        released=released_queues(run.watch, run.now),
    )


def _recovering(watch: Watch, listing: Snapshot, now: datetime) -> dict[str, str]:
    return recovering.after(watch.recovering, watch.nodes, listing, now, was_outage=watch.failures > 0)


def stored_queues() -> dict[QueueName, StoredQueue]:
    """Return the queues that are not gone, by (vhost, name)."""
    return _by_name(Queue.objects.exclude(state=GONE))


def _returned_queues(unknown: Collection[QueueName]) -> dict[QueueName, StoredQueue]:
    """Return the rows of these listed queues that are stored as gone, by (vhost, name)."""
    if not unknown:
        return {}
    return _by_name(Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), list(unknown)), state=GONE))


def _by_name(queues: QuerySet[Queue]) -> dict[QueueName, StoredQueue]:
    return {(row.vhost, row.name): row for row in stored(queues.order_by())}


def _pulse_users() -> dict[str, StoredPulseUser]:
    """Return the Pulse users by their names."""
    columns = ("username", "id", "warn_length", "max_length", "removing_since", "hold_off_minutes")
    rows = PulseUser.objects.order_by().values_list(*columns)
    owners = PulseUser.objects.longest_owners()
    return {
        username: StoredPulseUser(id_, warn, limit, since is not None, owners.get(id_), hold_off)
        for username, id_, warn, limit, since, hold_off in rows
    }


def _registrations(vhosts: Mapping[str, int]) -> Registrations:
    """Return the agents' registrations in their vhosts."""
    if not vhosts:
        return NO_REGISTRATIONS
    provider = registered.provider()
    return Registrations(provider.queues(), vhosts, provider.pending_removals())


def _held(run: PassRun, nodes: Mapping[str, NodeMemory]) -> dict[QueueName, int]:
    """Return the bytes of memory that queues hold, if a node is under pressure.

    Empty for ``RELIEF_INTERVAL`` after queues were deleted for their memory, and if the broker doesn't answer.
    """
    relieved_at = run.watch.relieved_at
    if all(node.share <= MemoryPressure.PRESSURE_START for node in nodes.values()):
        return {}
    if relieved_at is not None and abs(run.now - relieved_at) < RELIEF_INTERVAL:
        return {}
    try:
        return memory.of_queues(run.management, run.vhosts)
    except BrokerError as error:
        run.report.errors.append(f"the memory of the queues could not be listed: {error}")
        return {}
    finally:
        run.keep_lease()


class Inventory(NamedTuple):
    """What a pass looks up every few minutes: the misnamed exchanges, and the streams without retention."""

    exchanges: list[str]
    streams: list[QueueName]


BY_PEOPLE = (*LIMITS, "acknowledged_at")
ATTEMPTS = ("attempted_at", "returned_at")

WRITTEN = tuple(name for name in StoredQueue._fields if name not in ("id", "vhost", "name", *BY_PEOPLE, *ATTEMPTS))
"""The columns that a pass writes. People set the others, and what archives a queue records its attempts."""


def write(
    run: PassRun,
    lease: HeldLease,
    observation: Observation,
    changes: Changes,
    facts: Facts,
    inventory: Inventory | None,
) -> None:
    """Write the changes in one transaction, except over concurrent edits, and set the ids of new queues."""
    returned = {row.id for row in observation.stored.values() if row.state == GONE}
    with transaction.atomic():
        lease.renew()
        _drop_concurrent_edits(changes, observation, returned, run.now)
        _insert(changes, run.now)
        _update(changes, run.watch.listed_at or run.now, run.now)
        _write_history(changes, facts, run.now)
        writing.keep_fetched([queue.id for queue in changes.gone if queue.id is not None])
        unarchived = _without_archives(changes.last_calls)
        notices = [_notice(message, facts, unarchived) for message in changes.messages]
        notices += limits_end.end_limits(observation.snapshot, run.now)
        notices += _operator_notices(changes, observation, run.watch, run.now)
        run.report.notifications = enqueue.enqueue(notices, run.now, lease)
        _update_watch(run.watch, changes, observation, inventory, run.now)


def _insert(changes: Changes, now: datetime) -> None:
    """Insert the new queues, and set their ids in the changes."""
    fields = ("uuid", *StoredQueue._fields[1:], "first_seen", "last_seen")
    rows = [(uuid.uuid4(), *queue[1:], now, now) for queue in changes.new]
    inserted = bulk.insert(Queue, fields, rows, returning=("id", "vhost", "name"))
    changes.set_ids({(vhost, name): id_ for id_, vhost, name in inserted})


def _update(changes: Changes, last_listed: datetime, now: datetime) -> None:
    """Update the changed rows. A missing queue was last seen in the list of ``last_listed``."""
    changed = [(queue.id, *_written_values(queue), now) for queue in changes.changed]
    bulk.update(Queue, (*WRITTEN, "last_seen"), changed)
    grown = [(queue.id, queue.ready, queue.unacknowledged, queue.misses, now) for queue in changes.lengths]
    bulk.update(Queue, ("ready", "unacknowledged", "misses", "last_seen"), grown)
    returned = [one.queue for one in changes.events if one.kind == QueueEvent.Kind.RETURNED]
    bulk.update(Queue, ("first_seen",), [(queue.id, now) for queue in returned])
    lost = [queue for queue in changes.missed if queue.misses == 1] + changes.listed_last
    bulk.update(
        Queue,
        ("misses", "over_unacked_since", "last_seen"),
        [(queue.id, queue.misses, queue.over_unacked_since, last_listed) for queue in lost],
    )
    absent = [queue for queue in changes.missed if queue.misses != 1]
    figures = ("misses", "ready", "unacknowledged", "over_unacked_since")
    bulk.update(Queue, figures, [(queue.id, *(getattr(queue, name) for name in figures)) for queue in absent])
    bulk.update(Queue, WRITTEN, [(queue.id, *_written_values(queue)) for queue in changes.gone])
    if changes.emptied:
        emptied = bulk.among(Queue, ("id",), [(queue.id,) for queue in changes.emptied])
        # An attempt that began after the list was fetched stays.
        Queue.objects.filter(emptied, attempted_at__lt=now).update(
            fetch_attempts=0, attempted_at=None, returned_at=None
        )
    if changes.vanished:
        registered.provider().record_missing([(queue.vhost, queue.name) for queue in changes.vanished])


def _written_values(queue: StoredQueue) -> list[Any]:
    return [getattr(queue, name) for name in WRITTEN]


def _write_history(changes: Changes, facts: Facts, now: datetime) -> None:
    """Insert samples and events. The details of a deletable queue's event are the figures of the decision."""
    samples = [(queue.id, now, queue.length) for queue in changes.samples]
    bulk.insert(QueueSample, ("queue", "at", "length"), samples)
    deletable = {one.queue.id: facts.of(one.queue, one.thresholds) for one in changes.deletable}
    events = [
        (queue, kind, deletable[queue.id] if kind == QueueEvent.Kind.DELETABLE else {"length": queue.length})
        for queue, kind in changes.events
    ]
    write_events(events, now)


def _drop_concurrent_edits(
    changes: Changes, observation: Observation, returned: Collection[int | None], now: datetime
) -> None:
    """Drop the queues, Pulse users and owners that people changed since the rows were read.

    Queues for which the deleter sent a request or recorded an outcome since the pass began are dropped, too. A queue
    with new limits, or that was acknowledged, is left to the next pass. At most three statements lock the rows to
    write: Pulse users and owners first, in the order of their removal.
    """
    with_owners = [*changes.new, *changes.changed, *changes.missed, *changes.gone]
    removed = _lock_and_find_missing(PulseUser, {queue.pulse_user_id for queue in with_owners} - {None})
    departed = _lock_and_find_missing(Owner, {queue.owner_id for queue in with_owners} - {None})
    written = [*changes.changed, *changes.lengths, *changes.missed, *changes.gone]
    judged = [one.queue for one in changes.deletable] + [one.queue for one in changes.messages]
    touched = {queue.id for queue in (*written, *judged)} - {None}
    limits = {queue.id: [getattr(queue, name) for name in BY_PEOPLE] for queue in judged}
    gone: set[int | None] = set()
    if touched:
        these = bulk.among(Queue, ("id",), [(id_,) for id_ in touched])
        rows = Queue.objects.select_for_update().filter(these).order_by("id")
        gone_at = Case(When(state=GONE, then=F("last_seen")))
        # A queue deleted after this pass began may still be in its list. That is no return.
        sent = {row.id: row.delete_sent_at for row in observation.stored.values() if row.id in touched}
        columns = ("id", "gone_at", "outcome_at", "delete_sent_at", *BY_PEOPLE)
        for id_, since, outcome_at, sent_at, *own in rows.annotate(gone_at=gone_at).values_list(*columns):
            is_gone = since is not None and (id_ not in returned or since >= now)
            has_outcome = outcome_at is not None and outcome_at >= now
            touched.remove(id_)
            if is_gone or has_outcome or sent_at != sent.get(id_) or limits.get(id_, own) != own:
                gone.add(id_)
        gone |= touched  # their rows were pruned
    if gone or removed or departed:
        changes.drop(gone, removed, departed)


def _lock_and_find_missing(model: type[PulseUser | Owner], ids: set[int | None]) -> set[int | None]:
    """Lock these rows until their ids are written, and return the ids without a row."""
    if not ids:
        return set()
    rows = model._default_manager.select_for_update(no_key=True).filter(bulk.among(model, ("id",), [(i,) for i in ids]))
    return ids - set(rows.order_by("id").values_list("id", flat=True))


def _without_archives(messages: Sequence[Message]) -> set[int]:
    """Return the ids of the Pulse users of these messages that have archives switched off."""
    ids = {one.queue.pulse_user_id for one in messages if one.queue.pulse_user_id is not None}
    off = PulseUser.objects.filter(pk__in=ids, keeps_archives=False)
    return set(off.values_list("pk", flat=True)) if ids else set()


def _notice(message: Message, facts: Facts, unarchived: Collection[int]) -> Notice:
    """Return the notice of a message. Queues of the Pulse users in ``unarchived`` are not archived."""
    queue = message.queue
    content = facts.of(queue, message.thresholds, message.merged)
    if message.kind is MessageKind.LAST_CALL:
        target = Target(
            queue.vhost,
            queue.name,
            queue.type,
            Archive.Reason.LENGTH,
            is_archived=queue.pulse_user_id not in unarchived,
            without_copy=PASSED_OVER if facts.is_passed_over(queue) else "",
        )
        content["why_not_archived"] = why_not(target)
    return Notice(message.kind.value, content, subject_key(queue.id), *queue.ownership)


def _operator_notices(changes: Changes, observation: Observation, watch: Watch, now: datetime) -> list[Notice]:
    """Return the notices for operators about the broker itself."""
    listing = observation.snapshot
    notices = alarms.notices(watch.alarms, listing, now)
    if watch.outage_since is not None:
        seconds = (now - watch.outage_since).total_seconds()
        notices.append(Notice(kinds.OUTAGE_OVER, {"seconds": seconds}))
    if _needs_brake_notice(changes, watch, is_changed=observation.earlier.rules is not None):
        reasons = Counter(one.queue.block_reason for one in changes.blocked)
        notices.append(Notice(kinds.BRAKE, {"count": len(changes.blocked), "seen": changes.listed, **reasons}))
    if _needs_short_list_notice(changes, watch, now):
        notices.append(Notice(kinds.SHORT_LIST, {"missing": changes.short, "seen": changes.listed}))
    late = _late(observation, now)
    if late and not watch.late_since and not watch.refused_since:
        running = watch.deleter_seen_at is not None and now - watch.deleter_seen_at < LONGEST_GAP
        oldest = min(late)
        notices.append(
            Notice(kinds.LATE, {"count": len(late), "seconds": (now - oldest).total_seconds(), "running": running})
        )
    if not listing.exact and watch.unresponsive_since is None:
        notices.append(Notice(kinds.UNRESPONSIVE, {}))
    if listing.exact and watch.unresponsive_since is not None:
        seconds = (now - watch.unresponsive_since).total_seconds()
        notices.append(Notice(kinds.RESPONSIVE, {"seconds": seconds}))
    return notices + unguarded.notices(watch, changes, now)


def _late(observation: Observation, now: datetime) -> list[datetime]:
    """Return when the deletions were decided that wait for too long."""
    patience = timedelta(seconds=settings.GUARDIAN_DELETE_WAIT_SECONDS)
    decided = [queue.decided_at for queue in observation.stored.values() if queue.state == DELETING]
    return [at for at in decided if at is not None and now - at > patience]


def _needs_brake_notice(changes: Changes, watch: Watch, *, is_changed: bool) -> bool:
    """Return whether to notify operators of blocked queues.

    They are notified of the first ones, of further groups, of others after a release, and of those that a change of the
    settings blocks. Of single queues that follow they are not.
    """
    if changes.newly_blocked_groups:
        return True
    return changes.newly_blocked > 0 and (watch.brake_since is None or watch.released_at is not None or is_changed)


def _needs_short_list_notice(changes: Changes, watch: Watch, now: datetime) -> bool:
    """Return whether to notify operators of a short list. A stopping node causes short lists now and then."""
    recently_notified = (
        watch.short_notified_at is not None and now - watch.short_notified_at < SHORT_LIST_NOTICE_INTERVAL
    )
    return changes.short > 0 and not recently_notified


def _update_watch(
    watch: Watch, changes: Changes, observation: Observation, inventory: Inventory | None, now: datetime
) -> None:
    """Write the state that the next pass needs."""
    listing = observation.snapshot
    state: dict[str, Any] = {
        "failures": 0,
        "nodes": sorted(listing.nodes) if listing.nodes_unchanged else [],
        "cluster": listing.cluster or watch.cluster,
        "listed_at": now,
        "short_lists": changes.short_lists,
        "unresponsive_since": None if listing.exact else (watch.unresponsive_since or now),
        "outage_since": None,
        "late_since": (watch.late_since or now) if _late(observation, now) else None,
        "next_pass_at": None,
        "alarms": alarms.after(watch.alarms, listing, now),
        "recovering": _recovering(watch, listing, now) | dict.fromkeys(changes.returned_nodes, now.isoformat()),
        "deletion_settings": settings_to_store(watch, observation),
        **after_pass(watch, len(changes.blocked), changes.short > 0, now),
        **unguarded.after_pass(watch, changes, inventory.streams if inventory else None, lagging=listing.lagging),
    }
    if not listing.lagging:
        state["exact_at"] = now
    if not set(changes.for_memory).isdisjoint(one.key for one in changes.deletable):
        state["relieved_at"] = now
    if inventory is not None:
        state |= {"exchanges_listed_at": now, "misnamed_exchanges": inventory.exchanges}
    if _needs_short_list_notice(changes, watch, now):
        state["short_notified_at"] = now
    Watch.objects.filter(id=watch.id).update(**state)
