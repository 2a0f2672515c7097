"""Declaring the queues of agents with the right arguments."""

import logging
from typing import Any

from rabbit import arguments
from rabbit.management import BrokerError, InequivalentArguments, Management, NotOnBroker, Refused

logger = logging.getLogger(__name__)


def declare_or_replace(vhost: str, name: str, wanted: Any, management: Management) -> bool:
    """Make a queue; one that is there with other arguments is replaced where it is empty and nobody uses it.

    Raises:
        Refused: it can't be replaced; the text says which argument is what, and what it should be.
        NotOnBroker: no such vhost.
    """
    try:
        return management.declare_queue(vhost, name, wanted)
    except InequivalentArguments as error:
        different = error
    try:
        management.delete_queue(vhost, name, if_empty=True, if_unused=True)
    except NotOnBroker:
        logger.info("The queue '%s' in '%s' went by itself", name, vhost)
    except Refused as error:
        raise _not_replaced(vhost, name, wanted, different, error, management) from error
    else:
        logger.info("The queue '%s' in '%s' had other arguments, was empty and unused, and is made anew", name, vhost)
    return management.declare_queue(vhost, name, wanted)


def _not_replaced(
    vhost: str, name: str, wanted: Any, different: InequivalentArguments, kept: Refused, management: Management
) -> Refused:
    try:
        found = management.queue(vhost, name)
    except BrokerError:
        found = {}
    differences = arguments.differences(wanted, found.get("arguments") or {}) if found else []
    differences += [
        arguments.Difference(field, found[field], value)
        for field, value in (("durable", True), ("auto_delete", False))
        if found.get(field, value) != value
    ]
    if not differences and different.argument is not None:
        differences = [arguments.Difference(different.argument, different.found, different.wanted)]
    how = "; ".join(f"{one.argument} is {_shown(one.found)} and should be {_shown(one.wanted)}" for one in differences)
    reason = (
        f"the queue '{name}' is there with other arguments: {how or different.reason}. It is not replaced, since it "
        f"has messages or is used ({kept.reason}); delete it there, or stop what uses it, and ask again"
    )
    return Refused(f"vhost '{vhost}': {reason}", status=different.status, reason=reason)


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
