"""What goes from the broker when the row that stood for it goes: written with the deletion, done after its commit.

A :class:`Removal` is written in the transaction that deletes the row, however that comes about: by itself, by a
cascade, by a queryset, in the admin. Once that is committed the broker is asked, and a task goes on with what is left.
No correctness rests on that callback: the Removal is the truth, and a process that is killed leaves it to the task.

Somebody may register the very thing anew while it is being removed. So whoever removes it writes a claim first and then
looks whether a row stands for it, and whoever registers it writes the row first and then looks for a Removal: one of
them sees the other. A request whose answer was lost may still be carried out later, so such a Removal keeps its claim
until it is tried again.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Any

from django.db import Error, IntegrityError, OperationalError, connection, transaction
from django.db.models import Case, F, Model, Q, QuerySet, Value, When
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now
from django.db.models.signals import post_delete, pre_delete
from django.dispatch import receiver
from django.utils import timezone

from accounts import audit
from accounts.models import AuthToken, Owner
from agents.models import AgentIdentity, AgentVhost, Consumer, EventSubscription, Offering, SubscriptionQueue
from core import broker, bulk, locks
from core.models import Removal
from queues import tombstones
from rabbit.management import BrokerAway, BrokerError, Management, NotThere, Refused
from rabbit.threads import Threads

logger = logging.getLogger(__name__)

BATCH = 1000
"""So many are claimed at once. Each batch takes as many statements, whatever its size."""

AT_ONCE = 8
"""So many queues are deleted side by side."""

SECONDS_AFTER_COMMIT = 20
"""For so long whoever deleted something goes on removing. What is left then is the task's."""

SECONDS_OF_TASK = 50

BUSY_SECONDS = 10
AWAY_SECONDS = 60
AWAY_MOST_SECONDS = 300
"""What was tried waits longer each time, so that one thing which makes the broker fail doesn't keep all others."""
REFUSED_MOST_SECONDS = 3600

COLLECTED = "_removals_of_this_deletion"
"""Where the origin of a deletion, an instance or a queryset, has what is to be written at its end."""

MODELS: tuple[type[Model], ...] = (SubscriptionQueue, EventSubscription, Consumer, AgentVhost, AuthToken)
"""The models whose rows stand for something on the broker."""

ROUNDS = 3
"""So often is a deletion tried that something else in the database gets in the way of."""

DEADLOCK = "40P01"
"""How PostgreSQL calls it that two wait for each other, and one of them has to begin again."""

_BELOW: Mapping[type[Model], Mapping[str, type[Model]]] = {
    Owner: {},
    AuthToken: {"user": Owner},
    Offering: {},
    AgentIdentity: {"owner": Owner, "offering": Offering},
    EventSubscription: {"owner": Owner, "identity": AgentIdentity},
}
"""What has something below it, in the order in which a deletion locks it, and what each goes with.

Owners come first, as for a pass and for whoever makes a token. A token comes before the logins whose password it is, as
where it is given to one.
"""

CLOSED = "The token that was this account's password is no longer valid"
"""What the clients of a user are told when it loses its password."""

QueueName = tuple[str, str]
"""A vhost, and the name of a queue there."""


# Writing what is to go


def write(removals: Sequence[Removal], *, due_at: datetime | None = None) -> None:
    """Write down what is to go from the broker, in the caller's transaction, and see to it after the commit.

    What is written down already is due again, as if nobody were at it; that it goes even if somebody reads from it is
    never taken back. With ``due_at`` nothing is done now: the task finds it then. Two statements at most.
    """
    things: dict[tuple[str, str, str], bool] = {}
    for removal in removals:
        thing = (str(removal.kind), removal.vhost, removal.name)
        things[thing] = things.get(thing, True) and removal.if_unused
    if not things:
        return
    fields = ["kind", "vhost", "name", "if_unused", "created", "attempts", "last_error"]
    update = ["claim", "due_at", "attempts", "last_error"]
    if due_at is not None:
        fields.append("due_at")
    now = timezone.now()
    with transaction.atomic():
        for if_unused in (False, True):
            # In one order, so that two that write the same don't wait for each other.
            chosen = sorted(thing for thing, only_unused in things.items() if only_unused == if_unused)
            common = (if_unused, now, 0, "") if due_at is None else (if_unused, now, 0, "", due_at)
            bulk.insert(
                Removal,
                fields,
                [(*thing, *common) for thing in chosen],
                unique=("kind", "vhost", "name"),
                update=update if if_unused else [*update, "if_unused"],
            )
        if due_at is None:
            transaction.on_commit(work_off, robust=True)


