"""Whose a queue or an exchange is, read from its name alone.

A Pulse user NAME owns the queues ``queue/NAME/…`` and the exchanges ``exchange/NAME/…``. What agents register lies in
vhosts of its own: ``subscription_…`` and ``consumer_…``, with a ``guardian.dlq`` in each vhost.
"""

import re
import unicodedata
from enum import Enum

QueueName = tuple[str, str]
"""A vhost and the name of a queue in it."""

MOST_BYTES = 100
"""How long the name of a Pulse user may be. All its characters are ASCII, so these are characters too."""

_UUID = re.compile(r"[0-9a-f]{32}")
_USER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
_OTHER_THAN_NAME = re.compile(r"[^A-Za-z0-9._-]")
_AGENTS_QUEUE = re.compile(r"(subscription|consumer)_")

DEAD_LETTER_QUEUE = "guardian.dlq"
"""The queue in each agents' vhost that takes what another there can't hold, or held for too long."""

_QUEUE_OF = re.compile(rf"queue/({_USER_NAME.pattern})/")
_EXCHANGE_OF = re.compile(rf"exchange/({_USER_NAME.pattern})/")


class InvalidUserName(ValueError):
    """This can't be the name of a Pulse user. The text says why, in a sentence for the person who typed it."""


class NameKind(Enum):
    """What a queue's or an exchange's name says about it."""

    OWNED = "owned"
    """It follows the pattern, and belongs to the Pulse user in its name."""
    MISNAMED = "misnamed"
    """A queue named like an exchange, or an exchange named like a queue."""
    UNPATTERNED = "unpatterned"
    """It follows no pattern at all."""
    SYSTEM = "system"
    """The broker's own: ``amq.…``, and the exchange without a name."""


def check_user_name(name: str) -> None:
    """Make sure that this can be the name of a Pulse user. It is taken as it stands: never trimmed, never folded.

    Raises:
        InvalidUserName: it can't be.
    """
    if _USER_NAME.fullmatch(name):
        return
    if not name:
        raise InvalidUserName("The name is empty.")
    stranger = _OTHER_THAN_NAME.search(name)
    if stranger is not None:
        # !a shows what would otherwise not be seen: a newline, a space of no width, a letter of another alphabet.
        raise InvalidUserName(
            f"The name has the character {stranger.group()!a} in it; "
            "only the letters a to z and A to Z, digits, '.', '_' and '-' can be used."
        )
    if len(name) > MOST_BYTES:
        raise InvalidUserName(f"The name is {len(name)} characters long; {MOST_BYTES} are allowed.")
    raise InvalidUserName(f"The name starts with '{name[0]}'; it must start with a letter.")


def queue_prefix(user: str) -> str:
    """Return what the names of this Pulse user's queues start with."""
    return f"queue/{user}/"


def exchange_prefix(user: str) -> str:
    """Return what the names of this Pulse user's exchanges start with."""
    return f"exchange/{user}/"


def user_of_queue(name: str) -> str | None:
    """Return the Pulse user whose queue this is by its name, whether such a user exists or not; None: nobody's."""
    match = _QUEUE_OF.match(name)
    return match[1] if match is not None else None


def user_of_exchange(name: str) -> str | None:
    """Return the Pulse user whose exchange this is by its name, whether such a user exists or not; None: nobody's."""
    match = _EXCHANGE_OF.match(name)
    return match[1] if match is not None else None


def kind_of_queue(name: str) -> NameKind:
    """Return what a queue's name says about it."""
    return _kind(name, own=_QUEUE_OF, others=_EXCHANGE_OF)


def kind_of_exchange(name: str) -> NameKind:
    """Return what an exchange's name says about it."""
    if not name:
        return NameKind.SYSTEM
    return _kind(name, own=_EXCHANGE_OF, others=_QUEUE_OF)


def subscription_queue(subscription: str, offering: str, object_type: str) -> str:
    """Return the name of the queue of a subscription for an offering and a type; the first two are UUIDs in hex."""
    return f"subscription_{subscription}_offering_{offering}_{object_type}"


def is_agents_login(user: str) -> bool:
    """Return whether an account is named as the login of an agent is: by a UUID in hex."""
    return _UUID.fullmatch(user) is not None


def consumer_queue(consumer: str) -> str:
    """Return the name of the one queue of a consumer, which is given by its UUID in hex."""
    return f"consumer_{consumer}"


def is_agents_queue(name: str) -> bool:
    """Return whether a queue in an agents' vhost has a name that only a registration gives."""
    return _AGENTS_QUEUE.match(name) is not None


def readable(name: str) -> str:
    """Return a name of the broker's as it can be shown anywhere: what has no shape of its own is written as an escape.

    A queue's name may hold any character, such as ones that reverse the direction of the text behind them.
    """
    return "".join(
        character if unicodedata.category(character)[0] not in "CZ" or character == " " else _escape(character)
        for character in name
    )


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _kind(name: str, *, own: re.Pattern[str], others: re.Pattern[str]) -> NameKind:
    if name.startswith("amq."):
        return NameKind.SYSTEM
    if own.match(name):
        return NameKind.OWNED
    if others.match(name):
        return NameKind.MISNAMED
    return NameKind.UNPATTERNED
