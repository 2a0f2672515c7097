"""Deleting queues that grew too long: look again, act, record the outcome.

The decision stands on the queues' rows already (state deleting) when this begins. A crash between any two lines is
finished by the next pass: what was asked of the broker has ``delete_sent_at``, and what the next list lacks is deleted.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from amqp import AMQPError
from django.db import transaction
from django.utils import timezone

from queues import bulk, outbox
from queues.comparison import Condemned, Known, Rules, settled
from queues.facts import Facts
from queues.lease import HeldLease
from queues.models import Notification, Queue, QueueEvent
from queues.outbox import Telling
from queues.quiet import Quiet, Say
from queues.thresholds import DELETING, GONE, OK
from rabbit import directly, snapshot
from rabbit.management import BrokerError, Management, NotThere, Refused

logger = logging.getLogger(__name__)

BATCH = 200
"""Queues between two renewals of the lease."""

SIDE_BY_SIDE = 8
"""Deletions under way at once."""

LOOK_HOLDS_SECONDS = 30
"""How long the second look may be relied on. A process that was stopped in between must not go on deleting by it."""

QueueName = tuple[str, str]


class Look(NamedTuple):
    """The second look: what is still over its maximum, and what is not, with the lengths that it has now."""

    over: list[Condemned]
    kept: list[Condemned]


@dataclass
class Outcome:
    """What became of the condemned queues, as numbers of them; the notifications; and what went wrong, in words."""

    deleted: int = 0
    kept: int = 0
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

    def look_again(self, condemned: Sequence[Condemned], *, exact: bool) -> Look:
        """Read the lengths of these again, right before anything is done about them.

        First the ready messages, by AMQP. Where they alone are not over the maximum, by one more exact list, unless
        ``exact`` is False: then a queue's process hangs, and so would the list.
        """
        by_length = [one for one in condemned if not one.for_its_name]
        asked = directly.ask(self.amqp_url, [_name(one.queue) for one in by_length])
        ready = {queue: depth.ready for queue, depth in asked.items()}
        over = [one for one in condemned if one.for_its_name or ready.get(_name(one.queue), -1) > one.thresholds.max]
        doubtful = [one for one in by_length if ready.get(_name(one.queue), -1) <= one.thresholds.max]
        lengths = self._lengths({one.queue.vhost for one in doubtful}) if doubtful and exact else {}
        kept = []
        for one in doubtful:
            ready_now, unacknowledged = lengths.get(_name(one.queue), (None, None))
            now = one._replace(queue=one.queue._replace(ready=ready_now, unacknowledged=unacknowledged))
            if now.queue.length is not None and now.queue.length > one.thresholds.max:
                over.append(one)
            else:
                kept.append(now)
        return Look(over, kept)

    def carry_out(self, condemned: Sequence[Condemned], lease: HeldLease, *, exact: bool) -> Outcome:
        """Look again at these, delete what is still over its maximum, and record what became of each.

        Raises:
            LeaseLost: the lease ran out; the next pass goes on.
        """
        outcome = Outcome()
        for start in range(0, len(condemned), BATCH):
            lease.renew()
            look = self.look_again(condemned[start : start + BATCH], exact=exact)
            self._keep(look.kept, lease, outcome)
            asked = self._announce(look.over, lease, outcome)
            gone = self._confirmed(self._delete(asked, lease, outcome), outcome)
            outcome.told += self.record(gone, lease)
            outcome.deleted += len(gone)
        return outcome

    def record(self, queues: Sequence[Known], lease: HeldLease) -> int:
        """Record that these were deleted and tell people, in one transaction; return the number of notifications.

        Raises:
            LeaseLost: the lease ran out; the next pass records it.
        """
        if not queues:
            return 0
        now = timezone.now()
        facts = _last_facts(queues)
        after = [queue.with_quiet(Quiet())._replace(state=GONE, delete_sent_at=None, misses=0) for queue in queues]
        with transaction.atomic():
            lease.renew()
            write_states(after)
            write_events([(queue, QueueEvent.Kind.DELETED, facts[queue.id]) for queue in queues], now)
            return outbox.tell(
                [
                    Telling(Notification.Kind.DELETION, facts[queue.id], queue.id, queue.pulse_user_id)
                    for queue in queues
                ],
                now,
            )

    def _lengths(self, vhosts: set[str]) -> dict[QueueName, tuple[int | None, int | None]]:
        try:
            listed = snapshot.take(self.management, sorted(vhosts))
        except BrokerError as error:
            logger.warning("The second look could not list the queues: %s", error)
            return {}
        if not listed.exact:
            return {}
        return {(seen.vhost, seen.name): (seen.ready, seen.unacknowledged) for seen in listed.queues}

    def _keep(self, kept: Sequence[Condemned], lease: HeldLease, outcome: Outcome) -> None:
        """Record that these stay, and say so where the last message is no longer true."""
        if not kept:
            return
        now = timezone.now()
        after, tellings = [], []
        for one in kept:
            queue, due = settled(one.queue, one.thresholds, self.rules, now)
            after.append(queue)
            if due is not Say.NOTHING:
                tellings.append(Telling(due.value, self.facts.of(queue, one.thresholds), queue.id, queue.pulse_user_id))
        with transaction.atomic():
            lease.renew()
            write_states(after)
            write_events([(one.queue, QueueEvent.Kind.KEPT, {"length": one.queue.length}) for one in kept], now)
            outcome.told += outbox.tell(tellings, now)
        outcome.kept += len(kept)

    def _announce(self, over: Sequence[Condemned], lease: HeldLease, outcome: Outcome) -> list[Condemned]:
        """Note on the rows that the broker is about to be asked, and return those that may still go.

        An operator may have made one unbounded since the decision.
        """
        if not over:
            return []
        ids = [one.queue.id for one in over if one.queue.id is not None]
        with transaction.atomic():
            lease.renew()
            rows = Queue.objects.filter(id__in=ids, state=DELETING)
            rows.filter(unbounded=True).update(state=OK)
            rows.update(delete_sent_at=timezone.now())
            left = set(rows.values_list("id", flat=True))
        outcome.kept += len(over) - len(left)
        return [one for one in over if one.queue.id in left]

    def _delete(self, asked: Sequence[Condemned], lease: HeldLease, outcome: Outcome) -> list[Known]:
        """Ask the broker to delete these side by side, and return those that it says it deleted."""
        if not asked:
            return []
        until = time.monotonic() + LOOK_HOLDS_SECONDS
        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            errors = list(threads.map(lambda one: self._ask(one, until), asked))
        done, refused = [], []
        for one, error in zip(asked, errors, strict=True):
            if error is None:
                done.append(one.queue)
                continue
            if not isinstance(error, NotThere):
                outcome.errors.append(f"{one.queue.name} in {one.queue.vhost}: {error}")
            if isinstance(error, NotThere | Refused):
                refused.append(one.queue._replace(delete_sent_at=None))
        if refused:
            # Nothing was done: somebody else deleted it, its node is down, or the broker won't. The next list tells.
            with transaction.atomic():
                lease.renew()
                write_states(refused)
        return done

    def _ask(self, one: Condemned, until: float) -> BrokerError | None:
        vhost, name = one.queue.vhost, one.queue.name
        if time.monotonic() > until:
            return Refused("the second look is too old to act on; the next pass looks again", status=0, reason="late")
        try:
            self.management.delete_queue(vhost, name)
        except Refused as error:
            if error.status:
                return error
            try:  # a name like ".." is none in a URL, and would be a way to grow without end
                directly.delete(self.amqp_url, vhost, name)
            except (OSError, AMQPError) as direct_error:
                return Refused(f"{error}; by AMQP: {direct_error}", status=0, reason=str(direct_error))
        except BrokerError as error:
            return error
        return None

    def _confirmed(self, done: Sequence[Known], outcome: Outcome) -> list[Known]:
        """Return those of these that the broker's list no longer shows, down ones included."""
        if not done:
            return []
        try:
            there = snapshot.names(self.management, sorted({queue.vhost for queue in done}))
        except BrokerError as error:
            outcome.errors.append(f"what was deleted could not be confirmed yet: {error}")
            return []
        return [queue for queue in done if _name(queue) not in there]


