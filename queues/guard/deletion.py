"""Delete queues that grew too long: recheck, archive, delete, record the outcome.

``rules/comparison.py`` decided, and the decision is recorded (state deleting). If the broker confirms the deletion,
it is recorded. If not, the next list decides. After a crash the next pass finishes the work: a row with
``delete_sent_at`` whose queue is no longer listed was deleted.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import OuterRef, Subquery
from django.utils import timezone

from accounts.models import PulseUser
from core import bulk
from core.leases import HeldLease
from notifications import enqueue
from notifications.enqueue import Notice
from queues.archives import writing
from queues.archives.outcomes import Removed
from queues.guard import destroying, registered
from queues.guard.destroying import NotSent, Target
from queues.guard.facts import Facts
from queues.mails import kinds
from queues.mails.subject import subject_key
from queues.models import Archive, Queue, QueueEvent
from queues.rules.changes import Deletable
from queues.rules.comparison import judge_kept
from queues.rules.quiet import QuietPeriod
from queues.rules.rows import Rules, StoredQueue, with_ready
from queues.rules.thresholds import DELETING, GONE
from rabbit import amqp, snapshot
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker, Refused
from rabbit.management import Management
from rabbit.names import QueueName
from rabbit.snapshot import CLASSIC, Snapshot

logger = logging.getLogger(__name__)

BATCH_SIZE = 500
"""Queues between two renewals of the lease. The broker deletes them in half a second."""

SECONDS_PER_PASS = 30
"""The time for all deletions of a pass, so that other queues are guarded, too. The next pass continues."""

RECHECK_VALID_SECONDS = 30
"""A process that was suspended must not continue to delete by an old recheck."""

SPARED_CHECK_SECONDS = 1
"""Archiving takes up to 20 s a queue. After this time the rows of the queues to delete are read again."""

LIST_TIMEOUT_SECONDS = 20
"""The time limit for the recheck's list. Queues over the limit by their ready messages alone do not need the list."""


class Recheck(NamedTuple):
    """The result of a recheck: queues over the limit, queues within it (with the current length), and unclear ones.

    Queues in none of them no longer existed; the next list decides about them.
    """

    over: list[Deletable]
    kept: list[Deletable]
    unsure: list[Deletable]


