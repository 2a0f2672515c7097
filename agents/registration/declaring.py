"""Declare the queues of agents with the right arguments."""

import logging
from collections.abc import Mapping
from typing import Any

from django.conf import settings

from core import broker
from rabbit import arguments, deadline
from rabbit.amqp import NODE_DOWN
from rabbit.errors import BrokerError, BrokerUnavailable, InequivalentArguments, NodeDown, NotOnBroker, Refused
from rabbit.management import Management

logger = logging.getLogger(__name__)

DECLARE_SECONDS = 3.5
"""The timeout of a declaration, which leaves time to find the reason: the broker doesn't answer while the node of an
existing queue is down."""

REASON_SECONDS = 1.0


def declare_or_replace(vhost: str, name: str, wanted: Mapping[str, Any], management: Management) -> bool:
    """Declare a queue of the configured type, and return whether it is new.

    A queue with other arguments is replaced if it is empty and unused. Raises Refused if it can't be replaced, with the
    arguments, their values and the expected values; NotOnBroker if there is no such vhost; and NodeDown.
    """
    wanted = arguments.of_type(settings.GUARDIAN_REGISTERED_QUEUE_TYPE, wanted)
    try:
        with deadline.limit(deadline.seconds_left(DECLARE_SECONDS)):
            is_new = management.declare_queue(vhost, name, wanted)
        deadline.record_answer()  # for the limit around this one
        return is_new
    except InequivalentArguments as error:
        different = error
    except NotOnBroker as error:  # the vhost does not exist; RabbitMQ 3.10 also answers so for a node that is down
        _require_node(name, error)
        raise
    except BrokerUnavailable as error:
        if error.timed_out:
            _find_reason(vhost, name)
        raise
    try:
        with broker.session(vhost) as session:
            session.delete_queue(name, if_empty=True, if_unused=True)
    except Refused as error:
        raise _not_replaced(vhost, name, wanted, different, error, management) from error
    logger.info("Replacing the queue '%s' in '%s': it had other arguments and was empty and unused", name, vhost)
    return management.declare_queue(vhost, name, wanted)


def _find_reason(vhost: str, name: str) -> None:
    """Raise ``NodeDown``, if that is why the declaration of a queue got no answer."""
    try:
        with deadline.limit(REASON_SECONDS), broker.session(vhost) as session:
            session.declare_passively(name)
    except NotOnBroker as error:
        _require_node(name, error)
    except BrokerUnavailable as error:
        if error.timed_out:  # as on RabbitMQ 4.3
            text = (
                f"The queue '{name}' can't be declared, because it does not answer; its node may be down. Retry later."
            )
            raise NodeDown(text, timed_out=True) from error
    except BrokerError:
        return  # the caller raises the first error


def _require_node(name: str, error: NotOnBroker) -> None:
    if NODE_DOWN in str(error):
        text = f"The node of the queue '{name}' is down, so it can't be declared. Try again when the node runs."
        raise NodeDown(text, timed_out=True) from error


def _not_replaced(
    vhost: str, name: str, wanted: Any, different: InequivalentArguments, kept: Refused, management: Management
) -> Refused:
    try:
        found = management.queue(vhost, name)
    except BrokerError:
        found = {}
    declared = {"arguments": wanted, "durable": True, "auto_delete": False}
    differences = arguments.differences_from_row(declared, found) if found else []
    how = "; ".join(f"{one.argument} is {_shown(one.found)} and should be {_shown(one.wanted)}" for one in differences)
    reason = (
        f"the queue '{name}' exists with other arguments: {how or different.reason}. It was not replaced, because it "
        f"has messages or consumers ({kept.reason}); delete it on the broker, or stop its consumers, and try again"
    )
    return Refused(f"vhost '{vhost}': {reason}", status=different.status, reason=reason)


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
