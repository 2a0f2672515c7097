"""Checks of a broker over AMQP, for ``manage.py doctor``."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import amqp

from rabbit.amqp import cluster_of, new_connection

TIMEOUT_SECONDS = 4.0
"""For the connection and for each answer."""

PROBE_QUEUE = "guardian.doctor"


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


def check_vhost(amqp_url: str, vhost: str) -> None:
    """Connect to a vhost and declare a queue there passively, like the recheck before a deletion.

    Raises OSError if there is no answer, and amqp.AMQPError if the broker refuses the login or the request.
    """
    connection = new_connection(amqp_url, vhost, TIMEOUT_SECONDS)
    try:
        connection.connect()
        with suppress(amqp.NotFound):
            connection.channel().queue_declare(PROBE_QUEUE, passive=True, auto_delete=False)
    finally:
        connection.collect()
