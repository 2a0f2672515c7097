"""Exchanges of Pulse users, ``exchange/NAME/…``. They have no rows: they are read from the broker."""

import logging
from collections import defaultdict
from http import HTTPStatus
from typing import NamedTuple

from django.conf import settings
from django.contrib.auth.models import AnonymousUser

from accounts import audit
from accounts.models import Owner, PulseUser
from core import broker
from core.refusals import Refusal
from queues.actions.single import Gone
from rabbit.entities import Binding, PublishedBy
from rabbit.errors import NotOnBroker, Refused
from rabbit.names import user_of_exchange

logger = logging.getLogger(__name__)

DELETED_EXCHANGE = "deleted an exchange"
"""The audit trail's entry. An exchange has no row, so the details contain its name."""


class OwnExchange(NamedTuple):
    """An exchange that belongs to a Pulse user by its name. It is the source of ``bindings``."""

    name: str
    vhost: str
    type: str
    durable: bool
    pulse_user: str
    bindings: list[Binding]


def own_exchanges(visitor: Owner | AnonymousUser) -> list[OwnExchange]:
    """Return the visitor's exchanges by name, for an operator all users'. It takes at most two requests."""
    usernames = None if visitor.is_staff and visitor.reads_only is None else _usernames(visitor)
    if usernames is not None and not usernames:
        return []
    vhost = settings.GUARDIAN_PULSE_VHOST
    management = broker.management()
    found = {
        exchange.name: (exchange, user)
        for exchange in management.exchanges(vhost)
        if (user := user_of_exchange(exchange.name)) is not None and (usernames is None or user in usernames)
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


def own_exchange(visitor: Owner | AnonymousUser, name: str) -> OwnExchange:
    """Return the visitor's exchange of this name.

    Raises:
        Refusal: by its name, the exchange does not belong to this visitor.
        Gone: it is not on the broker.
    """
    require_own(visitor, name)
    found = next((one for one in own_exchanges(visitor) if one.name == name), None)
    if found is None:
        raise Gone("The exchange is no longer on the broker.")
    return found


class Published(NamedTuple):
    """What is published to an exchange. ``is_of_user``: the publishers' figures are of all their exchanges together."""

    published: float | None = None
    routed: float | None = None
    publishers: list[PublishedBy] | None = None
    is_of_user: bool = False


def traffic(exchange: OwnExchange) -> Published:
    """Return who publishes to an exchange, as far as RabbitMQ counts it, with at most two requests."""
    management = broker.management()
    try:
        published, routed, publishers = management.exchange_traffic(exchange.vhost, exchange.name)
    except (NotOnBroker, Refused):  # its name is invalid in a URL
        return Published()
    if publishers or published is None:
        return Published(published, routed, publishers)
    # Its Pulse user alone may write to it.
    of_user = [one for one in management.publishers(exchange.vhost) if one.user == exchange.pulse_user]
    return Published(published, routed, of_user, is_of_user=True)


def delete_exchange(visitor: Owner, name: str) -> None:
    """Delete an exchange. Bound queues stay, and receive nothing more from it.

    Raises:
        Refusal: by its name, the exchange does not belong to this visitor.
        Gone: the exchange is no longer on the broker.
        BrokerError: the broker is unreachable or refuses.
    """
    require_own(visitor, name)
    vhost = settings.GUARDIAN_PULSE_VHOST
    try:
        with (
            audit.audited(visitor, DELETED_EXCHANGE, None, exchange=name, vhost=vhost),
            broker.session(vhost) as session,
        ):
            session.delete_exchange(name)
    except NotOnBroker as error:
        raise Gone("The exchange is no longer on the broker.") from error
    logger.info("exchange %s was deleted by %s", name, visitor)


def require_own(visitor: Owner | AnonymousUser, name: str) -> None:
    """Require that an exchange of this name belongs to this visitor. An operator may access every user's.

    Raises:
        Refusal: it does not.
    """
    user = user_of_exchange(name)
    if user is None or not (visitor.is_staff or user in _usernames(visitor)):
        raise Refusal("You have no exchange with this name.", status=HTTPStatus.NOT_FOUND)


def _usernames(visitor: Owner | AnonymousUser) -> set[str]:
    return set(PulseUser.objects.seen_by(visitor).values_list("username", flat=True))
