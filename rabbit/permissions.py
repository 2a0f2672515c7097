"""Permissions of users on the broker: three regexes for the names of queues and exchanges."""

import re
from typing import NamedTuple

from rabbit.names import consumer_queue, exchange_prefix, queue_prefix


class Permissions(NamedTuple):
    """A user's permissions on one vhost. A pattern without ``^`` matches anywhere in a name."""

    configure: str
    write: str
    read: str


NO_ACCESS = Permissions("^$", "^$", "^$")
"""The user may connect to the vhost, and do nothing there."""

FULL_ACCESS = Permissions(".*", ".*", ".*")


_READ_OTHERWISE = re.compile(r"\[[:.=]|\\[Zv]|\{,")
"""What Python compiles, too, but reads in another way than the broker's PCRE: POSIX classes, and some escapes."""


def for_pulse_user(name: str) -> Permissions:
    """Return a Pulse user's permissions: everything under its own names, and read access to all users' exchanges."""
    queues = re.escape(queue_prefix(name))  # the broker's PCRE reads these escapes too
    exchanges = re.escape(exchange_prefix(name))
    own = f"^({queues}.*|{exchanges}.*)"
    return Permissions(configure=own, write=own, read=f"^({queues}.*|exchange/.*)")


def for_subscription(subscription: str) -> Permissions:
    """Return a subscription login's permissions: reading its own queues. ``subscription`` is its UUID in hex."""
    return Permissions("^$", "^$", f"^subscription_{subscription}_.*$")


def for_consumer(consumer: str) -> Permissions:
    """Return a consumer login's permissions: reading its own queue. ``consumer`` is its UUID in hex."""
    return Permissions("^$", "^$", f"^{consumer_queue(consumer)}$")


def allows(pattern: str, name: str) -> bool:
    """Return whether the broker matches a name with a pattern. The default exchange is ``amq.default``.

    Like the broker, search in bytes. An empty pattern allows nothing.

    Raises:
        re.error: only the broker's PCRE can read the pattern.
    """
    if _READ_OTHERWISE.search(pattern):
        raise re.error("Python reads this pattern in another way than RabbitMQ", pattern)
    # A header may name an exchange with a lone surrogate.
    return re.search((pattern or "^$").encode(), name.encode("utf-8", "surrogatepass")) is not None


def in_words(granted: Permissions, username: str) -> list[str]:
    """Return sentences for people that describe a user's permissions on a vhost."""
    standard = for_pulse_user(username)
    return [
        _sentence("create and delete", granted.configure, standard.configure, _own_names(username)),
        _sentence(
            "publish to and bind",
            granted.write,
            standard.write,
            f"exchanges whose names start with {exchange_prefix(username)}, and bind queues whose names start with "
            f"{queue_prefix(username)}. It can't publish to the default exchange",
        ),
        _sentence(
            "read from and bind to",
            granted.read,
            standard.read,
            f"queues whose names start with {queue_prefix(username)}, and all exchanges whose names start with "
            "exchange/",
        ),
    ]


def _own_names(username: str) -> str:
    return (
        f"queues whose names start with {queue_prefix(username)}, "
        f"and exchanges whose names start with {exchange_prefix(username)}"
    )


def _sentence(actions: str, pattern: str, standard: str, standard_names: str) -> str:
    if pattern in ("", NO_ACCESS.read):
        return f"It can't {actions.replace(' and ', ' or ')} anything."
    if pattern in (".*", "^.*$", "^.*", ".*$", "^"):
        return f"It can {actions} all queues and exchanges, of all owners."
    # People usually write the dash without a backslash.
    if pattern.replace(r"\-", "-") == standard.replace(r"\-", "-"):
        return f"It can {actions} {standard_names}."
    return f"It can {actions} all queues and exchanges whose names match the pattern {pattern}, of all owners."