def doubt(name: str) -> None:
    """Have a user's password taken by the task, unless it is certainly a good one by then; in a transaction.

    For one that was asked for before, and whose token is written down no longer. The broker may set it even after the
    good one, so the next registration sets that anew.
    """
    write([Removal(kind=Removal.Kind.PASSWORD, name=name)], due_at=timezone.now())
    Removal.objects.filter(kind=Removal.Kind.PASSWORD, name=name).update(attempts=1)


def pending() -> set[QueueName]:
    """Return the queues that are still to go, so that it is no wonder if they are missing. One statement."""
    return set(Removal.objects.filter(kind=Removal.Kind.QUEUE).order_by().values_list("vhost", "name"))


def is_over() -> Q:
    """Return the condition that a token is in force no longer: it has expired, or its owner isn't active any more."""
    return Q(expiry__lte=Now()) | Q(user__is_active=False)


def disarm_expired() -> int:
    """Take the passwords of all logins whose token is in force no longer, as if it were revoked; return their number.

    The subscriptions and consumers stay, and so does the token's row. The next token presented is the password again.
    """
    names: list[str] = []
    expired = AuthToken.objects.filter(is_over()).values("pk")
    with transaction.atomic():
        for model, name in _LOGINS.items():
            # Locked, so that what a registration writes down meanwhile is left to the next time, with its Removal.
            logins = model._default_manager.select_for_update().filter(Q(token__in=expired) | Q(next_token__in=expired))
            found = list(logins.order_by("pk").values_list("pk", name))
            if found:
                model._default_manager.filter(bulk.among(model, ("id",), [(pk,) for pk, _ in found])).update(
                    token=Case(When(token__in=expired, then=None), default=F("token")),
                    next_token=Case(When(next_token__in=expired, then=None), default=F("next_token")),
                    password_set=False,
                )
            names += [_username(value) for _, value in found]
        write([Removal(kind=Removal.Kind.PASSWORD, name=name) for name in names])
    if names:
        logger.info("%d logins had a token that is in force no longer, and lose it as their password", len(names))
    return len(names)


# Deletions of rows


def delete(rows: Model | QuerySet[Any]) -> dict[str, int]:
    """Delete a row, or the rows of a queryset, with all below them, and return how many of each model went.

    Nothing is registered below them between reading and deleting: SQLite's transaction is alone, and on PostgreSQL they
    are locked first, so that whoever inserts a row that points at one waits for the end. A row that is gone already is
    no error.

    Raises:
        django.db.Error: what the database can't do, or three times couldn't.
    """
    if isinstance(rows, Model):
        rows = type(rows)._base_manager.filter(pk=rows.pk)
    rounds_left = ROUNDS
    while True:
        rounds_left -= 1
        try:
            with transaction.atomic():
                # Anew each time: a queryset whose deletion failed still has what was noted of it.
                by_somebody = audit.actor() is not None and not audit.is_watched(rows.model)
                things = list(rows) if by_somebody else []
                went = _locked(rows).delete()[1]
                if things and went:
                    audit.note(None, audit.DELETED, things, went=went)
                return went
        except (IntegrityError, OperationalError) as error:
            if not rounds_left or not (isinstance(error, IntegrityError) or is_deadlock(error)):
                raise
            logger.info("A deletion begins again, since another change got in its way: %s", error)


def is_deadlock(error: Error) -> bool:
    """Return whether two waited for each other, so that the database gave this one up. It may be tried again."""
    return getattr(error.__cause__, "pgcode", None) == DEADLOCK


