"""Declare registered queues and vhosts again that the broker has lost."""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from django.core.exceptions import ObjectDoesNotExist, PermissionDenied

from accounts.models import Owner
from agents import registration, vhosts
from agents.broker_view import BrokerView
from agents.models import Consumer, SubscriptionQueue
from agents.reports import Report
from core.leases import HeldLease
from rabbit.management import BrokerError, BrokerUnavailable, Management
from rabbit.names import DEAD_LETTER_QUEUE

logger = logging.getLogger(__name__)


MAX_TIMEOUTS = 3
"""After this many timed-out repairs, the broker counts as unreachable."""


def repair(
    report: Report,
    view: BrokerView,
    missing: Sequence[SubscriptionQueue | Consumer],
    vhosts_without_dlq: Sequence[str],
    lease: HeldLease,
) -> None:
    """Declare missing vhosts and queues again. Continue after failures, unless the broker is unreachable."""
    timeouts = 0
    steps: Iterable[tuple[str, Callable[[], None]]] = chain(
        (
            (f"{DEAD_LETTER_QUEUE} in {owner.uuid.hex}", _create_vhost(owner, view.management))
            for owner in Owner.objects.filter(pk__in=[view.vhosts[vhost] for vhost in vhosts_without_dlq])
        ),
        ((f"{row.queue_name} in {row.vhost}", _redeclare(row, view.management)) for row in missing),
    )
    for what, declare in steps:
        lease.renew_if_due()
        try:
            declare()
        except (BrokerError, PermissionDenied, ObjectDoesNotExist) as error:
            # The latter two: the owner may not use the broker any more, or was deleted.
            report.add_error(f"{what} could not be declared again: {error}")
            if isinstance(error, BrokerUnavailable):
                # Other errors concern one vhost, which is busy or down.
                timeouts += error.timed_out
                if error.never_reached or timeouts == MAX_TIMEOUTS:
                    report.away = True
                    return
        else:
            report.repaired += 1
            logger.info("%s was declared again", what)


def _redeclare(row: SubscriptionQueue | Consumer, management: Management) -> Callable[[], None]:
    return lambda: registration.redeclare(row, management)


def _create_vhost(owner: Owner, management: Management) -> Callable[[], None]:
    return lambda: vhosts.create_vhost(owner, management)
