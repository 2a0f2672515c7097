"""What an account may do on the broker: three regexes over the names of queues and exchanges."""

import re
from typing import NamedTuple

from rabbit.names import consumer_queue, exchange_prefix, queue_prefix


class Permissions(NamedTuple):
    """One account's permissions on one vhost. The broker searches: a pattern without ``^`` matches anywhere."""

    configure: str
    write: str
    read: str


NO_ACCESS = Permissions("^$", "^$", "^$")
"""May connect, and touch nothing."""

FULL_ACCESS = Permissions(".*", ".*", ".*")


def for_pulse_user(name: str) -> Permissions:
    """Return what a Pulse user may do: everything under its own names, and read from everybody's exchanges."""
    queues = re.escape(queue_prefix(name))  # escapes '.' and '-' with a backslash, as the broker's PCRE reads them
    exchanges = re.escape(exchange_prefix(name))
    own = f"^({queues}.*|{exchanges}.*)"
    return Permissions(configure=own, write=own, read=f"^({queues}.*|exchange/.*)")


def for_subscription(subscription: str) -> Permissions:
    """Return what the user of an event subscription may do: read its queues. It is given by its UUID in hex."""
    return Permissions("^$", "^$", f"^subscription_{subscription}_.*$")


def for_consumer(consumer: str) -> Permissions:
    """Return what the user of a consumer may do: read its one queue. It is given by its UUID in hex."""
    return Permissions("^$", "^$", f"^{consumer_queue(consumer)}$")


def allows(pattern: str, name: str) -> bool:
    """Tell whether the broker would let this pattern reach that name. The exchange without a name is ``amq.default``.

    It searches over bytes, as the broker does, and the empty pattern allows nothing.
    """
    return re.search((pattern or "^$").encode(), name.encode()) is not None


def in_words(granted: Permissions, username: str) -> list[str]:
    """Return what the account of this name may do with such permissions on a vhost, in sentences."""
    usual = for_pulse_user(username)
    return [
        _sentence("make and delete", granted.configure, usual.configure, _its_own(username)),
        _sentence("publish to, and bind,", granted.write, usual.write, _its_own(username)),
        _sentence(
            "read from, and bind its queues to,",
            granted.read,
            usual.read,
            f"queues whose names start with {queue_prefix(username)}, and all exchanges whose names start with "
            "exchange/, whoever they belong to",
        ),
    ]


def _its_own(username: str) -> str:
    return (
        f"queues whose names start with {queue_prefix(username)}, "
        f"and exchanges whose names start with {exchange_prefix(username)}"
    )


def _sentence(what: str, pattern: str, usual: str, usually: str) -> str:
    if pattern in ("", NO_ACCESS.read):
        return f"It may {what} nothing."
    if pattern in (".*", "^.*$", "^.*", ".*$", "^"):
        return f"It may {what} every queue and exchange, whoever they belong to."
    # By hand the dash, which means nothing special there, is mostly written without a backslash.
    if pattern.replace(r"\-", "-") == usual.replace(r"\-", "-"):
        return f"It may {what} {usually}."
    return f"It may {what} whatever has the pattern {pattern} in its name, whoever it belongs to."
