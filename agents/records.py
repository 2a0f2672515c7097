"""Rows of registrations: created once, whoever asks at the same time, and removed again when a request fails."""

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import IntegrityError, OperationalError
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from accounts.models import Owner
from accounts.vouching import require_vouched
from agents.deletions import is_deadlock
from core import removals
from core.models import Removal
from rabbit.management import BrokerUnavailable

T = TypeVar("T")


MAX_ATTEMPTS = 3
"""Of a registration whose row is removed at the same time, or which the database gives up for a deadlock."""

WAIT_SECONDS = 10.0
"""How long a request waits for another one that sets the same login's password, or creates the same vhost."""

REMOVAL_DELAY = timedelta(minutes=1)
"""How long after a failed registration its remains are removed: by then the broker has handled a late request."""

M = TypeVar("M", bound=Model)


class Busy(BrokerUnavailable):
    """The broker is there, and this one thing can't be done right now: another request is at it, or its node is down.

    Whether anything was done is unknown, so ask again later.
    """


def get_or_create(rows: QuerySet[M], defaults: Mapping[str, Any], owner: Owner, **unique: Any) -> tuple[M, bool]:
    """Return the row with these unique fields, created if there is none, and whether it is new.

    Django's own ``get_or_create`` can't refuse to create.

    Raises:
        NotVouched: there is none, and the owner may not use the broker.
        Busy: the database gave up a deadlock several times.
        ObjectDoesNotExist: what it would belong to was removed.
    """
    for _ in range(MAX_ATTEMPTS):
        row = rows.filter(**unique).first()
        if row is not None:
            return row, False
        with contextlib.suppress(IntegrityError):  # another request created it, or what it belongs to was removed
            return insert(lambda: rows.create(**unique, **defaults), owner), True
    raise ObjectDoesNotExist("What this was to be registered for was removed meanwhile.")


def insert(insert: Callable[[], T], owner: Owner) -> T:
    """Insert a row of an owner who may use the broker.

    Raises:
        NotVouched: the owner may not.
        Busy: the database gave up a deadlock several times.
        ObjectDoesNotExist: the owner was removed.
        IntegrityError: there is such a row, or another one that it refers to was removed.
    """
    # The owner is not locked, as for an account: it does no harm if access is withdrawn at this moment.
    require_vouched(owner)
    for _ in range(MAX_ATTEMPTS):
        try:
            return insert()
        except IntegrityError as error:
            if Owner.objects.filter(pk=owner.pk).exists():
                raise
            raise Owner.DoesNotExist("The owner was removed meanwhile.") from error
        except OperationalError as error:
            # A deletion locks the rows that this one refers to, in another order.
            if not is_deadlock(error):
                raise
    raise Busy("The database is busy with what this belongs to; ask again")


def cancel_removal(kind: Removal.Kind, vhost: str, name: str) -> bool:
    """Cancel the pending removal of this, and return whether there was one. Its row has been committed before.

    Whoever carries a removal out commits a claim first and reads the rows then. So either they see the row, or the
    claim is seen here.

    Raises:
        Busy: it is being removed right now.
    """
    pending = Removal.objects.filter(kind=kind, vhost=vhost, name=name)
    if not pending.exists():
        return False
    pending.filter(Q(claim=None) | Q(due_at__lte=Now())).delete()
    if pending.exists():
        raise Busy(f"'{name}' is just being removed from the broker; ask again in a minute")
    return True


def delete_row(rows: QuerySet[Any]) -> None:
    """Delete rows without signals: these would ask the broker at once, which has just failed, and wait for it again."""
    rows._raw_delete(rows.db)


def remove_later(*what: Removal) -> None:
    """Have something removed from the broker in a while. Somebody who is just at it has to begin again then."""
    removals.write(what, due_at=timezone.now() + REMOVAL_DELAY)


def repeatedly_removed(what: str) -> Busy:
    """Return the error for a row that was removed by others at each attempt."""
    return Busy(f"{what} was removed again and again while it was being made; ask again later")
