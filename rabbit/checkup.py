"""Checks of a broker over AMQP, for ``manage.py doctor`` and ``/readyz``."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

import amqp

from rabbit.addresses import addresses_of
from rabbit.amqp import cluster_of, new_connection
from rabbit.names import PROBE_QUEUE

TIMEOUT_SECONDS = 4.0
"""For the connection and for each answer."""


class ServerProperties(NamedTuple):
    """What a broker says about itself before the login. ``cluster`` is empty if its cluster has no name."""

    product: str
    version: str
    cluster: str


def server_properties(amqp_url: str) -> ServerProperties:
    """Return the properties of the broker at an address. The login may fail. Raises OSError if this isn't AMQP."""
    connection = new_connection(amqp_url, "/", TIMEOUT_SECONDS)
    try:
        with suppress(amqp.AMQPError):
            connection.connect()
        # py-amqp sets this attribute when the broker's first frame arrives.
        properties: Mapping[str, Any] = getattr(connection, "server_properties", None) or {}
        if not properties:
            raise OSError("the server there doesn't speak AMQP")
        product, version = (str(properties.get(name, "")) for name in ("product", "version"))
        return ServerProperties(product, version, cluster_of(connection))
    finally:
        connection.collect()


def check_any(amqp_urls: str, vhost: str, seconds: float) -> None:
    """Check a vhost like ``check_vhost``, at each address in turn until one works, as sessions do.

    ``seconds`` are for all addresses together. Raises the error of the last one.
    """
    addresses = addresses_of(amqp_urls)
    failure: Exception = OSError("no address of the broker is set for AMQP")
    for url in addresses.in_turn():
        try:
            return check_vhost(url, vhost, seconds / len(addresses))
        except (amqp.AMQPError, OSError) as error:
            failure = error
            addresses.move_past(url)
    raise failure


def check_vhost(amqp_url: str, vhost: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Connect to a vhost. Declare a queue passively, like the recheck before a deletion, then declare and delete one.

    Raises OSError if there is no answer, and amqp.AMQPError if the broker refuses the login or a request.
    """
    connection = new_connection(amqp_url, vhost, seconds)
    try:
        connection.connect()
        with suppress(amqp.NotFound):
            connection.channel().queue_declare(PROBE_QUEUE, passive=True, auto_delete=False)
        declare_and_delete(connection.channel())
    finally:
        connection.collect()


def declare_and_delete(channel: Any) -> None:
    """Declare a queue that only this connection may use, and delete it. Raises amqp.AMQPError if that is refused."""
    name = f"{PROBE_QUEUE}.{uuid4().hex}"
    channel.queue_declare(name, exclusive=True)
    channel.queue_delete(name)
