"""A queue of objects to remove from the broker, with a handler for each kind of object.

A :class:`~core.models.Removal` is written in the transaction that decides the removal. It is carried out after the
commit. If the process is killed before, or the broker is unreachable, a task carries it out later.

An object may be registered again during its removal. So a removal first commits a claim, and then looks for a row that
needs the object. A registration first commits its row, and then looks for a Removal. At least one of them sees the
other. If the answer to a request was lost, the broker may still execute it, so the Removal keeps its claim until the
next attempt.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Any

from django.db import Error, transaction
from django.db.models import Case, Q, QuerySet, Value, When
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now
from django.utils import timezone

from core import broker, bulk, locks
from core.broker import Clients
from core.models import Removal
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker
from rabbit.names import QueueName
from rabbit.threads import ContextThreadPool

logger = logging.getLogger(__name__)

BATCH_SIZE = 1000
"""How many removals are claimed at once. A batch takes the same number of statements at any size."""

MAX_PARALLEL = 8

SECONDS_AFTER_COMMIT = 20
SECONDS_OF_TASK = 50

RESERVED_FOR = timedelta(minutes=1)
"""How long after :func:`reserve` the task leaves a removal to its caller."""

BUSY_RETRY_SECONDS = 10
RETRY_SECONDS = 60
MAX_RETRY_SECONDS = 300
"""The interval doubles up to this, so that a removal that makes the broker fail delays few others."""


class Kept(Exception):
    """The object is in use and is kept, because its Removal has ``if_unused``."""


class Postponed(Exception):
    """The removal was not tried, because there was no time left."""


@dataclass(frozen=True)
class Handler:
    """How one kind of removal is carried out."""

    remove: Callable[[Clients, Removal, float], None]
    """Remove the object. Send no request after the given ``time.monotonic()``.

    It raises :class:`Kept`, :class:`Postponed`, ``locks.LockTaken`` or a ``BrokerError``. ``NotOnBroker`` counts as
    removed.
    """
    obsolete: Callable[[Sequence[Removal]], Iterable[Removal]] = lambda removals: ()
    """Return the removals to drop, such as those of a queue that is registered again."""
    removed: Callable[[Sequence[Removal]], None] = lambda removals: None
    """Record that these objects are removed."""
    parallel: bool = False
    """Whether ``remove`` may run in threads. Then it must not use the database."""
    alone: bool = False
    """Whether each removal is a batch of its own, because it takes many requests."""


_handlers: dict[str, Handler] = {}


def register(kind: Removal.Kind, handler: Handler) -> None:
    _handlers[kind] = handler


# Writing


def write(removals: Sequence[Removal], *, due_at: datetime | None = None) -> None:
    """Write removals in the caller's transaction, and carry them out after the commit.

    A Removal that exists becomes due again and loses its claim; its ``if_unused`` changes from true to false only. With
    ``due_at``, the task carries them out at that time.
    """
    things: dict[tuple[str, str, str], bool] = {}
    for removal in removals:
        thing = (str(removal.kind), removal.vhost, removal.name)
        things[thing] = things.get(thing, True) and removal.if_unused
    if not things:
        return
    update = ["claim", "due_at", "attempts", "last_error"]
    with transaction.atomic():
        for if_unused in (False, True):
            # Sorted, so that two transactions that write the same removals don't deadlock.
            chosen = sorted(thing for thing, only_unused in things.items() if only_unused == if_unused)
            Removal.objects.bulk_create(
                [
                    Removal(kind=kind, vhost=vhost, name=name, if_unused=if_unused, due_at=due_at or Now())
                    for kind, vhost, name in chosen
                ],
                update_conflicts=True,
                unique_fields=["kind", "vhost", "name"],
                update_fields=update if if_unused else [*update, "if_unused"],
            )
        if due_at is None:
            transaction.on_commit(partial(run_due, only=sorted(things)), robust=True)


def reserve(removals: Sequence[Removal]) -> list[int]:
    """Write removals of one kind in the caller's transaction, and return their ids for :func:`run`.

    The task carries them out if the caller has not done it within :data:`RESERVED_FOR`.
    """
    write(removals, due_at=timezone.now() + RESERVED_FOR)
    things = [(removal.kind, removal.vhost, removal.name) for removal in removals]
    written = Removal.objects.filter(bulk.among(Removal, ("kind", "vhost", "name"), things))
    return list(written.values_list("id", flat=True))


# Carrying out


@dataclass
class Outcome:
    """The result of removals.

    ``removed`` includes objects that did not exist. ``kept`` are queues in use, whose removals are dropped. ``errors``
    are sentences about removals that the task tries again. ``unreachable``: the broker did not answer, and the rest was
    not tried. Objects that were registered again are in none of these.
    """

    removed: int = 0
    kept: list[QueueName] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unreachable: bool = False


def run_due(seconds: float = SECONDS_AFTER_COMMIT, *, only: Sequence[tuple[str, str, str]] | None = None) -> int:
    """Carry out the removals that are due, for this many seconds at most, and return how many succeeded.

    ``only`` are the objects to remove, as (kind, vhost, name). A request carries out its own removals alone; otherwise
    the audit trail would name its user for those of others. If the broker is unreachable, all due removals wait a
    minute. Errors of the broker and the database are logged, not raised. Do not call this in a transaction.
    """
    until = time.monotonic() + seconds
    due = _is_due() if only is None else _is_due() & Q(bulk.among(Removal, ("kind", "vhost", "name"), only))
    removed = 0
    try:
        while time.monotonic() < until and (batch := _claim(due, seconds, until)):
            batch.carry_out()
            removed += len(batch.removed)
            if batch.unreachable:
                break
    except Error as error:
        logger.error("The database failed during removals. The task carries out the rest within minutes: %s", error)
    if removed:
        logger.info("Removed %d objects from the broker", removed)
    return removed


def run(ids: Collection[int]) -> Outcome:
    """Carry out these removals now, due or not, except those that another process has claimed.

    Do not call this in a transaction. Raises django.db.Error if the database is unreachable.
    """
    outcome = Outcome()
    waiting = list(ids)
    while waiting and not outcome.unreachable:
        these = Q(pk__in=waiting[:BATCH_SIZE])
        until = time.monotonic() + SECONDS_OF_TASK
        batch = _claim(these & (Q(claim=None) | _is_due()), SECONDS_OF_TASK, until)
        if batch is not None:
            batch.carry_out()
            outcome.removed += len(batch.removed)
            outcome.kept += [(removal.vhost, removal.name) for removal in batch.kept]
            outcome.errors += [str(error) for _, error in (*batch.refused, *batch.unanswered)]
            outcome.unreachable = batch.unreachable
        waiting = waiting[BATCH_SIZE:]
    return outcome


def _is_due() -> Q:
    return Q(due_at__lte=Now())


def _claim(these: Q, seconds: float, until: float) -> "_Batch | None":
    """Claim a batch of these removals, or return None if there are none.

    The batch sends no request after ``until``, at most ``seconds`` from now. The claim outlasts its last request.
    """
    claim = uuid.uuid4()
    order = Case(*[When(kind=kind, then=Value(number)) for number, kind in enumerate(Removal.Kind)])
    with transaction.atomic():
        free = Removal.objects.select_for_update(skip_locked=True).filter(these)
        # Failed ones come last, because each of them may end a run.
        removals = list(free.order_by("attempts", order, "id")[:BATCH_SIZE])
        if not removals:
            return None
        if _handlers[removals[0].kind].alone:
            removals = removals[:1]
        else:
            removals = [removal for removal in removals if not _handlers[removal.kind].alone]
        Removal.objects.filter(pk__in=[removal.pk for removal in removals]).update(
            claim=claim, due_at=Now() + timedelta(seconds=seconds + locks.lock_seconds())
        )
    return _Batch(claim, removals, until)


class _Batch:
    """Removals that this process has claimed, and their results.

    ``unanswered``: the broker is unreachable, and the request was not sent or its outcome is unknown. ``busy``: another
    process has the lock, or there was no time left. The rest was not tried.
    """

    def __init__(self, claim: uuid.UUID, removals: list[Removal], until: float) -> None:
        self._claim = claim
        self._removals = removals
        self._until = until
        self._stopped = threading.Event()
        self.removed: list[Removal] = []
        self.kept: list[Removal] = []
        self.busy: list[Removal] = []
        self.refused: list[tuple[Removal, BrokerError]] = []
        self.unanswered: list[tuple[Removal, BrokerUnavailable]] = []

    @property
    def unreachable(self) -> bool:
        return self._stopped.is_set()

    def carry_out(self) -> None:
        self._drop_obsolete()
        try:
            with broker.clients() as clients:
                self._remove(clients)
        except BrokerUnavailable as error:  # no broker is configured
            self._stopped.set()
            self.unanswered += [(removal, error) for removal in self._removals[:1]]
        self._record()

    def _drop_obsolete(self) -> None:
        """Drop the removals of objects that were registered again. Call it after the claim is committed."""
        obsolete = [
            removal
            for kind, handler in _handlers.items()
            if (of_kind := self._of_kind(kind))
            for removal in handler.obsolete(of_kind)
        ]
        if obsolete:
            self._mine(obsolete).delete()
            dropped = {removal.pk for removal in obsolete}
            self._removals = [removal for removal in self._removals if removal.pk not in dropped]
            logger.info("Dropped %d obsolete removals", len(obsolete))

    def _remove(self, clients: Clients) -> None:
        """Remove kind by kind: users and passwords first, so that no client connects while its queues are deleted."""
        for kind in Removal.Kind:
            vhosts = {removal.name for removal in self.removed if removal.kind == Removal.Kind.VHOST}
            of_kind = self._of_kind(kind)
            self.removed += [removal for removal in of_kind if removal.vhost in vhosts]
            left = [removal for removal in of_kind if removal.vhost not in vhosts]
            if _handlers[kind].parallel:
                with ContextThreadPool(MAX_PARALLEL) as pool:
                    list(pool.map(lambda removal: self._attempt(clients, removal), left))
            else:
                for removal in left:
                    self._attempt(clients, removal)

    def _attempt(self, clients: Clients, removal: Removal) -> None:
        """Remove one object and record the result, unless the time is over or the broker is unreachable."""
        if self._stopped.is_set() or time.monotonic() >= self._until:
            return
        try:
            _handlers[removal.kind].remove(clients, removal, self._until)
        except NotOnBroker:
            self.removed.append(removal)
        except BrokerUnavailable as error:
            self._stopped.set()
            self.unanswered.append((removal, error))
        except (locks.LockTaken, Postponed):
            self.busy.append(removal)
        except Kept:
            self.kept.append(removal)
        except BrokerError as error:
            self.refused.append((removal, error))
        else:
            self.removed.append(removal)

    def _record(self) -> None:
        for kind, handler in _handlers.items():
            if of_kind := [removal for removal in self.removed if removal.kind == kind]:
                handler.removed(of_kind)
        finished = [*self.removed, *self.kept]
        self._mine(finished).delete()
        for removal in self.kept:
            logger.warning("%s in %s is in use and stays", removal.name, removal.vhost)
        self._record_failures()
        tried = {removal.pk for removal in (*finished, *self.busy)}
        tried |= {removal.pk for removal, _ in (*self.refused, *self.unanswered)}
        wait = RETRY_SECONDS if self.unreachable else 0
        self._release(self.busy, max(wait, BUSY_RETRY_SECONDS))
        self._release([removal for removal in self._removals if removal.pk not in tried], wait)
        if self.unreachable:
            with transaction.atomic():
                # Otherwise the next callback of the same request would wait for the broker again.
                due = Removal.objects.select_for_update(skip_locked=True).filter(_is_due()).order_by("id")
                Removal.objects.filter(pk__in=due.values("pk")).update(due_at=_in(RETRY_SECONDS))

    def _record_failures(self) -> None:
        failed: list[tuple[Removal, BrokerError]] = [*self.refused, *self.unanswered]
        bulk.update(Removal, ("last_error",), [(removal.pk, str(error)[:300]) for removal, error in failed])
        for removal, error in self.refused:
            logger.warning("%s can't be removed yet: %s", removal, error)
        for _, error in self.unanswered[:1]:
            logger.warning("The broker is unreachable. Removals continue in a minute: %s", error)
        self._back_off([removal for removal, _ in self.refused])
        not_sent = [removal for removal, error in self.unanswered if error.never_reached]
        self._back_off(not_sent)
        # The broker may still execute these requests, so a registration must not cancel their removals.
        unknown = [removal for removal, error in self.unanswered if not error.never_reached]
        self._back_off(unknown, claim=self._claim)

    def _back_off(self, removals: list[Removal], *, claim: uuid.UUID | None = None) -> None:
        removals.sort(key=_attempts)
        for attempts, same in groupby(removals, key=_attempts):
            self._release(list(same), retry_seconds(attempts + 1), attempts=attempts + 1, claim=claim)

    def _release(self, removals: Sequence[Removal], seconds: float, **values: Any) -> None:
        """Make these due in this many seconds, and release their claim unless ``values`` has one."""
        if removals:
            self._mine(removals).update(**{"claim": None, "due_at": _in(seconds), **values})

    def _of_kind(self, kind: str) -> list[Removal]:
        return [removal for removal in self._removals if removal.kind == kind]

    def _mine(self, removals: Iterable[Removal]) -> QuerySet[Removal]:
        """Return the rows that this process still has claimed, without those that were written again."""
        return Removal.objects.filter(pk__in=[removal.pk for removal in removals], claim=self._claim)


def retry_seconds(attempts: int) -> int:
    """Return the seconds to wait after this many attempts: doubled each time, up to ``MAX_RETRY_SECONDS``."""
    return min(MAX_RETRY_SECONDS, RETRY_SECONDS << min(attempts - 1, 10))


def _in(seconds: float) -> CombinedExpression:
    return Now() + timedelta(seconds=seconds)


def _attempts(removal: Removal) -> int:
    return removal.attempts
