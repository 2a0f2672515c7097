"""What is asked about a queue before its messages are fetched: its definition, and whether Guardian may delete it."""

import logging
import re
from http import HTTPStatus
from typing import Any

from core import broker
from rabbit import deadline
from rabbit.errors import BrokerError, Refused
from rabbit.permissions import allows
from rabbit.policies import delivery_limit
from rabbit.snapshot import UNKNOWN_TYPE, type_of

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""The timeout of these requests: the deletion of the queue waits for them."""

MAX_BINDINGS = 1_000
"""The bindings of a queue with more are not stored."""


class NotPermitted(Refused):
    """Guardian's RabbitMQ user may not delete the queue. No request to delete it was sent."""


def definition_of(vhost: str, name: str) -> dict[str, Any]:
    """Return the columns of ``Archive`` that say how the queue is declared and bound, as far as the broker answers."""
    found: dict[str, Any] = {}
    try:
        with deadline.limit(SECONDS):
            management = broker.management()
            row = management.queue_arguments(vhost, name)
            arguments = row.get("arguments")
            found = {column: row.get(column) for column in ("durable", "auto_delete")}
            found["type"] = None if type_of(row) == UNKNOWN_TYPE else type_of(row)
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


def quorum_queue(vhost: str, name: str) -> dict[str, Any]:
    """Return a quorum queue's arguments, and how often its messages may be returned, or None for no limit."""
    management = broker.management()
    try:
        row = management.queue_arguments(vhost, name)
        policies, operator_policies = management.policies(vhost), management.operator_policies(vhost)
        return {**row, "delivery_limit": delivery_limit(row, policies, operator_policies)}
    except BrokerError as error:
        logger.warning("The delivery limit of %s is unknown: %s", name, error)
        return {"delivery_limit": 0}


def require_permission(user: str, vhost: str, name: str) -> None:
    """Raise NotPermitted if RabbitMQ's own permissions of a user exclude deleting a queue: fetching would be in vain.

    Return if this is uncertain. Then RabbitMQ refuses the deletion itself.
    """
    try:
        with deadline.limit(SECONDS):
            granted = broker.management().permissions_of(user).get(vhost)
        is_allowed = granted is None or allows(granted.configure, name)  # None: another backend authorizes it
    except (BrokerError, re.error):  # such as a user in LDAP, or a pattern that only the broker's PCRE reads
        return
    if not is_allowed:
        reason = f"access refused: '{user}' has no permission to delete '{name}'"
        raise NotPermitted(f"vhost '{vhost}': {reason}", status=HTTPStatus.FORBIDDEN, reason=reason)
