"""Carry out recorded deletions: read the decision again, archive, delete, record the outcome.

A pass decides, and records it (state deleting). ``rules/turns.py`` says whose deletion is next, ``destroying.py``
archives and deletes a queue. If the broker confirms the deletion, it is recorded here; if the answer is lost, the next
lists decide. People, and passes, may take a decision back meanwhile, so the row is locked and read again right before
the queue is deleted.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import Any

from celery import current_app
from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from accounts.models import PulseUser
from core import broker, leases
from core.leases import HeldLease, LeaseLost, LeaseTaken
from notifications import enqueue
from notifications.enqueue import Notice
from queues.archives import writing
from queues.archives.definitions import NotPermitted
from queues.archives.outcomes import Removed
from queues.guard import destroying, recording, registered
from queues.guard.deleter_threads import deleter_threads, end_thread, keep_connection
from queues.guard.destroying import DeclaredAgain, InUse, NotSent, Target, WithinLimit
from queues.guard.earlier_settings import is_another_broker
from queues.guard.facts import Facts
from queues.guard.pass_run import rules
from queues.mails import kinds
from queues.mails.subject import subject_key
from queues.models import Archive, Pass, Queue, QueueEvent, Watch
from queues.rules import thresholds
from queues.rules.messages_due import Timing, judge_kept
from queues.rules.rows import StoredQueue
from queues.rules.thresholds import DELETING, GONE, Thresholds, is_fetch_paused, is_spared
from queues.rules.turns import LONGEST_GAP, Group, Waiting, has_waited_too_long, next_in_turn, seconds_to_archive
from rabbit.errors import BrokerError, NotOnBroker, Refused, was_not_executed
from rabbit.kept_sessions import KeptSessions
from rabbit.snapshot import CLASSIC

logger = logging.getLogger(__name__)

LEASE = "deleter"
TASK = "queues.tasks.delete_queues"

GROUP = "deletions"
"""The lease that holds the notices of a round together: many to one recipient are one message."""

ROUND_SECONDS = 20.0
"""After this time the notices are sent, and a run tries again what it could not delete."""

PLAN_SECONDS = 1.0
"""The interval at which a run looks for new decisions."""

MAX_ERRORS = 100
"""A run may go on for days, so it returns only its last errors."""

RETRY_QUORUM_AFTER = timedelta(seconds=90)
"""While a node is down, RabbitMQ takes up to 11 s to delete a quorum queue, and lists it as empty until then. So for
this long after a request without an answer, only its absence from lists counts."""

WAITED = "waiting for its archive endangered the broker"
NO_TIME = "the broker's memory alarm is raised, and the time for archives was used up"

_spent: dict[str, float] = {}
"""The seconds that this process spent on queues during a memory alarm, by the time when it was raised."""


class Spared(NotSent):
    """The queue must not be deleted any more: people or a pass took the decision back."""


@dataclass
class Outcome:
    """The numbers of queues by outcome, and error messages."""

    deleted: int = 0
    kept: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What became of one queue. ``queue`` has the figures that were read last.

    ``removed``: the broker confirmed its deletion. ``is_kept``: it stays. Otherwise, if ``is_warned``, it could not be
    deleted now, and its owners are warned instead; if not, the next lists decide.
    """

    queue: StoredQueue
    thresholds: Thresholds
    removed: Removed | None = None
    is_kept: bool = False
    is_warned: bool = False
    is_refused: bool = False
    error: str = ""


def wake() -> None:
    """Start a task that carries out the recorded deletions. Without the task queue, the periodic one does."""
    try:
        current_app.send_task(TASK, expires=60, retry=False)
    except Exception as error:  # any error of the transport: nothing depends on the task
        logger.warning("The task queue is unreachable (%s); the periodic task deletes what is due.", error)


def run(is_over: Callable[[], bool] = lambda: False) -> Outcome | None:
    """Carry out the recorded deletions, each once, or return None if another process does.

    Begin deletions as long as some are due, and none once ``is_over`` returns True. Those that can't be carried out now
    are left to the next round or run.
    """
    outcome = Outcome()
    try:
        with leases.lease(LEASE) as lease:
            _Run(lease, outcome).carry_out(is_over)
    except LeaseTaken:
        return None
    except LeaseLost as error:
        logger.error("Deleting was aborted: %s", error)
        outcome.errors.append(str(error))
    return outcome


