"""Deleting queues that grew too long: look again, act, record the outcome.

The decision stands on the queues' rows already (state deleting) when this begins. What the broker says it deleted, it
did. Of what it gives no such answer about, the next list decides: a crash between any two lines is finished by the next
pass, as what was asked of the broker has ``delete_sent_at``, and what the list lacks then is deleted.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from amqp import AMQPError
from django.db import transaction
from django.utils import timezone

from core import bulk
from core.leases import HeldLease
from notifications import enqueue
from notifications.enqueue import Notice
from queues import kinds, registered
from queues.comparison import Condemned, Rules, StoredQueue, judge_kept, with_ready
from queues.facts import Facts
from queues.models import Queue, QueueEvent
from queues.quiet import QuietPeriod
from queues.subject import about
from queues.thresholds import DELETING, GONE
from rabbit import amqp, snapshot
from rabbit.management import BrokerError, BrokerUnavailable, Management, NotOnBroker, Refused
from rabbit.names import QueueName
from rabbit.snapshot import CLASSIC, Snapshot
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

BATCH_SIZE = 500
"""Queues between two renewals of the lease. So many take the broker half a second. However long it takes, none is asked
for once the recheck of the batch is out of date."""

MAX_CONCURRENT_DELETIONS = 8
"""Deletions under way at once."""

RECHECK_VALID_SECONDS = 30
"""A process that was stopped in between must not go on deleting by an old recheck."""

LIST_TIMEOUT_SECONDS = 20
"""How long its list may take. What is over its maximum by the ready messages alone can then still be deleted by it."""

RECHECK_EXPIRED = "too late"


class Recheck(NamedTuple):
    """The result of a recheck: what is over its limit, what is not (with its length now), and what is not known.

    What is in none of them no longer existed; the next list decides about it.
    """

    over: list[Condemned]
    kept: list[Condemned]
    unsure: list[Condemned]


@dataclass
class Outcome:
    """What became of the condemned queues, as numbers of them; the notifications; and what went wrong, in words."""

    deleted: int = 0
    kept: int = 0
    refused: int = 0
    told: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Deletion:
    """What deleting needs: the broker twice, the lease that it is done under, and the settings.

    ``facts`` has the surroundings of the queues that it is about.
    """

    management: Management
    amqp_url: str
    rules: Rules
    facts: Facts

    def recheck(
        self, condemned: Sequence[Condemned], *, exact: bool, between: Callable[[], None] = lambda: None
    ) -> Recheck:
        """Read the lengths of these again, right before anything is done about them.

        ``between`` is called between two requests, and raises a BrokerError where there is no more time for the list.

        First the ready messages, by AMQP. Where they alone are not over the limit, a classic queue is looked up in one
        more list, unless ``exact`` is False: then a queue's process hangs, and so would the list. Other types are
        listed as of their last tick: they go only if every list for ``UNACKED_MINIMUM`` has shown them over.
        """
        recheck = Recheck([one for one in condemned if one.for_its_name], [], [])
        by_length = [one for one in condemned if not one.for_its_name]
        depths = amqp.declare_passively(self.amqp_url, [_name(one.queue) for one in by_length])
        doubtful: list[Condemned] = []
        for one in by_length:
            depth = depths.get(_name(one.queue))
            if depth is not None and depth.ready > one.thresholds.max:
                recheck.over.append(one)
            elif depth is None or one.queue.type == CLASSIC:
                doubtful.append(one)
            else:
                least = depth.ready + (one.queue.unacknowledged or 0)
                if one.queue.over_unacked_since is not None and least > one.thresholds.max:
                    recheck.over.append(one)
                else:
                    kept = with_ready(one.queue, depth.ready)._replace(over_unacked_since=None)
                    recheck.kept.append(one._replace(queue=kept))
        if not doubtful:
            return recheck
        listed = self._list_again({one.queue.vhost for one in doubtful}, between) if exact else None
        lengths = {(seen.vhost, seen.name): seen for seen in listed.queues} if listed else {}
        for one in doubtful:
            seen = lengths.get(_name(one.queue))
            if seen is None:
                if listed is None or one.queue.vhost in listed.unlisted:
                    recheck.unsure.append(one)
            elif seen.length is None or seen.type != CLASSIC:
                recheck.unsure.append(one)
            elif seen.length > one.thresholds.max:
                recheck.over.append(one)
            else:
                now = one.queue._replace(ready=seen.ready, unacknowledged=seen.unacknowledged)
                recheck.kept.append(one._replace(queue=now))
        return recheck

    def carry_out(self, condemned: Sequence[Condemned], lease: HeldLease, *, exact: bool) -> Outcome:
        """Recheck these queues, delete those still over their limit, and record what became of each.

        Raises:
            LeaseLost: the lease ran out; the next pass goes on.
        """
        outcome = Outcome()
        for start in range(0, len(condemned), BATCH_SIZE):
            lease.renew()
            began = time.monotonic()
            until = began + RECHECK_VALID_SECONDS
            in_time = partial(_keep_in_time, lease, began + LIST_TIMEOUT_SECONDS)
            recheck = self.recheck(condemned[start : start + BATCH_SIZE], exact=exact, between=in_time)
            self._record_kept(recheck.kept, lease, outcome)
            self._record_still_condemned(recheck.unsure, lease, outcome)
            outcome.kept += len(recheck.unsure)
            asked = self._mark_sent(recheck.over, lease, outcome)
            gone = self._delete(asked, until, lease, outcome)
            facts = {one.queue.id: self.facts.of(one.queue, one.thresholds) for one in gone}
            self._record([one.queue for one in gone], facts, lease, outcome)
        return outcome

    def finish(self, queues: Sequence[StoredQueue], lease: HeldLease) -> Outcome:
        """Record the deletion of these, which an earlier pass asked for.

        Raises:
            LeaseLost: the lease ran out; the next pass records it.
        """
        outcome = Outcome()
        if queues:
            self._record(queues, _last_facts(queues), lease, outcome)
        return outcome

    def _record(
        self, queues: Sequence[StoredQueue], facts: dict[int | None, dict[str, Any]], lease: HeldLease, outcome: Outcome
    ) -> None:
        """Record that these were deleted and tell people, in one transaction."""
        if not queues:
            return
        now = timezone.now()
        with transaction.atomic():
            lease.renew()
            deleting = _still_deleting(queues)
            ours = [queue for queue in queues if queue.id in deleting]
            write_states([_deleted(queue) for queue in ours])
            write_events([(queue, QueueEvent.Kind.DELETED, facts[queue.id]) for queue in ours], now)
            # Only what was registered since the decision: a registered queue isn't condemned.
            newly_registered = [_name(queue) for queue in ours if queue.owner_id is not None]
            if newly_registered:
                registered.provider().record_missing(newly_registered)
            notices = [Notice(kinds.DELETION, facts[queue.id], about(queue.id), *queue.ownership) for queue in ours]
            outcome.told += enqueue.enqueue(notices, now)
        outcome.deleted += len(ours)

    def _list_again(self, vhosts: set[str], between: Callable[[], None]) -> Snapshot | None:
        try:
            listed = snapshot.take(self.management, sorted(vhosts), between)
        except BrokerError as error:
            logger.warning("The recheck could not list the queues: %s", error)
            return None
        return listed if listed.exact else None

    def _record_kept(self, kept: Sequence[Condemned], lease: HeldLease, outcome: Outcome) -> None:
        """Record that these stay, and say so where the last message is no longer true."""
        self._record_not_deleted(kept, lease, outcome, condemned_still=False)

    def _record_still_condemned(self, left: Sequence[Condemned], lease: HeldLease, outcome: Outcome) -> None:
        """Warn of these, which are over their maximum by the list and can't be deleted now. They stay condemned."""
        self._record_not_deleted(left, lease, outcome, condemned_still=True)

    def _record_not_deleted(
        self, ones: Sequence[Condemned], lease: HeldLease, outcome: Outcome, *, condemned_still: bool
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
                    told = self.facts.of(queue, one.thresholds, message.folded)
                    notices.append(Notice(message.kind.value, told, about(queue.id), *queue.ownership))
                if condemned_still:
                    queue = queue._replace(state=DELETING, delete_sent_at=one.queue.delete_sent_at)
                after.append(queue)
            write_states(after)
            if not condemned_still:
                write_events([(one.queue, QueueEvent.Kind.KEPT, {"length": one.queue.length}) for one in ones], now)
            outcome.told += enqueue.enqueue(notices, now)
        if not condemned_still:
            outcome.kept += len(ones)

    def _mark_sent(self, over: Sequence[Condemned], lease: HeldLease, outcome: Outcome) -> list[Condemned]:
        """Note on the rows that the broker is about to be asked, and return those that may still go.

        An operator may have made one unbounded since the decision, or somebody deleted it by hand.
        """
        if not over:
            return []
        ids = [one.queue.id for one in over]
        with transaction.atomic():
            lease.renew()
            rows = Queue.objects.filter(bulk.among(Queue, ("id",), [(id_,) for id_ in ids]), state=DELETING)
            unbounded: dict[int | None, bool] = dict(
                rows.select_for_update().order_by("id").values_list("id", "unbounded")
            )
            rows.filter(unbounded=False).update(delete_sent_at=timezone.now())
        self._record_kept([one for one in over if unbounded.get(one.queue.id) is True], lease, outcome)
        return [one for one in over if unbounded.get(one.queue.id) is False]

    def _delete(self, asked: Sequence[Condemned], until: float, lease: HeldLease, outcome: Outcome) -> list[Condemned]:
        """Ask the broker to delete these side by side, and return those that it says it deleted."""
        if not asked:
            return []
        with ContextThreadPool(MAX_CONCURRENT_DELETIONS) as threads:
            errors = list(threads.map(lambda one: self._delete_one(one, until), asked))
        done, not_there, refused = [], [], []
        for one, error in zip(asked, errors, strict=True):
            if error is None:
                done.append(one)
            elif isinstance(error, NotOnBroker):
                not_there.append(one.queue)
            else:
                outcome.errors.append(f"{one.queue.name} in {one.queue.vhost}: {error}")
                if isinstance(error, Refused):
                    never_asked = error.reason == RECHECK_EXPIRED  # this time: an earlier request may be under way
                    refused.append(one if never_asked else one._replace(queue=one.queue._replace(delete_sent_at=None)))
                    outcome.refused += not never_asked
        if not_there:
            # Somebody else deleted it, or its node is down; or an earlier request of ours was carried out late, which
            # the row's earlier time of asking tells. The next list decides.
            with transaction.atomic():
                lease.renew()
                deleting = _still_deleting(not_there)
                write_states([queue for queue in not_there if queue.id in deleting])
        self._record_still_condemned(refused, lease, outcome)
        return done

    def _delete_one(self, one: Condemned, until: float) -> BrokerError | None:
        vhost, name = one.queue.vhost, one.queue.name
        if time.monotonic() > until:
            late = "the second look is too old to act on; the next pass looks again"
            return Refused(late, status=0, reason=RECHECK_EXPIRED)
        try:
            if not self.management.delete_queue(vhost, name):
                return BrokerUnavailable(
                    "it was asked for, and the answer was lost; the next list tells whether it is gone"
                )
        except Refused as error:
            if error.status:
                return error
            try:  # a name like ".." is none in a URL, and would be a way to grow without end
                amqp.delete_queue(self.amqp_url, vhost, name)
            except (OSError, AMQPError) as direct_error:
                return Refused(f"{error}; by AMQP: {direct_error}", status=0, reason=str(direct_error))
        except BrokerError as error:
            return error
        return None


def _keep_in_time(lease: HeldLease, until: float) -> None:
    """Keep the lease between two requests of a list that is to be over at this ``time.monotonic()``.

    Raises:
        LeaseLost: it ran out.
        BrokerUnavailable: it is later.
    """
    lease.renew_if_due()
    if time.monotonic() > until:
        raise BrokerUnavailable(f"the list took more than {LIST_TIMEOUT_SECONDS} s; the broker is busy")


def _still_deleting(queues: Sequence[StoredQueue]) -> set[int]:
    """Return the ids of those that are still to be deleted, and lock them: somebody may have deleted one by hand."""
    these = bulk.among(Queue, ("id",), [(queue.id,) for queue in queues])
    rows = Queue.objects.select_for_update().filter(these, state=DELETING).order_by("id")
    return set(rows.values_list("id", flat=True))


def _deleted(queue: StoredQueue) -> StoredQueue:
    return queue.with_quiet_period(QuietPeriod())._replace(
        state=GONE, delete_sent_at=None, misses=0, over_unacked_since=None
    )


def write_states(queues: Sequence[StoredQueue]) -> None:
    """Write where these stand, and what is remembered of their messages."""
    fields = (
        "state", "misses", "delete_sent_at", "said", "quiet_until", "recovery_said", "folded", "over_unacked_since",
    )  # fmt: skip
    rows = [(queue.id, *(getattr(queue, name) for name in fields)) for queue in queues]
    bulk.update(Queue, fields, rows)


def write_events(events: Sequence[tuple[StoredQueue, str, dict[str, Any]]], at: datetime) -> None:
    """Write what happened to queues, with the figures that it was decided by."""
    rows = [(queue.id, queue.vhost, queue.name, kind, at, details) for queue, kind, details in events]
    bulk.insert(QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), rows)


def _last_facts(queues: Sequence[StoredQueue]) -> dict[int | None, dict[str, Any]]:
    """Return the facts that each of these was condemned by, by its id: they were written down with the decision."""
    facts: dict[int | None, dict[str, Any]] = {
        queue.id: {"queue": queue.name, "vhost": queue.vhost} for queue in queues
    }
    these = bulk.among(QueueEvent, ("queue",), [(id_,) for id_ in facts])
    events = QueueEvent.objects.filter(these, kind=QueueEvent.Kind.CONDEMNED).order_by("id")
    facts.update(events.values_list("queue", "details"))
    return facts


def _name(queue: StoredQueue) -> QueueName:
    return (queue.vhost, queue.name)
