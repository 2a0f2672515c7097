"""What an account may do on the broker: three regexes over the names of queues and exchanges."""

import re
from typing import NamedTuple

from rabbit.names import exchange_prefix, queue_prefix


class Permissions(NamedTuple):
    """One account's permissions on one vhost. The broker searches: a pattern without ``^`` matches anywhere."""

    configure: str
    write: str
    read: str


NOTHING = Permissions("^$", "^$", "^$")
"""May connect, and touch nothing."""

EVERYTHING = Permissions(".*", ".*", ".*")


def for_pulse_user(name: str) -> Permissions:
    """Return what a Pulse user may do: everything under its own names, and read from everybody's exchanges."""
    queues = re.escape(queue_prefix(name))  # escapes '.' and '-' with a backslash, as the broker's PCRE reads them
    exchanges = re.escape(exchange_prefix(name))
    own = f"^({queues}.*|{exchanges}.*)"
    return Permissions(configure=own, write=own, read=f"^({queues}.*|exchange/.*)")


def allows(pattern: str, name: str) -> bool:
    """Tell whether the broker would let this pattern reach that name. The exchange without a name is ``amq.default``.

    It searches over bytes, as the broker does, and the empty pattern allows nothing.
    """
    return re.search((pattern or "^$").encode(), name.encode()) is not None