@dataclass
class Outcome:
    """The numbers of deletable queues by outcome, the number of notifications, and error messages."""

    deleted: int = 0
    kept: int = 0
    refused: int = 0
    notifications: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Deletion:
    """The deletion of one pass's deletable queues. ``facts`` covers these queues."""

    management: Management
    amqp_url: str
    rules: Rules
    facts: Facts

    def recheck(
        self, deletable: Sequence[Deletable], *, exact: bool, between: Callable[[], None] = lambda: None
    ) -> Recheck:
        """Read the lengths of these queues again, right before the deletion.

        Passive declares give the ready messages. If these alone are within the limit, a classic queue is looked up in
        one more list. Without ``exact`` it is not: a queue's process hangs, and the list would hang too. Other types
        are listed as of their last tick: every list for ``UNACKED_MINIMUM`` must have shown them over the limit.

        ``between`` is called between two requests, and raises a BrokerError if the time for the list is over.
        """
        recheck = Recheck([one for one in deletable if one.for_its_name], [], [])
        by_length = [one for one in deletable if not one.for_its_name]
        depths = amqp.declare_passively(self.amqp_url, [_name(one.queue) for one in by_length])
        unclear: list[Deletable] = []
        for one in by_length:
            depth = depths.get(_name(one.queue))
            if depth is not None and depth.ready > one.limit:
                recheck.over.append(one)
            elif depth is None or one.queue.type == CLASSIC:
                unclear.append(one)
            else:
                minimum = depth.ready + (one.queue.unacknowledged or 0)
                if one.queue.over_unacked_since is not None and minimum > one.limit:
                    recheck.over.append(one._replace(unacknowledged=one.queue.unacknowledged or 0))
                else:
                    kept = with_ready(one.queue, depth.ready)._replace(over_unacked_since=None)
                    recheck.kept.append(one._replace(queue=kept))
        if not unclear:
            return recheck
        listed = self._list_again({one.queue.vhost for one in unclear}, between) if exact else None
        lengths = {(seen.vhost, seen.name): seen for seen in listed.queues} if listed else {}
        for one in unclear:
            seen = lengths.get(_name(one.queue))
            if seen is None:
                if listed is None or one.queue.vhost in listed.unlisted:
                    recheck.unsure.append(one)
            elif seen.length is None or seen.type != CLASSIC:
                recheck.unsure.append(one)
            elif seen.length > one.limit:
                recheck.over.append(one._replace(unacknowledged=seen.unacknowledged or 0))
            else:
                now = one.queue._replace(ready=seen.ready, unacknowledged=seen.unacknowledged)
                recheck.kept.append(one._replace(queue=now))
        return recheck

    def carry_out(self, deletable: Sequence[Deletable], lease: HeldLease, *, exact: bool) -> Outcome:
        """Recheck these queues, delete those still over their limit, and record the outcomes.

        The longest come first. After ``SECONDS_PER_PASS`` the others stay in state deleting.

        Raises:
            LeaseLost: the lease expired; the next pass continues.
        """
        outcome = Outcome()
        end_of_deletions = time.monotonic() + SECONDS_PER_PASS
        end_of_archiving = self._end_of_archiving() if deletable else math.inf
        deletable = sorted(deletable, key=lambda one: -(one.queue.length or 0))
        for start in range(0, len(deletable), BATCH_SIZE):
            lease.renew()
            began = time.monotonic()
            if began > end_of_deletions:
                break
            deadline = min(began + RECHECK_VALID_SECONDS, end_of_deletions)
            in_time = partial(_renew_until_deadline, lease, began + LIST_TIMEOUT_SECONDS)
            recheck = self.recheck(deletable[start : start + BATCH_SIZE], exact=exact, between=in_time)
            self._record_kept(recheck.kept, lease, outcome)
            self._record_still_deletable(recheck.unsure, lease, outcome)
            outcome.kept += len(recheck.unsure)
            to_delete = self._mark_sent(recheck.over, lease, outcome)
            deleted = self._delete(to_delete, deadline, end_of_archiving, lease, outcome)
            facts = {
                one.queue.id: self.facts.of(one.queue, one.thresholds) | removed.as_facts() for one, removed in deleted
            }
            self._record([one.queue for one, _ in deleted], facts, lease, outcome)
        return outcome

    def finish(self, queues: Sequence[StoredQueue], lease: HeldLease) -> Outcome:
        """Record that these queues were deleted by a request of an earlier pass.

        Raises:
            LeaseLost: the lease expired; the next pass records it.
        """
        outcome = Outcome()
        if queues:
            facts = _last_facts(queues)
            sent = {queue.id: queue.delete_sent_at for queue in queues if queue.id and queue.delete_sent_at}
            writing.keep_fetched(list(sent))
            for id_, archived in writing.kept_since(sent).items():
                facts[id_] |= Removed(archived, archived.dropped, archived.held).as_facts()
            self._record(queues, facts, lease, outcome)
        return outcome

    def _record(
        self, queues: Sequence[StoredQueue], facts: dict[int | None, dict[str, Any]], lease: HeldLease, outcome: Outcome
    ) -> None:
        """Record the deletions and enqueue the notices in one transaction."""
        if not queues:
            return
        now = timezone.now()
        with transaction.atomic():
            lease.renew()
            deleting = _still_deleting(queues)
            still_deleting = [queue for queue in queues if queue.id in deleting]
            write_states([_deleted(queue) for queue in still_deleting])
            write_events([(queue, QueueEvent.Kind.DELETED, facts[queue.id]) for queue in still_deleting], now)
            # Only queues registered since the decision: a registered queue is not deletable.
            newly_registered = [_name(queue) for queue in still_deleting if queue.owner_id is not None]
            if newly_registered:
                registered.provider().record_missing(newly_registered)
            notices = [
                Notice(kinds.DELETION, facts[queue.id], subject_key(queue.id), *queue.ownership)
                for queue in still_deleting
            ]
            outcome.notifications += enqueue.enqueue(notices, now, lease)
        outcome.deleted += len(still_deleting)

    def _list_again(self, vhosts: set[str], between: Callable[[], None]) -> Snapshot | None:
        try:
            listed = snapshot.take(self.management, sorted(vhosts), between)
        except BrokerError as error:
            logger.warning("The recheck could not list the queues: %s", error)
            return None
        return listed if listed.exact else None

    def _record_kept(self, kept: Sequence[Deletable], lease: HeldLease, outcome: Outcome) -> None:
        """Record that these queues stay, and enqueue a notice if the last message is no longer true."""
        self._record_not_deleted(kept, lease, outcome, stays_deletable=False)

    def _record_still_deletable(self, deletable: Sequence[Deletable], lease: HeldLease, outcome: Outcome) -> None:
        """Warn about queues that the list shows over the limit and that cannot be deleted now. They stay deletable."""
        self._record_not_deleted(deletable, lease, outcome, stays_deletable=True)

    def _record_not_deleted(
        self, ones: Sequence[Deletable], lease: HeldLease, outcome: Outcome, *, stays_deletable: bool
    ) -> None:
        if not ones:
            return
        now = timezone.now()
        after, notices = [], []
        with transaction.atomic():
            lease.renew()
            deleting = _still_deleting([one.queue for one in ones])
            ones = [one for one in ones if one.queue.id in deleting]
            for one in ones:
                queue, message = judge_kept(one.queue, one.thresholds, self.rules, now)
                if message is not None:
                    facts = self.facts.of(queue, one.thresholds, message.merged)
                    notices.append(Notice(message.kind.value, facts, subject_key(queue.id), *queue.ownership))
                if stays_deletable:
                    queue = queue._replace(state=DELETING, delete_sent_at=one.queue.delete_sent_at)
                after.append(queue)
            write_states(after)
            if not stays_deletable:
                # A request that was sent may have deleted the queue, which a client declared again.
                writing.keep_fetched([one.queue.id for one in ones if one.queue.delete_sent_at and one.queue.id])
                write_events([(one.queue, QueueEvent.Kind.KEPT, {"length": one.queue.length}) for one in ones], now)
            outcome.notifications += enqueue.enqueue(notices, now, lease)
        if not stays_deletable:
            outcome.kept += len(ones)

    def _mark_sent(self, over: Sequence[Deletable], lease: HeldLease, outcome: Outcome) -> list[Deletable]:
        """Set ``delete_sent_at``, and return the queues that may still be deleted. The next pass judges the others."""
        if not over:
            return []
        with transaction.atomic():
            lease.renew()
            to_delete, spared = _without_spared(over)
            if to_delete:
                these = bulk.among(Queue, ("id",), [(one.queue.id,) for one in to_delete])
                Queue.objects.filter(these, state=DELETING).update(delete_sent_at=timezone.now())
        outcome.kept += len(spared)
        return to_delete

    def _delete(
        self,
        to_delete: Sequence[Deletable],
        deadline: float,
        end_of_archiving: float,
        lease: HeldLease,
        outcome: Outcome,
    ) -> list[tuple[Deletable, Removed]]:
        """Archive and delete these queues, and return those whose deletion the broker confirmed.

        Past the deadline the others are left to the next pass, which rechecks them.
        """
        deleted, undecided, not_deleted = [], [], []
        left, checked_at, longest = list(reversed(to_delete)), time.monotonic(), 0.0
        confidential = _confidential({one.queue.pulse_user_id for one in to_delete})
        with amqp.Sessions(self.amqp_url) as sessions:
            while left and time.monotonic() + longest <= deadline:
                if time.monotonic() - checked_at > SPARED_CHECK_SECONDS:
                    left, spared = _without_spared(left)
                    undecided += [one.queue for one in spared]
                    outcome.kept += len(spared)
                    checked_at = time.monotonic()
                    if not left:
                        break
                one = left.pop()
                queue, target = one.queue, _target(one, confidential)
                began = time.monotonic()
                try:
                    removed = destroying.delete_queue(
                        sessions.of(queue.vhost),
                        target,
                        limit=None if one.for_its_name else one.limit,
                        unacknowledged=one.unacknowledged,
                        until=end_of_archiving,
                        between=lease.renew_if_due,
                    )
                except destroying.WithinLimit:
                    undecided.append(queue)
                    outcome.kept += 1
                except NotOnBroker:
                    undecided.append(queue)
                except BrokerError as error:
                    outcome.errors.append(f"{queue.name} in {queue.vhost}: {error}")
                    if isinstance(error, NotSent):
                        # An earlier pass's request may still be running, so keep delete_sent_at.
                        not_deleted.append(one)
                        outcome.refused += error.is_unreachable
                    elif isinstance(error, Refused):
                        not_deleted.append(one._replace(queue=queue._replace(delete_sent_at=None)))
                        outcome.refused += 1
                else:
                    deleted.append((one, removed))
                lease.renew_if_due()
                longest = max(longest, time.monotonic() - began)
        undecided += [one.queue for one in left]
        if undecided:
            # These shrank, were spared or deleted, have a node that is down, or there was no time left; or the broker
            # executed an earlier request late. Restore the earlier ``delete_sent_at``. The next list decides.
            with transaction.atomic():
                lease.renew()
                deleting = _still_deleting(undecided)
                write_states([queue for queue in undecided if queue.id in deleting])
        self._record_still_deletable(not_deleted, lease, outcome)
        return deleted

    def _end_of_archiving(self) -> float:
        """Return until when a pass may fetch messages: under a memory alarm, for the time of one queue."""
        try:
            alarms = self.management.alarms()
        except BrokerError:
            alarms = []
        if any(alarm.startswith("memory") for alarm in alarms):
            return time.monotonic() + float(settings.GUARDIAN_ARCHIVE_SECONDS)
        return math.inf