def write_states(queues: Sequence[Known]) -> None:
    """Write where these stand, and what is remembered of their messages."""
    fields = ("state", "misses", "delete_sent_at", "said", "quiet_until", "recovery_said", "folded")
    rows = [(queue.id, *(getattr(queue, name) for name in fields)) for queue in queues]
    bulk.update(Queue, fields, rows)


def write_events(events: Sequence[tuple[Known, str, dict[str, Any]]], at: datetime) -> None:
    """Write what happened to queues, with the figures that it was decided by."""
    rows = [(queue.id, queue.vhost, queue.name, kind, at, details) for queue, kind, details in events]
    bulk.insert(QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), rows)


def _last_facts(queues: Sequence[Known]) -> dict[int | None, dict[str, Any]]:
    """Return the facts that each of these was condemned by, by its id: they were written down with the decision."""
    facts: dict[int | None, dict[str, Any]] = {
        queue.id: {"queue": queue.name, "vhost": queue.vhost} for queue in queues
    }
    these = bulk.among(QueueEvent, ("queue",), [(id_,) for id_ in facts])
    events = QueueEvent.objects.filter(these, kind=QueueEvent.Kind.CONDEMNED).order_by("id")
    facts.update(events.values_list("queue", "details"))
    return facts


def _name(queue: Known) -> QueueName:
    return (queue.vhost, queue.name)
