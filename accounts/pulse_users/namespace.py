"""What the broker has under a Pulse user's name: ``queue/NAME/…`` and ``exchange/NAME/…`` in the Pulse vhost.

The owners of a Pulse user can read and delete all of it. So a name that is in use there is refused, unless an operator
adopts what there is.
"""

from collections.abc import Collection
from typing import NamedTuple

from django.conf import settings

from rabbit import names, snapshot
from rabbit.errors import BrokerUnavailable, NotOnBroker
from rabbit.management import Management


class Belongings(NamedTuple):
    """Names of queues and exchanges."""

    queues: list[str]
    exchanges: list[str]


NOTHING = Belongings([], [])


def belongings_of(management: Management, username: str) -> Belongings:
    """Return a Pulse user's queues and exchanges, which are removed with it."""
    queues, exchanges = _list(management)
    return Belongings(
        sorted(name for name in queues if names.user_of_queue(name) == username),
        sorted(name for name in exchanges if names.user_of_exchange(name) == username),
    )


def queues_of(management: Management, usernames: Collection[str]) -> list[str]:
    """Return the names of the queues of these Pulse users."""
    return sorted(name for name in _list(management).queues if names.user_of_queue(name) in usernames)


def used_names(management: Management, username: str) -> Belongings:
    """Return all queues and exchanges that a Pulse user of this name could change: its own, and misnamed ones.

    Raises BrokerError also if the broker's lists may lack queues.
    """
    vhost = settings.GUARDIAN_PULSE_VHOST
    running, _ = snapshot.members(management)
    if vhost in snapshot.stopped_vhosts(management, running):
        raise BrokerUnavailable(f"the vhost '{vhost}' doesn't run on every node, so lists may lack queues")
    prefixes = names.queue_prefix(username), names.exchange_prefix(username)
    queues, exchanges = _list(management)
    return Belongings(
        sorted(name for name in queues if name.startswith(prefixes)),
        sorted(name for name in exchanges if name.startswith(prefixes)),
    )


def _list(management: Management) -> Belongings:
    vhost = settings.GUARDIAN_PULSE_VHOST
    try:
        queues = management.list_queues(vhost, {"disable_stats": "true", "columns": "name,vhost"})
        exchanges = management.exchanges(vhost)
    except NotOnBroker as error:
        if vhost in {there.name for there in management.vhosts()}:
            raise BrokerUnavailable(
                f"the vhost '{vhost}' exists and can't be listed; try again later: {error}"
            ) from error
        return NOTHING
    return Belongings([row["name"] for row in queues], [exchange.name for exchange in exchanges])
