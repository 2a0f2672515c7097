"""People's own exchanges, ``exchange/NAME/…``. They have no rows: the broker alone knows them."""

import logging
from collections import defaultdict
from typing import NamedTuple

from django.conf import settings
from django.contrib.auth.models import AnonymousUser

from accounts import audit
from accounts.models import Owner, PulseUser
from core import broker
from queues.actions import Gone
from rabbit.management import Binding, NotOnBroker
from rabbit.names import user_of_exchange

logger = logging.getLogger(__name__)


DELETED_EXCHANGE = "deleted an exchange"
"""The words of the audit trail; an exchange has no row, so its name is among the details."""


class OwnExchange(NamedTuple):
    """An exchange of a Pulse user, which it is by its name. ``bindings`` are what is bound to it."""

    name: str
    vhost: str
    type: str
    durable: bool
    pulse_user: str
    bindings: list[Binding]


def own_exchanges(visitor: Owner | AnonymousUser) -> list[OwnExchange]:
    """Return the exchanges that are this visitor's, by name; to an operator everybody's. Two requests at most.

    Raises:
        BrokerError: the broker can't be asked.
    """
    theirs = None if visitor.is_staff else _usernames(visitor)
    if theirs is not None and not theirs:
        return []
    vhost = settings.GUARDIAN_PULSE_VHOST
    management = broker.management()
    found = {
        exchange.name: (exchange, user)
        for exchange in management.exchanges(vhost)
        if (user := user_of_exchange(exchange.name)) is not None and (theirs is None or user in theirs)
    }
    if not found:
        return []
    bound: dict[str, list[Binding]] = defaultdict(list)
    for binding in management.bindings(vhost):
        if binding.source in found:
            bound[binding.source].append(binding)
    return [
        OwnExchange(
            name,
            vhost,
            exchange.type,
            exchange.durable,
            user,
            sorted(bound[name], key=lambda binding: (binding.destination, binding.routing_key)),
        )
        for name, (exchange, user) in sorted(found.items())
    ]


def delete_exchange(visitor: Owner, name: str) -> None:
    """Delete an exchange. The queues that are bound to it stay, and get nothing from it any more.

    Raises:
        LookupError: it isn't this visitor's by its name, or nobody's.
        Gone: it isn't on the broker any more.
        BrokerError: the broker is away or refuses.
    """
    require_own(visitor, name)
    vhost = settings.GUARDIAN_PULSE_VHOST
    try:
        with audit.audited(visitor, DELETED_EXCHANGE, None, exchange=name, vhost=vhost):
            broker.management().delete_exchange(vhost, name)
    except NotOnBroker as error:
        raise Gone("The exchange isn't on the broker any more.") from error
    logger.info("exchange %s was deleted by %s", name, visitor)


def require_own(visitor: Owner | AnonymousUser, name: str) -> None:
    """Make sure that an exchange of this name is this visitor's; an operator's is everybody's.

    Raises:
        LookupError: it isn't.
    """
    user = user_of_exchange(name)
    if user is None or not (visitor.is_staff or user in _usernames(visitor)):
        raise LookupError("There is no such exchange of yours.")


def _usernames(visitor: Owner | AnonymousUser) -> set[str]:
    return set(PulseUser.objects.seen_by(visitor).values_list("username", flat=True))
