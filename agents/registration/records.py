"""Rows of registrations: create a row once under concurrent requests, and remove it if the request fails."""

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import IntegrityError, OperationalError, transaction
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from accounts.access.quotas import SUBSCRIPTIONS, require_room
from accounts.access.vouching import require_vouched
from accounts.models import Owner
from agents.removal.deletions import is_deadlock
from core import removals
from core.models import Removal
from rabbit.errors import BrokerUnavailable

T = TypeVar("T")


MAX_ATTEMPTS = 3
"""Of a registration whose row is removed concurrently, or whose statement fails in a deadlock."""

WAIT_SECONDS = 10.0
"""How long a request waits for another one that sets the same login's password or creates the same vhost."""

REMOVAL_DELAY = timedelta(minutes=1)
"""After this time, the broker has handled any late request of a failed registration, whose remains can be removed."""

M = TypeVar("M", bound=Model)


class Busy(BrokerUnavailable):
    """The broker is reachable, but the request can't be completed now. The outcome is unknown; try again later.

    Another request is changing the same login, queue or vhost, or its node is down.
    """


def get_or_create(rows: QuerySet[M], defaults: Mapping[str, Any], owner: Owner, **unique: Any) -> tuple[M, bool]:
    """Return the row with these unique fields, created if there is none, and whether it is new.

    Django's own ``get_or_create`` can't refuse to create.
    """
    for _ in range(MAX_ATTEMPTS):
        row = rows.filter(**unique).first()
        if row is not None:
            return row, False
        with contextlib.suppress(IntegrityError):  # another request created the row, or a referenced row was removed
            return insert(lambda: rows.create(**unique, **defaults), owner, rows.model), True
    raise ObjectDoesNotExist("The agent, subscription or offering of this registration no longer exists.")


def insert(insert: Callable[[], T], owner: Owner, model: Any) -> T:
    """Insert a row of this model, of an owner who may use the broker.

    Raises IntegrityError if the row exists, or another row that it refers to was removed.
    """
    require_vouched(owner)  # without a lock: a concurrent withdrawal does no harm
    own_rows = model.objects.filter(**{model.OWNER_FIELD: owner})
    for _ in range(MAX_ATTEMPTS):
        try:
            with transaction.atomic():
                require_room(SUBSCRIPTIONS, owner, own_rows, str(model._meta.verbose_name_plural))
                return insert()
        except IntegrityError as error:
            if Owner.objects.filter(pk=owner.pk).exists():
                raise
            raise Owner.DoesNotExist("The owner no longer exists.") from error
        except OperationalError as error:
            # A concurrent deletion locks the referenced rows in another order.
            if not is_deadlock(error):
                raise
    raise Busy("The database is busy with related rows; try again")


def cancel_removal(kind: Removal.Kind, vhost: str, name: str) -> bool:
    """Cancel a pending removal, and return whether there was one. Commit the row of the registration before.

    A process that executes a removal first commits a claim and then reads the rows. So either that process sees the
    row, or this function sees the claim and raises Busy.
    """
    pending = Removal.objects.filter(kind=kind, vhost=vhost, name=name)
    if not pending.exists():
        return False
    pending.filter(Q(claim=None) | Q(due_at__lte=Now())).delete()
    if pending.exists():
        raise Busy(f"'{name}' is being removed from the broker; try again in a minute")
    return True


def delete_row(rows: QuerySet[Any]) -> None:
    """Delete rows without signals, whose receivers would send requests to the broker, which has just failed."""
    rows._raw_delete(rows.db)


def remove_later(*what: Removal) -> None:
    """Record removals to execute after ``REMOVAL_DELAY``. A removal in progress is executed again then."""
    removals.write(what, due_at=timezone.now() + REMOVAL_DELAY)


def repeatedly_removed(what: str) -> Busy:
    """Return the error for a row that other requests removed at each attempt."""
    return Busy(f"{what} was removed repeatedly while it was being created; try again later")
