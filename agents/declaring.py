"""Declare the queues of agents with the right arguments."""

import logging
from typing import Any

from core import broker
from rabbit import arguments
from rabbit.management import BrokerError, InequivalentArguments, Management, Refused

logger = logging.getLogger(__name__)


def declare_or_replace(vhost: str, name: str, wanted: Any, management: Management) -> bool:
    """Declare a queue, and return whether it is new. Replace a queue with other arguments if it is empty and unused.

    Raises:
        Refused: the queue can't be replaced; the text names the arguments, their values and the expected values.
        NotOnBroker: there is no such vhost.
    """
    try:
        return management.declare_queue(vhost, name, wanted)
    except InequivalentArguments as error:
        different = error
    try:
        with broker.session(vhost) as session:
            session.delete_queue(name, if_empty=True, if_unused=True)
    except Refused as error:
        raise _not_replaced(vhost, name, wanted, different, error, management) from error
    logger.info("Replacing the queue '%s' in '%s': it had other arguments and was empty and unused", name, vhost)
    return management.declare_queue(vhost, name, wanted)


def _not_replaced(
    vhost: str, name: str, wanted: Any, different: InequivalentArguments, kept: Refused, management: Management
) -> Refused:
    try:
        found = management.queue(vhost, name)
    except BrokerError:
        found = {}
    declared = {"arguments": wanted, "durable": True, "auto_delete": False}
    differences = arguments.differences_from_row(declared, found) if found else []
    if not differences and different.argument is not None:
        differences = [arguments.Difference(different.argument, different.found, different.wanted)]
    how = "; ".join(f"{one.argument} is {_shown(one.found)} and should be {_shown(one.wanted)}" for one in differences)
    reason = (
        f"the queue '{name}' exists with other arguments: {how or different.reason}. It was not replaced, because it "
        f"has messages or consumers ({kept.reason}); delete it on the broker, or stop its consumers, and try again"
    )
    return Refused(f"vhost '{vhost}': {reason}", status=different.status, reason=reason)


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
