"""What is removed from the broker when rows of agents are deleted, on their own or with their owner.

Signal receivers write a Removal in the transaction of the deletion. So this covers single rows, querysets, cascades and
the admin.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import Error, IntegrityError, OperationalError, connection, transaction
from django.db.models import Model, Q, QuerySet
from django.db.models.signals import post_delete, pre_delete
from django.dispatch import receiver

from accounts import audit
from accounts.access import vouching
from accounts.models import AuthToken, Owner
from agents.models import AgentIdentity, AgentVhost, Consumer, EventSubscription, Offering, SubscriptionQueue
from agents.removal.handlers import mark_passwords_unset
from core import bulk, removals
from core.models import Removal
from queues.models import Queue

logger = logging.getLogger(__name__)

COLLECTED = "_removals_of_this_deletion"
"""The attribute for the collected removals. It is set on the origin of a deletion: an instance or a queryset.

The origin is all that the signals of one deletion share, and no other deletion has it. A ContextVar would mix nested
deletions, and keep what a failed deletion collected for the thread's next.
"""

MAX_ATTEMPTS = 3

DEADLOCK = "40P01"

OF_OFFERING: Mapping[type[Model], str] = {SubscriptionQueue: "offering", Consumer: "identity__offering"}
"""The lookups of an offering by the registered queues that are deleted with it."""

_PARENTS: Mapping[type[Model], Mapping[str, type[Model]]] = {
    Owner: {},
    AuthToken: {"user": Owner},
    Offering: {},
    AgentIdentity: {"owner": Owner, "offering": Offering},
    EventSubscription: {"owner": Owner, "identity": AgentIdentity},
}
"""The models with dependent rows, in the order in which a deletion locks them, and the models that they depend on.

Passes and the creation of tokens lock owners first, too. Registrations lock tokens before logins, too.
"""


def delete(rows: Model | QuerySet[Any]) -> dict[str, int]:
    """Delete a row or the rows of a queryset with their cascade, and return how many of each model were deleted.

    Lock them first, so that no row that refers to them is inserted before the deletion. (SQLite has one writer anyway.)
    Rows that no longer exist are ignored.
    """
    if isinstance(rows, Model):
        rows = type(rows)._base_manager.filter(pk=rows.pk)
    attempts_left = MAX_ATTEMPTS
    while True:
        attempts_left -= 1
        try:
            with transaction.atomic():
                # Use a new queryset for each attempt: a failed one still has the removals that it collected.
                by_person = audit.actor() is not None and not audit.is_watched(rows.model)
                audited = list(rows) if by_person else []
                deleted = _locked(rows).delete()[1]
                if audited and deleted:
                    audit.record(None, audit.DELETED, audited, went=deleted)
                return deleted
        except (IntegrityError, OperationalError) as error:
            if not attempts_left or not (isinstance(error, IntegrityError) or is_deadlock(error)):
                raise
            logger.info("Retrying a deletion, because it conflicted with another change: %s", error)


def queues_deleted_with(rows: Collection[int], lookups: Mapping[type[Model], str]) -> QuerySet[Queue]:
    """Return the stored queues that are deleted with rows, given as primary keys.

    ``lookups`` maps each model of a registered queue that is deleted with a row to its lookup of that row.
    """
    names = [
        name
        for model, lookup in lookups.items()
        for name in model._default_manager.filter(**{f"{lookup}__in": rows}).values_list("vhost", "queue_name")
    ]
    return Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), names)) if names else Queue.objects.none()


def require_no_pulse_users(owner: Owner) -> None:
    """Lock an owner who is about to be deleted, in a transaction. Raises PermissionDenied if they own Pulse users."""
    vouching.lock_existing([owner])
    if owner.pulse_users.exists():
        raise PermissionDenied(f"{owner} owns a Pulse user, so it can't be deleted.")


def is_deadlock(error: Error) -> bool:
    """Return whether PostgreSQL aborted the transaction because of a deadlock. It may be retried."""
    return getattr(error.__cause__, "pgcode", None) == DEADLOCK


def _locked(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Lock these rows and the dependent rows in ``_PARENTS``, and return these rows as a new queryset."""
    if not connection.features.has_select_for_update:
        return rows.all()
    locked: dict[type[Model], list[Any]] = {}
    for model, parents in (_PARENTS if rows.model in _PARENTS else {rows.model: {}}).items():
        if model is rows.model:
            these = Q(pk__in=rows.order_by().values("pk"))
        else:
            these = Q()
            for name, parent in parents.items():
                if keys := locked.get(parent):
                    these |= Q(**{f"{name}__in": keys})
            if not these:
                continue
        found = model._base_manager.select_for_update().filter(these).order_by("pk")
        locked[model] = list(found.values_list("pk", flat=True))
    only_these: QuerySet[Any] = rows.model._default_manager.filter(pk__in=locked[rows.model])
    return only_these