def _confidential(pulse_users: set[int | None]) -> set[int]:
    """Return those of these Pulse users whose messages are not archived."""
    known = [pulse_user for pulse_user in pulse_users if pulse_user is not None]
    chosen = PulseUser.objects.filter(pk__in=known, keeps_archives=False)
    return set(chosen.values_list("pk", flat=True))


def _target(one: Deletable, confidential: set[int]) -> Target:
    queue = one.queue
    return Target(
        vhost=queue.vhost,
        name=queue.name,
        type=queue.type,
        reason=Archive.Reason.NAME if one.for_its_name else Archive.Reason.LENGTH,
        queue_id=queue.id,
        pulse_user_id=queue.pulse_user_id,
        is_archived=queue.pulse_user_id not in confidential,
        is_fetch_paused=one.without_copy,
        is_auto_delete=queue.auto_delete,
        held=one.unacknowledged or queue.unacknowledged or 0,
    )


def _renew_until_deadline(lease: HeldLease, deadline: float) -> None:
    """Renew the lease if needed, between two requests of a list. ``deadline`` is the list's, in monotonic time.

    Raises:
        LeaseLost: the lease expired.
        BrokerUnavailable: the deadline has passed.
    """
    lease.renew_if_due()
    if time.monotonic() > deadline:
        raise BrokerUnavailable(f"the list took longer than {LIST_TIMEOUT_SECONDS} s; the broker is busy")


