"""Rules for names on the broker: who owns a queue or an exchange, by its name alone.

A Pulse user NAME owns the queues ``queue/NAME/…`` and the exchanges ``exchange/NAME/…``. Agents' queues are named
``subscription_…`` and ``consumer_…``. They are in vhosts of their own, each with one ``guardian.dlq``.
"""

import re
import unicodedata
from enum import Enum

QueueName = tuple[str, str]
"""A vhost and the name of a queue in it."""

MAX_NAME_BYTES = 255
"""The limit of AMQP for the name of a queue, an exchange or a vhost."""

MAX_USER_NAME_BYTES = 100
"""All characters of a Pulse user's name are ASCII, so this is its number of characters too."""

_UUID = re.compile(r"[0-9a-f]{32}")
_USER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")
_AGENTS_QUEUE = re.compile(r"(subscription|consumer)_")

DEAD_LETTER_QUEUE = "guardian.dlq"
"""The queue in each agents' vhost for messages that exceed another queue's length limit or TTL."""

PROBE_QUEUE = "guardian.doctor"
"""The beginning of the names of exclusive queues that Guardian declares to see that the broker allows it. Lists leave
them out: each exists for milliseconds."""

WATCH_QUEUE = "guardian.watch."
"""The beginning of the names of queues with copies of messages that a person watches. Lists leave them out: each
expires a minute after its last use. No Pulse user may declare or read them."""

FEDERATION_QUEUE = "federation: "
"""The beginning of the names of queues that federation declares for itself. No Pulse user may declare them."""

_OWNED_QUEUE = re.compile(rf"queue/({_USER_NAME.pattern})/")
_OWNED_EXCHANGE = re.compile(rf"exchange/({_USER_NAME.pattern})/")


INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters and marks that show nothing: Unicode's Default_Ignorable_Code_Point without those of category C, and the
empty Braille pattern."""


class InvalidUserName(ValueError):
    """A name is not valid for a Pulse user. The text tells the user why."""


class NameKind(Enum):
    """How a queue or an exchange is named."""

    OWNED = "owned"
    """It follows the pattern and belongs to the Pulse user in its name."""
    MISNAMED = "misnamed"
    """A queue named like an exchange, or an exchange named like a queue."""
    UNPATTERNED = "unpatterned"
    """It follows no pattern."""
    SYSTEM = "system"
    """It is the broker's own: ``amq.…``, or the default exchange."""


def check_user_name(name: str) -> None:
    """Raise InvalidUserName unless a name is valid for a Pulse user. Neither trim it nor fold its case."""
    if _USER_NAME.fullmatch(name):
        return
    if not name:
        raise InvalidUserName("The name is empty.")
    invalid = _INVALID_CHARACTER.search(name)
    if invalid is not None:
        # !a shows invisible and look-alike characters: newlines, zero-width spaces, letters of other alphabets.
        raise InvalidUserName(
            f"The name has the character {invalid.group()!a} in it; "
            "only the letters a to z and A to Z, digits, '.', '_' and '-' can be used."
        )
    if len(name) > MAX_USER_NAME_BYTES:
        raise InvalidUserName(f"The name is {len(name)} characters long; {MAX_USER_NAME_BYTES} are allowed.")
    raise InvalidUserName(f"The name starts with '{name[0]}'; it must start with a letter.")


def queue_prefix(user: str) -> str:
    return f"queue/{user}/"


def exchange_prefix(user: str) -> str:
    return f"exchange/{user}/"


def user_of_queue(name: str) -> str | None:
    """Return the Pulse user in a queue's name, whether that user exists or not, or None."""
    match = _OWNED_QUEUE.match(name)
    return match[1] if match is not None else None


def user_of_exchange(name: str) -> str | None:
    """Return the Pulse user in an exchange's name, whether that user exists or not, or None."""
    match = _OWNED_EXCHANGE.match(name)
    return match[1] if match is not None else None


def kind_of_queue(name: str) -> NameKind:
    return _kind(name, own=_OWNED_QUEUE, others=_OWNED_EXCHANGE)


def kind_of_exchange(name: str) -> NameKind:
    if not name:
        return NameKind.SYSTEM
    return _kind(name, own=_OWNED_EXCHANGE, others=_OWNED_QUEUE)


def subscription_queue(subscription: str, offering: str, object_type: str) -> str:
    """Return the name of a subscription's queue. The subscription and the offering are UUIDs in hex."""
    return f"subscription_{subscription}_offering_{offering}_{object_type}"


def is_agents_login(user: str) -> bool:
    """Return whether a user has the name of an agent's login: a UUID in hex."""
    return _UUID.fullmatch(user) is not None


def consumer_queue(consumer: str) -> str:
    return f"consumer_{consumer}"


def is_agents_queue(name: str) -> bool:
    return _AGENTS_QUEUE.match(name) is not None


def is_watch_queue(name: str) -> bool:
    return name.startswith(WATCH_QUEUE) and _UUID.fullmatch(name.removeprefix(WATCH_QUEUE)) is not None


def is_amqp_name(name: str) -> bool:
    """Return whether AMQP can carry a name: it is valid UTF-8 of at most 255 bytes."""
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate, which RabbitMQ 3.10 accepts in a queue's name
        return False


def readable(name: str) -> str:
    """Return a broker's name for display, with escapes for control, format, separator and invisible characters.

    Queue names may contain any character, such as one that reverses the direction of the text after it.
    """
    return "".join(
        found
        if found == " " or not (unicodedata.category(found)[0] in "CZ" or INVISIBLE.match(found))
        else _escape(found)
        for found in name
    )


def readable_text(text: str) -> str:
    """Return a text of several lines for display, like ``readable``. Line breaks and tabs stay."""
    return "".join(
        character if character in "\n\t" else readable(character) for character in text.replace("\r\n", "\n")
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