@dataclass
class _Collected:
    """The removals of one deletion.

    ``rows`` are the primary keys of the rows with a queue. ``users`` are the RabbitMQ users whose password may be a
    token, by the token's digest.
    """

    removals: list[Removal] = field(default_factory=list)
    rows: dict[type[Model], list[Any]] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=dict)


@receiver(pre_delete, sender=SubscriptionQueue)
@receiver(pre_delete, sender=EventSubscription)
@receiver(pre_delete, sender=Consumer)
@receiver(pre_delete, sender=AgentVhost)
@receiver(pre_delete, sender=AuthToken)
def collect(sender: type[Model], instance: Model, origin: Model | QuerySet[Model] | None, **_: Any) -> None:
    """Collect the removals of a row, without queries for each row.

    Django sends this signal for all rows of a deletion before it deletes the first. Without an origin, write the
    removals now.
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
        if instance.pk not in collected.users:
            collected.users |= {instance.pk: []} | mark_passwords_unset(_tokens_of(origin, instance))
        collected.removals += [Removal(kind=kinds.PASSWORD, name=name) for name in collected.users[instance.pk]]
    if origin is None:
        removals.write(collected.removals)


@receiver(post_delete, sender=SubscriptionQueue)
@receiver(post_delete, sender=EventSubscription)
@receiver(post_delete, sender=Consumer)
@receiver(post_delete, sender=AgentVhost)
@receiver(post_delete, sender=AuthToken)
def write_collected(sender: type[Model], origin: Model | QuerySet[Model] | None, **_: Any) -> None:
    """Write the collected removals of a deletion once, when its first row is deleted.

    Lock the rows before. If another transaction is deleting some of them, this waits until its removals are written.
    """
    collected: _Collected | None = None if origin is None else vars(origin).pop(COLLECTED, None)
    if collected is None:
        return
    if connection.features.has_select_for_update:
        for model in sorted(collected.rows, key=lambda model: model._meta.label):
            rows = model._default_manager.filter(pk__in=collected.rows[model])
            list(rows.select_for_update().order_by("pk").values_list("pk"))
    users = {removal.name for removal in collected.removals if removal.kind == Removal.Kind.USER}
    removals.write(
        [
            removal
            for removal in collected.removals
            if removal.kind != Removal.Kind.PASSWORD or removal.name not in users
        ]
    )


def _tokens_of(origin: Model | QuerySet[Model] | None, token: AuthToken) -> Q:
    """Return the condition for all tokens of this deletion, so that their logins are read in one query."""
    if isinstance(origin, Owner):
        return Q(user=origin.pk)
    if isinstance(origin, QuerySet) and origin.model is AuthToken:
        return Q(pk__in=origin.values("pk"))
    if isinstance(origin, QuerySet) and origin.model is Owner:
        return Q(user__in=origin.values("pk"))
    return Q(pk=token.pk)
