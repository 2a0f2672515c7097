"""How a queue is declared and bound, for its archive."""

import logging
from typing import Any

from core import broker
from rabbit import deadline
from rabbit.errors import BrokerError

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""The timeout of both requests: the deletion of the queue waits for them."""

MAX_BINDINGS = 1_000
"""The bindings of a queue with more are not stored."""


def definition_of(vhost: str, name: str) -> dict[str, Any]:
    """Return the columns of ``Archive`` that say how the queue is declared and bound, as far as the broker answers."""
    found: dict[str, Any] = {}
    try:
        with deadline.limit(SECONDS):
            management = broker.management()
            row = management.queue_arguments(vhost, name)
            arguments = row.get("arguments")
            found = {column: row.get(column) for column in ("type", "durable", "auto_delete")}
            found["arguments"] = arguments if isinstance(arguments, dict) else {}
            bindings = management.queue_bindings(vhost, name)
    except BrokerError as error:  # also a name that is invalid in a URL
        logger.warning("How %s in %s is declared and bound is not known completely: %s", name, vhost, error)
        return found
    if len(bindings) <= MAX_BINDINGS:
        found["bindings"] = [
            {"exchange": one.source, "routing_key": one.routing_key, "arguments": dict(one.arguments)}
            for one in bindings
            if one.source  # every queue is bound to the default exchange
        ]
    return found