class _Run:
    """One run, in rounds of some seconds. Notices of a round are a group, which the lease ``_group`` holds together.

    A run goes on while deletions are due. If it ended, its last archives would delay the first deletions of the next.
    """

    def __init__(self, lease: HeldLease, outcome: Outcome) -> None:
        self.outcome = outcome
        self._lease = lease
        self._notifications = 0
        self._waiting: list[Waiting] = []
        self._running: dict[Future[Result], Waiting] = {}
        self._last_turns: dict[Group, int] = {}
        self._turns = count(1)
        self._tried: set[int | None] = set()
        self._refusals: list[str] = []
        self._counted = Outcome()
        self._rules = rules()
        self._facts: dict[int | None, Future[Facts]] = {}
        self._owners: dict[int, int] = {}
        self._numbers: Counter[Group] = Counter()
        self._watch = _seen(timezone.now())
        self._cluster = self._watch.cluster

    def carry_out(self, is_over: Callable[[], bool]) -> None:
        """Begin deletions in turns, and record their outcomes."""
        if not Queue.objects.filter(state=DELETING).exists():
            self._record_refusals(is_complete=True)
            return
        try:
            cluster, node = broker.management().cluster_id(), broker.management().node()
        except BrokerError as error:
            self.outcome.errors.append(str(error))
            return
        if is_another_broker(self._watch, cluster, [node] if node else []):
            return  # decided about another broker; the next pass takes it back
        sessions = keep_connection()
        planned_at, round_began = -PLAN_SECONDS, time.monotonic()
        self._begin_group()
        try:
            with deleter_threads() as threads:
                while True:
                    self._lease.renew_if_due()
                    may_begin = not is_over()
                    if may_begin and time.monotonic() - planned_at > PLAN_SECONDS:
                        self._plan(threads)
                        planned_at = time.monotonic()
                    while may_begin and (one := self._next()):
                        self._running[threads.submit(self._delete, one, sessions)] = one
                    if not self._running:
                        break
                    done, _ = wait(self._running, PLAN_SECONDS, FIRST_COMPLETED)
                    for future in done:
                        del self._running[future]
                    self._record([future.result() for future in done])
                    if time.monotonic() - round_began > ROUND_SECONDS:
                        self._end_round(is_complete=False)
                        self._send()
                        self._begin_group()
                        planned_at, round_began = -PLAN_SECONDS, time.monotonic()
            self._end_round(is_complete=may_begin and self._watch.cluster == self._cluster)
        finally:
            self._send()
        sessions.trim()

    def _next(self) -> Waiting | None:
        """Return the deletion to begin next, or None."""
        if len(self._running) >= settings.GUARDIAN_DELETERS:
            return None
        groups = Counter(one.group for one in self._running.values())
        one = next_in_turn(self._waiting, groups, self._last_turns, settings.GUARDIAN_DELETERS)
        if one is not None:
            self._waiting.remove(one)
            self._tried.add(one.queue.id)
            self._last_turns[one.group] = next(self._turns)
        return one

    def _end_round(self, *, is_complete: bool) -> None:
        """Record the refusals of this round, add its outcomes to the last pass, and let the next try all again.

        ``is_complete``: all deletions that are due were tried.
        """
        self._lease.renew()
        self._record_refusals(is_complete=is_complete)
        self._refusals = []
        self._tried = {one.queue.id for one in self._running.values()}
        if last := Pass.objects.order_by("-at").first():
            deleted, kept = self.outcome.deleted - self._counted.deleted, self.outcome.kept - self._counted.kept
            Pass.objects.filter(pk=last.pk).update(deleted=F("deleted") + deleted, kept=F("kept") + kept)
            self._counted = replace(self.outcome)

    def _begin_group(self) -> None:
        """Begin a group of notices, with a lease of its own: that of the last one would hold its notices back."""
        self._group = HeldLease(GROUP)
        self._group.take()

    def _send(self) -> None:
        """End the group of notices, and start sending them."""
        self._group.release()
        if self._notifications:
            enqueue.wake(self._notifications)
        self._notifications = 0

    def _plan(self, threads: Executor) -> None:
        """Find the recorded deletions that are due. Gather the facts about new ones in a thread, once at a time."""
        self._watch = _seen(timezone.now())
        if self._watch.cluster != self._cluster:  # decided about another broker; the next run has new connections
            self._waiting = []
            return
        self._rules = rules()
        rows = Queue.objects.filter(state=DELETING).exclude(pk__in=[*self._tried]).order_by("decided_at", "id")
        queues = [queue for queue in recording.stored(rows) if self._is_due(queue)]
        current = {queue.id for queue in queues} | self._tried
        self._facts = {id_: facts for id_, facts in self._facts.items() if id_ in current}
        new = [queue for queue in queues if queue.id not in self._facts]
        if new and all(facts.done() for facts in self._facts.values()):
            self._owners = PulseUser.objects.longest_owners()
            self._facts |= dict.fromkeys([queue.id for queue in new], threads.submit(_gather, new))
        self._waiting = [Waiting(queue, self._group_of(queue)) for queue in queues if queue.id in self._facts]
        self._numbers = Counter(one.group for one in self._waiting)

    def _group_of(self, queue: StoredQueue) -> Group:
        return queue.owner_id if queue.owner_id is not None else self._owners.get(queue.pulse_user_id or 0)

    def _is_due(self, queue: StoredQueue) -> bool:
        """Return whether a deletion may be begun: lists decide first about a request without an answer."""
        if queue.length is None and queue.decided_for != Queue.DecidedFor.NAME:
            return False  # unknown is not 0
        if queue.delete_sent_at is None:
            return True
        if queue.type != CLASSIC:
            return timezone.now() - queue.delete_sent_at > RETRY_QUORUM_AFTER
        listed_at = self._watch.listed_at
        return listed_at is not None and listed_at > queue.delete_sent_at and not queue.misses

    def _delete(self, one: Waiting, sessions: KeptSessions) -> Result:
        """Archive and delete a queue, in a thread."""
        queue, began, limits = one.queue, time.monotonic(), Thresholds(0, 0)
        try:
            row = Queue.objects.select_related("pulse_user").get(pk=queue.id or 0)
            limits = thresholds.of_decision(row)
            self._facts[queue.id].result()  # before the queue is gone, and before its messages are fetched
            is_paused = is_fetch_paused(row.returned_at, timezone.now())
            limit = self._limit(row, is_paused=is_paused)
            with sessions.session(queue.vhost) as session:
                removed = destroying.delete_queue(
                    session,
                    self._target(row, queue, limit, one.group, is_paused=is_paused),
                    limit=limit,
                    unacknowledged=queue.unacknowledged or 0,
                    between=self._lease.renew_if_due,
                    before_delete=partial(self._mark_sent, queue, limit, is_paused=is_paused),
                )
        except WithinLimit as error:
            now = queue._replace(ready=error.ready, unacknowledged=error.held, over_unacked_since=None)
            return Result(now, limits, is_kept=True)
        except Spared:
            return Result(queue, limits, is_kept=True)
        except (NotOnBroker, Queue.DoesNotExist, InUse):
            return Result(queue, limits)
        except BrokerError as error:
            # An earlier request may still be carried out after one that was not sent.
            is_over = isinstance(error, Refused | DeclaredAgain) and not isinstance(error, NotPermitted)
            return Result(
                queue._replace(delete_sent_at=None if is_over else queue.delete_sent_at),
                limits,
                is_warned=was_not_executed(error),
                is_refused=was_not_executed(error) and (not isinstance(error, NotSent) or error.is_unreachable),
                error=f"{queue.name} in {queue.vhost}: {error}",
            )
        except LeaseLost:
            raise
        except Exception as error:  # such as one of the database: other queues' deletions go on
            logger.exception("%s in %s could not be deleted.", queue.name, queue.vhost)
            return Result(queue, limits, error=f"{queue.name} in {queue.vhost}: {error}")
        else:
            # What the last list says may be of a moment at which messages were being fetched or published.
            ready = removed.archived + removed.dropped
            return Result(queue._replace(ready=ready, unacknowledged=removed.held), limits, removed)
        finally:
            if since := self._memory_alarm:
                _spent[since] = _spent.get(since, 0.0) + time.monotonic() - began
            end_thread()

    def _limit(self, row: Queue, *, is_paused: bool) -> int | None:
        """Return the length past which a queue is deleted, or None if it is deleted whatever its length.

        ``is_paused``: its messages must not be fetched now. Raise Spared if the decision was taken back, an agent
        registered the queue, or its name no longer breaks the namespace policy.
        """
        ignored = self._rules.ignores(row.vhost, row.name)
        # The next pass records it. Until then the row of a queue in an agents' vhost may be out of date.
        is_registered = row.owner_id is not None and (row.vhost, row.name) in registered.provider().queues()
        if row.state != DELETING or row.block_reason or is_spared(row) or ignored or is_registered:
            raise Spared("its deletion was called off")
        if row.decided_for != Queue.DecidedFor.NAME:
            return (2 if is_paused else 1) * thresholds.of_decision(row).max
        if not self._rules.deletes_for_its_name(row):
            raise Spared("its name is allowed now")
        return None

    def _mark_sent(self, queue: StoredQueue, limit: int | None, *, is_paused: bool) -> None:
        """Set ``delete_sent_at``, right before the request. Raise Spared as ``_limit``, and if the limit was raised.

        Raise it, too, if the decision to delete a queue for its length is older than the return of its messages.
        """
        with transaction.atomic():
            self._lease.renew()
            rows = Queue.objects.select_for_update(of=("self",)).select_related("pulse_user")
            row = rows.get(pk=queue.id or 0)
            now = self._limit(row, is_paused=is_paused)
            if now is not None and (limit is None or now > limit):
                raise Spared("its limit was raised")
            if now is not None and is_paused and rows.filter(pk=row.pk, decided_at__lt=F("returned_at")).exists():
                raise Spared("its messages were returned to it since the decision; the next lists decide")
            Queue.objects.filter(pk=row.pk).update(delete_sent_at=timezone.now())

    def _target(self, row: Queue, queue: StoredQueue, limit: int | None, group: Group, *, is_paused: bool) -> Target:
        now = timezone.now()
        patience = settings.GUARDIAN_DELETE_WAIT_SECONDS
        most, waiting = settings.GUARDIAN_ARCHIVE_SECONDS, self._numbers
        seconds = seconds_to_archive(waiting[group], len(waiting), settings.GUARDIAN_DELETERS, most, patience)
        if since := self._memory_alarm:  # the time of one queue for all
            seconds = min(seconds, settings.GUARDIAN_ARCHIVE_SECONDS - _spent.get(since, 0.0))
        without_copy = "" if seconds > 0 else NO_TIME
        if limit is not None and is_paused:
            without_copy = destroying.FETCH_PAUSED
        elif limit is not None and has_waited_too_long(
            queue,
            limit,
            now,
            deleter_since=self._watch.deleter_since or now,
            patience=timedelta(seconds=patience),
            is_alarm_raised=any(resource in ("memory", "disk") for resource, *_ in self._watch.alarms or ()),
        ):
            without_copy = WAITED
        return Target(
            vhost=row.vhost,
            name=row.name,
            type=row.type,
            reason=Archive.Reason.NAME if limit is None else Archive.Reason.LENGTH,
            queue_id=row.pk,
            pulse_user_id=row.pulse_user_id,
            is_archived=row.pulse_user is None or row.pulse_user.keeps_archives,
            without_copy=without_copy,
            is_auto_delete=row.auto_delete,
            held=queue.unacknowledged or 0,
            seconds=seconds,
        )

    @property
    def _memory_alarm(self) -> str:
        """Since when a memory alarm is raised, or an empty text."""
        return min((since for resource, _, since in self._watch.alarms or () if resource == "memory"), default="")

    def _record(self, results: Sequence[Result]) -> None:
        """Record these outcomes, and enqueue the notices, in one transaction for each kind."""
        errors = [one.error for one in results if one.error]
        for error in errors:
            logger.warning("A queue was not deleted: %s", error)
        self.outcome.errors = [*self.outcome.errors, *errors][-MAX_ERRORS:]
        self._refusals += [one.error for one in results if one.is_refused]
        if deleted := [(one, one.removed) for one in results if one.removed is not None]:
            facts = {one.queue.id: self._facts_of(one) | removed.as_facts() for one, removed in deleted}
            queues = [one.queue for one, _ in deleted]
            number, notified = recording.record_deleted(queues, facts, self._lease, self._group)
            self.outcome.deleted += number
            self._notifications += notified
        self.outcome.kept += self._record_not_deleted([one for one in results if one.is_kept])
        self._record_not_deleted([one for one in results if one.is_warned])
        # If they are to be deleted once more, that is a new decision.
        self._tried -= {one.queue.id for one in results if one.removed is not None or one.is_kept}
        for one in results:
            self._facts.pop(one.queue.id, None)

    def _facts_of(self, one: Result, merged: int = 0) -> dict[str, Any]:
        return self._facts[one.queue.id].result().of(one.queue, one.thresholds, merged)

    def _record_not_deleted(self, results: Sequence[Result]) -> int:
        """Record that these queues stay, or stay about to be deleted, and enqueue the messages that are due.

        Return the number of queues that stay.
        """
        if not results:
            return 0
        now = timezone.now()
        after, notices = [], []
        with transaction.atomic():
            self._lease.renew()
            deleting = recording.still_deleting([one.queue for one in results])
            results = [one for one in results if one.queue.id in deleting]
            kept = [one.queue for one in results if one.is_kept]
            for one in results:
                queue, message = judge_kept(one.queue, one.thresholds, Timing(now, self._rules.quiet_seconds))
                if message is not None:
                    facts = self._facts_of(Result(queue, one.thresholds), message.merged)
                    notices.append(Notice(message.kind.value, facts, subject_key(queue.id), *queue.ownership))
                if not one.is_kept:
                    queue = queue._replace(state=DELETING, delete_sent_at=one.queue.delete_sent_at)
                after.append(queue)
            recording.write_states(after, now)
            # A request that was sent may have deleted the queue, which a client declared again.
            writing.keep_fetched([queue.id for queue in kept if queue.delete_sent_at and queue.id])
            recording.write_events([(queue, QueueEvent.Kind.KEPT, {"length": queue.length}) for queue in kept], now)
            self._notifications += enqueue.enqueue(notices, now, self._group)
        return len(kept)

    def _record_refusals(self, *, is_complete: bool) -> None:
        """Notify operators once while the broker refuses to delete queues: until all were tried without a refusal."""
        refusals, is_recorded = self._refusals, self._watch.refused_since is not None
        if bool(refusals) == is_recorded or (is_recorded and not is_complete):
            return
        now = timezone.now()
        with transaction.atomic():
            self._lease.renew()
            self._watch.refused_since = now if refusals else None
            self._watch.save(update_fields=["refused_since"])
            if refusals:
                facts = {"count": len(refusals), "error": refusals[0]}
                self._notifications += enqueue.enqueue([Notice(kinds.REFUSED, facts)], now)


def _gather(queues: Sequence[StoredQueue]) -> Facts:
    """Gather the facts about queues to delete, in a thread: a slow broker must not delay other deletions."""
    try:
        total = Queue.objects.exclude(state=GONE).count()
        return Facts.gather_for_recipients(broker.management(), queues, timezone.now(), total)
    finally:
        end_thread()


def _seen(now: datetime) -> Watch:
    """Record that the deleter runs, and return the monitor's state."""
    watch = Watch.objects.get_or_create(id=1)[0]
    if watch.deleter_since is None or watch.deleter_seen_at is None or now - watch.deleter_seen_at > LONGEST_GAP:
        watch.deleter_since = now
    watch.deleter_seen_at = now
    watch.save(update_fields=["deleter_since", "deleter_seen_at"])
    return watch
