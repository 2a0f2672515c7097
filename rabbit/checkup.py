"""Checks of a broker over AMQP, for ``manage.py doctor`` and ``/readyz``."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import amqp

from rabbit.amqp import Session, cluster_of, new_connection
from rabbit.errors import NotOnBroker
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


def check_vhost(amqp_url: str, vhost: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Declare a queue passively in a vhost, like the recheck before a deletion, then declare and delete one.

    The addresses are as for ``Session``. Raises BrokerError.
    """
    with Session(amqp_url, vhost, seconds) as session:
        with suppress(NotOnBroker):
            session.declare_passively(PROBE_QUEUE)
        session.request(partial(declare_and_delete, session.new_channel()))


def declare_and_delete(channel: Any) -> None:
    """Declare a queue that only this connection may use, and delete it. Raises amqp.AMQPError if that is refused."""
    name = f"{PROBE_QUEUE}.{uuid4().hex}"
    channel.queue_declare(name, exclusive=True)
    channel.queue_delete(name)
