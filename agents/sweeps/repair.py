"""Declare registered queues and vhosts again that the broker has lost, and have their agents subscribe again."""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db.models import Q
from django.utils import timezone

from accounts.models import Owner
from agents.models import MAX_ERROR_LENGTH, REGISTERED, AgentVhost, Consumer, Registration, SubscriptionQueue
from agents.registration import queues, vhosts
from agents.sweeps.reports import REGISTRATION_GRACE
from core import bulk
from core.leases import HeldLease
from rabbit.errors import BrokerError, BrokerUnavailable
from rabbit.management import Management
from rabbit.names import DEAD_LETTER_QUEUE, QueueName

logger = logging.getLogger(__name__)


MAX_TIMEOUTS = 3
"""After this many timed-out repairs, the broker counts as unreachable."""

SECONDS_PER_PASS = 10.0
"""How long one pass may take to declare queues again. The next pass continues."""

RETRY_INTERVAL = timedelta(minutes=1)
"""How long passes wait after they could not declare a queue."""

NOT_DECLARED = "RabbitMQ does not have the queue, and Guardian could not declare it: "
"""How the last error of such a queue begins. Publishing records other errors."""

Repairable = Owner | SubscriptionQueue | Consumer
"""An owner stands for the vhost of the owner's agents, with its dead-letter queue."""


@dataclass
class Repair:
    """The result of a repair. ``away``: the broker became unreachable."""

    declared: int = 0
    errors: list[str] = field(default_factory=list)
    away: bool = False


def repair(
    what: Sequence[Repairable], management: Management, lease: HeldLease, seconds: float | None = None
) -> Repair:
    """Declare queues and vhosts again, for at most this many seconds.

    Continue after failures, unless the broker is unreachable.
    """
    result = Repair()
    until = None if seconds is None else time.monotonic() + seconds
    timeouts = 0
    for one in what:
        if until is not None and time.monotonic() >= until:
            break
        lease.renew_if_due()
        try:
            _declare(one, management)
        except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
            # The latter two: the owner may not use the broker any more, or was deleted.
            result.errors.append(f"{_name(one)} could not be declared again: {error}")
            _record_error(one, str(error))
            if isinstance(error, BrokerUnavailable):
                # Other errors concern one vhost, which is busy or down.
                timeouts += error.timed_out
                if error.never_reached or timeouts == MAX_TIMEOUTS:
                    result.away = True
                    break
        else:
            result.declared += 1
            logger.info("%s was declared again", _name(one))
    return result


def repair_after_pass(missing: Collection[QueueName], management: Management, lease: HeldLease) -> list[str]:
    """Declare the queues that a pass found missing, and those that are not ready since earlier. Return the errors.

    Two statements if there are none.
    """
    owners = AgentVhost.objects.filter(name__in=[vhost for vhost, name in missing if name == DEAD_LETTER_QUEUE])
    what: list[Repairable] = [vhost.owner for vhost in owners.select_related("owner")] if missing else []
    now = timezone.now()
    for model in REGISTERED:
        # A younger registration may still be in progress.
        due = Q(created__lt=now - REGISTRATION_GRACE)
        if missing:
            due |= Q(bulk.among(model, ("vhost", "queue_name"), list(missing)))
        failed = Q(last_error__startswith=NOT_DECLARED, last_error_at__gt=now - RETRY_INTERVAL)
        rows = model._default_manager.filter(due, state=Registration.CREATING).exclude(failed)
        what += rows.select_related(model.OWNER_FIELD).order_by("pk")
    return repair(what, management, lease, SECONDS_PER_PASS).errors if what else []


def _declare(one: Repairable, management: Management) -> None:
    if isinstance(one, Owner):
        vhosts.create_vhost(one, management)
    else:
        queues.redeclare(one, management)


def _name(one: Repairable) -> str:
    return f"{DEAD_LETTER_QUEUE} in {one.uuid.hex}" if isinstance(one, Owner) else f"{one.queue_name} in {one.vhost}"


def _record_error(one: Repairable, error: str) -> None:
    """Record on the row of a queue why it could not be declared."""
    if not isinstance(one, Owner):
        rows = type(one)._default_manager.filter(pk=one.pk)
        rows.update(last_error=f"{NOT_DECLARED}{error}"[:MAX_ERROR_LENGTH], last_error_at=timezone.now())