def _without_spared(ones: Sequence[Deletable]) -> tuple[list[Deletable], list[Deletable]]:
    """Return the queues that may still be deleted, and those that an operator spared since the decision.

    A spared queue is unbounded now, or it or its Pulse user got a higher limit. Queues that were deleted are in neither
    list.
    """
    rows = Queue.objects.filter(bulk.among(Queue, ("id",), [(one.queue.id,) for one in ones]), state=DELETING)
    of_pulse_user = Subquery(PulseUser.objects.filter(pk=OuterRef("pulse_user")).values("max_length"))
    limits = {
        id_: (unbounded, own, pulse_user)
        for id_, unbounded, own, pulse_user in rows.values_list("id", "unbounded", "max_length", of_pulse_user)
    }
    still = [one for one in ones if one.queue.id in limits]
    spared = {one.queue.id for one in still if _is_spared_now(one, *limits[one.queue.id])}
    return (
        [one for one in still if one.queue.id not in spared],
        [one for one in still if one.queue.id in spared],
    )


def _is_spared_now(one: Deletable, unbounded: bool, own: int | None, of_pulse_user: int | None) -> bool:
    if unbounded or one.for_its_name:
        return unbounded
    limit = own if own is not None else of_pulse_user
    if limit is None:  # the policy's limit applies
        return one.queue.max_length is not None
    return limit > one.thresholds.max


def _still_deleting(queues: Sequence[StoredQueue]) -> set[int]:
    """Lock the queues that are still in state deleting, and return their ids: an owner may have deleted one."""
    these = bulk.among(Queue, ("id",), [(queue.id,) for queue in queues])
    rows = Queue.objects.select_for_update().filter(these, state=DELETING).order_by("id")
    return set(rows.values_list("id", flat=True))


def _deleted(queue: StoredQueue) -> StoredQueue:
    return queue.with_quiet_period(QuietPeriod())._replace(
        state=GONE, delete_sent_at=None, misses=0, over_unacked_since=None
    )


def write_states(queues: Sequence[StoredQueue]) -> None:
    """Write the states of these queues, and the messages already sent about them."""
    fields = (
        "state", "misses", "delete_sent_at", "notified_state", "quiet_until", "recovery_notified", "merged",
        "over_unacked_since",
    )  # fmt: skip
    rows = [(queue.id, *(getattr(queue, name) for name in fields)) for queue in queues]
    bulk.update(Queue, fields, rows)


def write_events(events: Sequence[tuple[StoredQueue, str, dict[str, Any]]], at: datetime) -> None:
    """Insert events with their details."""
    rows = [(queue.id, queue.vhost, queue.name, kind, at, details) for queue, kind, details in events]
    bulk.insert(QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), rows)


def _last_facts(queues: Sequence[StoredQueue]) -> dict[int | None, dict[str, Any]]:
    """Return the facts recorded with each decision, by the queue's id."""
    facts: dict[int | None, dict[str, Any]] = {
        queue.id: {"queue": queue.name, "vhost": queue.vhost} for queue in queues
    }
    these = bulk.among(QueueEvent, ("queue",), [(id_,) for id_ in facts])
    events = QueueEvent.objects.filter(these, kind=QueueEvent.Kind.DELETABLE).order_by("id")
    facts.update(events.values_list("queue", "details"))
    return facts


def _name(queue: StoredQueue) -> QueueName:
    return (queue.vhost, queue.name)
