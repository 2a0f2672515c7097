"""The vhosts of agents, with their dead-letter queues."""

import logging
from collections.abc import Callable
from typing import TypeVar

from django.db import transaction
from django.db.models import QuerySet

from accounts.models import Owner
from agents.models import AgentVhost, Consumer, EventSubscription
from agents.registration import records
from agents.registration.declaring import declare_or_replace
from agents.registration.records import Busy, cancel_removal, get_or_create, remove_later
from core import locks
from core.models import Removal
from rabbit import arguments, names
from rabbit.errors import NotOnBroker, Refused
from rabbit.management import Management

logger = logging.getLogger(__name__)

T = TypeVar("T")


def require_vhost(owner: Owner, management: Management) -> None:
    """Create the vhost of an owner's agents, unless it was created before."""
    if not AgentVhost.objects.filter(owner=owner, ready=True).exists():
        create_vhost(owner, management, recreate=False)


def create_vhost(owner: Owner, management: Management, *, recreate: bool = True) -> None:
    """Create the vhost of an owner's agents and its dead-letter queue; ``recreate``: even if the row is ready."""
    name = owner.uuid.hex
    rows = AgentVhost.objects.filter(owner=owner)
    try:
        with locks.lock(f"vhost {name}", wait=records.WAIT_SECONDS) as lock:
            vhost, _ = get_or_create(rows, {"owner": owner}, owner, name=name)
            if vhost.ready and not recreate:
                return
            cancel_removal(Removal.Kind.VHOST, "", name)
            client = lock.renewing_client(management)
            try:
                # A lost vhost has lost its permissions. Record this first, because the answer may get lost.
                _forget_passwords(owner)
                client.create_vhost(name)
                _declare_dead_letter_queue(name, client)
                rows.update(ready=True)
            finally:
                if not rows.exists():
                    # The row was deleted with its owner, maybe before the broker created the vhost.
                    remove_later(Removal(kind=Removal.Kind.VHOST, name=name))
    except locks.LockTaken as error:
        raise Busy(f"The vhost '{name}' is being created by another request; try again") from error


def _forget_passwords(owner: Owner) -> None:
    """Record that the logins of an owner lack their password, so that the next registration of each sets it."""
    logins: tuple[QuerySet[EventSubscription] | QuerySet[Consumer], ...] = (
        EventSubscription.objects.filter(owner=owner, password_set=True),
        Consumer.objects.filter(identity__owner=owner, password_set=True),
    )
    with transaction.atomic():
        for rows in logins:
            # Lock in a fixed order, so that two requests don't deadlock.
            locked = list(rows.select_for_update(of=("self",)).order_by("pk").values_list("pk", flat=True))
            rows.model._default_manager.filter(pk__in=locked).update(password_set=False)


def _declare_dead_letter_queue(vhost: str, management: Management) -> None:
    try:
        declare_or_replace(vhost, names.DEAD_LETTER_QUEUE, arguments.DEAD_LETTER_QUEUE_ARGUMENTS, management)
    except NotOnBroker as error:
        raise lost_again(vhost, error) from error
    except Refused as error:
        # The queue still accepts dead letters, and the agent can't fix it.
        logger.warning("The dead-letter queue of the vhost '%s' has wrong arguments: %s", vhost, error)


def in_vhost(owner: Owner, management: Management, request: Callable[[], T]) -> T:
    """Return the answer to a request about the vhost of an owner's agents; create the vhost again if it is lost."""
    try:
        return request()
    except NotOnBroker:
        logger.info("The broker has lost the vhost '%s'; creating it again", owner.uuid.hex)
    create_vhost(owner, management)
    try:
        return request()
    except NotOnBroker as error:
        raise lost_again(owner.uuid.hex, error) from error


def lost_again(vhost: str, error: NotOnBroker) -> Busy:
    return Busy(f"The broker has lost the vhost '{vhost}' again, or its node is down; try again later: {error}")