def _locked(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return these rows as a queryset of their own, locked, and everything that has something below it with them."""
    if not connection.features.has_select_for_update:
        return rows.all()
    locked: dict[type[Model], list[Any]] = {}
    for model, parents in (_BELOW if rows.model in _BELOW else {rows.model: {}}).items():
        if model is rows.model:
            these = Q(pk__in=rows.order_by().values("pk"))
        else:
            these = Q()
            for name, parent in parents.items():
                if keys := [(pk,) for pk in locked.get(parent, [])]:
                    these |= Q(bulk.among(model, (name,), keys))
            if not these:
                continue
        found = model._base_manager.select_for_update().filter(these).order_by("pk")
        locked[model] = list(found.values_list("pk", flat=True))
    these_alone: QuerySet[Any] = rows.model._default_manager.filter(pk__in=locked[rows.model])
    return these_alone


@dataclass
class _Collected:
    """What goes with the rows of one deletion.

    ``rows``: the primary keys of those that stand for a queue. ``logins``: whose password a token is, RabbitMQ users by
    its digest.
    """

    removals: list[Removal] = field(default_factory=list)
    rows: dict[type[Model], list[Any]] = field(default_factory=dict)
    logins: dict[str, list[str]] = field(default_factory=dict)


@receiver(pre_delete, sender=SubscriptionQueue)
@receiver(pre_delete, sender=EventSubscription)
@receiver(pre_delete, sender=Consumer)
@receiver(pre_delete, sender=AgentVhost)
@receiver(pre_delete, sender=AuthToken)
def collect(sender: type[Model], instance: Model, origin: Model | QuerySet[Model] | None, **_: Any) -> None:
    """Note what goes from the broker with a row. It is asked of the row alone, so that many take no more statements.

    All rows of a deletion pass here before the first of them is deleted. Without an origin, it is written at once.
    """
    collected: _Collected = _Collected() if origin is None else vars(origin).setdefault(COLLECTED, _Collected())
    kinds = Removal.Kind
    if isinstance(instance, SubscriptionQueue | Consumer):
        collected.rows.setdefault(sender, []).append(instance.pk)
        collected.removals.append(Removal(kind=kinds.QUEUE, vhost=instance.vhost, name=instance.queue_name))
    if isinstance(instance, EventSubscription | Consumer):
        collected.removals.append(Removal(kind=kinds.USER, name=instance.rmq_username))
    if isinstance(instance, AgentVhost):
        collected.removals.append(Removal(kind=kinds.VHOST, name=instance.name))
    if isinstance(instance, AuthToken):
        if instance.pk not in collected.logins:
            collected.logins |= {instance.pk: []} | _disarm(_tokens_of(origin, instance))
        collected.removals += [Removal(kind=kinds.PASSWORD, name=name) for name in collected.logins[instance.pk]]
    if origin is None:
        write(collected.removals)


@receiver(post_delete, sender=SubscriptionQueue)
@receiver(post_delete, sender=EventSubscription)
@receiver(post_delete, sender=Consumer)
@receiver(post_delete, sender=AgentVhost)
@receiver(post_delete, sender=AuthToken)
def write_collected(sender: type[Model], origin: Model | QuerySet[Model] | None, **_: Any) -> None:
    """Write what goes with a deletion, in its transaction: at the first row that is deleted, for all of them.

    The rows come first, as in every deletion: what another one is just deleting has its Removal from there, and is
    waited for here before any is written.
    """
    collected: _Collected | None = None if origin is None else vars(origin).pop(COLLECTED, None)
    if collected is None:
        return
    if connection.features.has_select_for_update:
        for model in sorted(collected.rows, key=_label):
            keys = bulk.among(model, ("id",), [(pk,) for pk in collected.rows[model]])
            list(model._default_manager.select_for_update().filter(keys).order_by("pk").values_list("pk"))
    users = {removal.name for removal in collected.removals if removal.kind == Removal.Kind.USER}
    write(
        [
            removal
            for removal in collected.removals
            if removal.kind != Removal.Kind.PASSWORD or removal.name not in users
        ]
    )


_LOGINS: Mapping[type[EventSubscription] | type[Consumer], str] = {
    EventSubscription: "uuid",
    Consumer: "rmq_username",
}
"""What logs in to the broker, and the field that its RabbitMQ user is named after."""


def _label(model: type[Model]) -> str:
    return model._meta.label


def _username(value: uuid.UUID | str) -> str:
    return value.hex if isinstance(value, uuid.UUID) else value


def _tokens_of(origin: Model | QuerySet[Model] | None, token: AuthToken) -> Q:
    """Return the condition for the tokens that go with this one, so that all of them are looked up at once."""
    if isinstance(origin, Owner):
        return Q(user=origin.pk)
    if isinstance(origin, QuerySet) and origin.model is AuthToken:
        return Q(pk__in=origin.values("pk"))
    if isinstance(origin, QuerySet) and origin.model is Owner:
        return Q(user__in=origin.values("pk"))
    return Q(pk=token.pk)


def _disarm(tokens: Q) -> dict[str, list[str]]:
    """Note that these tokens are no passwords any more, and return the RabbitMQ users that may have them, by token.

    The tokens are locked first: a registration that is giving one of them to a login either is seen here, or fails
    as the token is gone. The deletion itself makes the fields empty that point at them.
    """
    locked = AuthToken.objects.select_for_update().filter(tokens).order_by("pk").values_list("pk", flat=True)
    found: dict[str, list[str]] = {pk: [] for pk in locked}
    if not found:
        return found
    for model, name in _LOGINS.items():
        keys = [(pk,) for pk in found]
        these = Q(bulk.among(model, ("token",), keys)) | Q(bulk.among(model, ("next_token",), keys))
        logins = model._default_manager.filter(these)
        locked_logins = logins.select_for_update().order_by("pk")
        for token, next_token, value in locked_logins.values_list("token_id", "next_token_id", name):
            for pk in found.keys() & {token, next_token}:
                found[pk].append(_username(value))
        logins.update(password_set=False)
    return found


# Removing it


@dataclass
class Outcome:
    """What became of queues that were to go.

    ``deleted`` is their number, those included that were gone already. ``kept`` are those that somebody reads from;
    their Removals are dropped. ``errors`` are in words; what they speak of is tried again by the task. ``away``: the
    broker doesn't answer, so that nothing else was tried. What was registered again in between is none of these.
    """

    deleted: int = 0
    kept: list[QueueName] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    away: bool = False


def work_off(seconds: float = SECONDS_AFTER_COMMIT) -> int:
    """Remove from the broker what is due, for so many seconds at most, and return how many things are gone now.

    It stops where the broker is away; all that is due then is due again in a minute. It never raises: what can't be
    done is logged and stays. Not to be called in a transaction.
    """
    until = time.monotonic() + seconds
    gone = 0
    try:
        while time.monotonic() < until and (batch := _claim(_is_due(), seconds, until)):
            batch.carry_out()
            gone += len(batch.gone)
            if batch.away:
                break
    except Error as error:
        logger.error("The database is away in the middle of removals; they go on in some minutes: %s", error)
    if gone:
        logger.info("%d things were removed from the broker", gone)
    return gone


def finish() -> int:
    """Go on with all removals that are due, and return how many things are gone now. What is left waits a minute."""
    return work_off(SECONDS_OF_TASK)


def carry_out(ids: Collection[int]) -> Outcome:
    """Remove the things of these Removals now, due or not, and say what became of them. What others are at is left out.

    Write them with a ``due_at`` some minutes from now, so that nobody else begins; what a crash leaves is the task's.
    Not to be called in a transaction.

    Raises:
        django.db.Error: the database is away.
    """
    outcome = Outcome()
    waiting = list(ids)
    while waiting and not outcome.away:
        these = Q(bulk.among(Removal, ("id",), [(id_,) for id_ in waiting[:BATCH]]))
        until = time.monotonic() + SECONDS_OF_TASK
        batch = _claim(these & (Q(claim=None) | _is_due()), SECONDS_OF_TASK, until)
        if batch is not None:
            batch.carry_out()
            outcome.deleted += len(batch.gone)
            outcome.kept += [(removal.vhost, removal.name) for removal in batch.kept]
            outcome.errors += [str(error) for _, error in (*batch.refused, *batch.lost)]
            outcome.away = batch.away
        waiting = waiting[BATCH:]
    return outcome


def _is_due() -> Q:
    return Q(due_at__lte=Now())


def _claim(these: Q, seconds: float, until: float) -> "_Batch | None":
    """Claim up to a batch of these, in the order in which they go; None: there are none.

    Nothing is begun after ``until``, which is so many ``seconds`` from now at most, and what is begun then is over
    before the claim is.
    """
    mine = uuid.uuid4()
    order = Case(*[When(kind=kind, then=Value(number)) for number, kind in enumerate(Removal.Kind)])
    with transaction.atomic():
        free = Removal.objects.select_for_update(skip_locked=True).filter(these)
        removals = list(free.order_by(order, "id")[:BATCH])
        if not removals:
            return None
        Removal.objects.filter(bulk.among(Removal, ("id",), [(removal.pk,) for removal in removals])).update(
            claim=mine, due_at=Now() + timedelta(seconds=seconds + locks.seconds())
        )
    return _Batch(mine, removals, until)


class _Batch:
    """What one worker has claimed, and what became of it: ``gone``, ``kept`` since somebody reads from it, ``refused``.

    ``lost``: the broker is away, and what became of the request is unknown or nothing. ``busy``: somebody is changing
    that user right now. What is none of these was not tried.
    """

    def __init__(self, claim: uuid.UUID, removals: list[Removal], until: float) -> None:
        self._claim = claim
        self._removals = removals
        self._until = until
        self._stopped = threading.Event()
        self.gone: list[Removal] = []
        self.kept: list[Removal] = []
        self.busy: list[Removal] = []
        self.refused: list[tuple[Removal, BrokerError]] = []
        self.lost: list[tuple[Removal, BrokerAway]] = []

    @property
    def away(self) -> bool:
        """Whether the broker doesn't answer."""
        return self._stopped.is_set()

    def carry_out(self) -> None:
        """Remove all of it, and write down what became of it."""
        self._drop_what_stands()
        try:
            self._remove(broker.management())
        except BrokerAway as error:  # none is configured, or its address is none
            self._stopped.set()
            self.lost += [(removal, error) for removal in self._removals[:1]]
        self._note()

    def _drop_what_stands(self) -> None:
        """Drop what a row stands for again. Read after the claim was written, so that no registration is overlooked."""
        stands = {
            removal.pk
            for kind, there in _STANDING.items()
            if (of_kind := self._of_kind(kind))
            for names in [there(of_kind)]
            for removal in of_kind
            if (removal.vhost, removal.name) in names
        }
        if stands:
            dropped = [removal for removal in self._removals if removal.pk in stands]
            self._mine(dropped).delete()
            self._removals = [removal for removal in self._removals if removal.pk not in stands]
            logger.info("%d things stay on the broker, since they were registered again", len(dropped))

    def _remove(self, management: Management) -> None:
        """Ask the broker, users and passwords first, so that nobody comes back while their queues go."""
        kinds = Removal.Kind
        for removal in self._of_kind(kinds.PASSWORD):
            self._attempt(removal, partial(self._take_password, management, removal))
        for removal in self._of_kind(kinds.USER):
            self._attempt(removal, partial(_delete_user, management, removal.name))
        for removal in self._of_kind(kinds.VHOST):
            self._attempt(removal, partial(management.delete_vhost, removal.name))
        went = {removal.name for removal in self.gone if removal.kind == kinds.VHOST}
        queues = self._of_kind(kinds.QUEUE)
        self.gone += [queue for queue in queues if queue.vhost in went]
        queues = [queue for queue in queues if queue.vhost not in went]
        deletions = [
            partial(management.delete_queue, queue.vhost, queue.name, if_unused=queue.if_unused) for queue in queues
        ]
        with Threads(AT_ONCE) as pool:
            list(pool.map(self._attempt, queues, deletions))

    def _attempt(self, removal: Removal, remove: Callable[[], None]) -> None:
        """Remove one thing, unless the time is over or the broker is away, and keep in mind what became of it."""
        if self._is_over():
            return
        try:
            remove()
        except NotThere:
            self.gone.append(removal)
        except BrokerAway as error:
            self._stopped.set()
            self.lost.append((removal, error))
        except (locks.Taken, _OutOfTime):
            self.busy.append(removal)
        except BrokerError as error:
            if removal.if_unused and _is_in_use(error):
                self.kept.append(removal)
            else:
                self.refused.append((removal, error))
        else:
            self.gone.append(removal)

    def _is_over(self) -> bool:
        return self._stopped.is_set() or time.monotonic() >= self._until

    def _take_password(self, management: Management, removal: Removal) -> None:
        """Make a user's password unusable and close its connections, unless it certainly has another good one since.

        Raises:
            NotThere: there is no such user.
            locks.Taken: somebody is changing it right now.
        """
        name = removal.name
        with locks.held(name) as ours:
            logins = EventSubscription.objects.filter(uuid=name), Consumer.objects.filter(rmq_username=name)
            good = Q(token__isnull=False, next_token=None, password_set=True)
            is_good = any(rows.filter(good).exists() for rows in logins)
            if not is_good or removal.attempts:
                # With a good one, what was asked for before may have been done only after that was set.
                for rows in logins:
                    rows.update(password_set=False)
            if is_good:
                return
            held = ours.renewed_by(management)
            # The second would make a user that isn't there; so the first is asked before.
            for ask in (
                partial(held.user, name),
                partial(held.put_user, name, None),
                partial(held.close_connections_of, name, CLOSED),
            ):
                if time.monotonic() >= self._until:
                    raise _OutOfTime
                ask()

    def _note(self) -> None:
        """Write down what became of all of it."""
        queues = [removal for removal in self.gone if removal.kind == Removal.Kind.QUEUE]
        tombstones.forget([(queue.vhost, queue.name) for queue in queues])
        for vhost in [removal.name for removal in self.gone if removal.kind == Removal.Kind.VHOST]:
            tombstones.forget_vhost(vhost)
            Removal.objects.filter(kind=Removal.Kind.QUEUE, vhost=vhost).delete()
        over = [*self.gone, *self.kept]
        self._mine(over).delete()
        for removal in self.kept:
            logger.warning("%s in %s is kept: somebody reads from it", removal.name, removal.vhost)
        self._note_failures()
        tried = {removal.pk for removal in (*over, *self.busy)}
        tried |= {removal.pk for removal, _ in (*self.refused, *self.lost)}
        left = [removal for removal in self._removals if removal.pk not in tried]
        wait = AWAY_SECONDS if self.away else 0
        self._put_off(self.busy, max(wait, BUSY_SECONDS))
        self._put_off(left, wait)
        if self.away:
            with transaction.atomic():
                # Else the next callback of the same request waits for the broker just as long.
                due = Removal.objects.select_for_update(skip_locked=True).filter(_is_due()).order_by("id")
                Removal.objects.filter(pk__in=due.values("pk")).update(due_at=_in(AWAY_SECONDS))

    def _note_failures(self) -> None:
        """Write down what the broker refused, and what it was asked for in vain: why, and when that is tried again."""
        failed: list[tuple[Removal, BrokerError]] = [*self.refused, *self.lost]
        bulk.update(Removal, ("last_error",), [(removal.pk, str(error)[:300]) for removal, error in failed])
        for removal, error in self.refused:
            logger.warning("%s can't be removed yet: %s", removal, error)
        for _, error in self.lost[:1]:
            logger.warning("Removing from the broker stops here, and goes on in a minute: %s", error)
        self._put_off_longer([removal for removal, _ in self.refused], REFUSED_MOST_SECONDS)
        self._put_off_longer([removal for removal, error in self.lost if error.never_reached], AWAY_MOST_SECONDS)
        # What may still be carried out must not be taken back by a registration meanwhile.
        unknown = [removal for removal, error in self.lost if not error.never_reached]
        self._put_off_longer(unknown, AWAY_MOST_SECONDS, claim=self._claim)

    def _put_off_longer(self, removals: list[Removal], most: int, *, claim: uuid.UUID | None = None) -> None:
        """Put these off for the longer the more often they were tried, up to so many seconds."""
        removals.sort(key=_attempts)
        for attempts, same in groupby(removals, key=_attempts):
            self._put_off(list(same), wait_seconds(attempts + 1, most), attempts=attempts + 1, claim=claim)

    def _put_off(self, removals: Sequence[Removal], seconds: float, **values: Any) -> None:
        """Let go of these, unless another claim is given, so that they are due in so many seconds."""
        if removals:
            self._mine(removals).update(**{"claim": None, "due_at": _in(seconds), **values})

    def _of_kind(self, kind: str) -> list[Removal]:
        return [removal for removal in self._removals if removal.kind == kind]

    def _mine(self, removals: Iterable[Removal]) -> QuerySet[Removal]:
        """Return the rows of these that are still this worker's: one that was written again in between is not."""
        keys = [(removal.pk,) for removal in removals]
        if not keys:
            return Removal.objects.none()
        return Removal.objects.filter(bulk.among(Removal, ("id",), keys), claim=self._claim)


class _OutOfTime(Exception):
    """The claim might be over before the next answer is there."""


def wait_seconds(attempts: int, most: int) -> int:
    """Return how long to wait after so many attempts: twice as long each time, up to so many seconds."""
    return min(most, AWAY_SECONDS << min(attempts - 1, 10))


def _in(seconds: float) -> CombinedExpression:
    return Now() + timedelta(seconds=seconds)


def _attempts(removal: Removal) -> int:
    return removal.attempts


def _delete_user(management: Management, name: str) -> None:
    """Delete a user; the broker closes its connections.

    It is held meanwhile: a registration that is about to make it has to see first that the row is gone.

    Raises:
        NotThere: there is no such user.
        locks.Taken: somebody is changing it right now.
    """
    with locks.held(name) as ours:
        ours.renewed_by(management).delete_user(name)


def _is_in_use(error: BrokerError) -> bool:
    return isinstance(error, Refused) and error.status == 400 and error.reason.endswith("in use")


def _registered(removals: Sequence[Removal]) -> set[QueueName]:
    names = [(removal.vhost, removal.name) for removal in removals]
    return {
        name
        for model in (SubscriptionQueue, Consumer)
        for name in model._default_manager.filter(bulk.among(model, ("vhost", "queue_name"), names))
        .order_by()
        .values_list("vhost", "queue_name")
    }


def _with_login(removals: Sequence[Removal]) -> set[QueueName]:
    names = [removal.name for removal in removals]
    subscriptions = bulk.among(EventSubscription, ("uuid",), [(uuid.UUID(name),) for name in names])
    consumers = bulk.among(Consumer, ("rmq_username",), [(name,) for name in names])
    found = {uuid.hex for uuid in EventSubscription.objects.filter(subscriptions).values_list("uuid", flat=True)}
    found |= set(Consumer.objects.filter(consumers).values_list("rmq_username", flat=True))
    return {("", name) for name in found}


def _with_owner(removals: Sequence[Removal]) -> set[QueueName]:
    these = bulk.among(AgentVhost, ("name",), [(removal.name,) for removal in removals])
    return {("", name) for name in AgentVhost.objects.filter(these).values_list("name", flat=True)}


_STANDING: Mapping[str, Callable[[Sequence[Removal]], set[QueueName]]] = {
    Removal.Kind.USER: _with_login,
    Removal.Kind.VHOST: _with_owner,
    Removal.Kind.QUEUE: _registered,
}
"""Which of these things a row stands for, by kind. A password is looked at under its lock."""
