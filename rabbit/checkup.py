"""What is asked of a broker over AMQP only to see whether all is right with it: who answers, and in which vhosts."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import amqp

from rabbit.amqp import new_connection

TIMEOUT_SECONDS = 4.0
"""How long one answer may take."""

PROBE_QUEUE = "guardian.doctor"
"""Is asked about, and never made."""


class ServerProperties(NamedTuple):
    """What a broker says of itself over AMQP, to anybody. ``cluster`` is its cluster's name; empty: it has none."""

    product: str
    version: str
    cluster: str


def server_properties(amqp_url: str) -> ServerProperties:
    """Return what answers at this address; whether it would let the account in doesn't matter.

    Raises:
        OSError: nobody answers, or no AMQP.
    """
    connection = new_connection(amqp_url, "/", TIMEOUT_SECONDS)
    try:
        with suppress(amqp.AMQPError):
            connection.connect()
        # There from the first word on; missing where that never came.
        said: Mapping[str, Any] = getattr(connection, "server_properties", None) or {}
        if not said:
            raise OSError("AMQP isn't spoken there")
        return ServerProperties(*(str(said.get(name, "")) for name in ("product", "version", "cluster_name")))
    finally:
        connection.collect()


def check_vhost(amqp_url: str, vhost: str) -> None:
    """Connect to a vhost and ask passively for a queue there, as the second look before a deletion does.

    Raises:
        OSError: nobody answers.
        amqp.AMQPError: the broker doesn't let the account in, or ask.
    """
    connection = new_connection(amqp_url, vhost, TIMEOUT_SECONDS)
    try:
        connection.connect()
        with suppress(amqp.NotFound):
            connection.channel().queue_declare(PROBE_QUEUE, passive=True, auto_delete=False)
    finally:
        connection.collect()
