"""Parse and validate the parameters of requests to stored queues."""

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any, NamedTuple, TypeVar

from guardian_store import _ids as ids
from guardian_store._ids import MAX_REST, Place
from message_store.models import MAX_NAME_LENGTH
from rabbit.names import readable

MAX_PARTITIONS = 200
MAX_NUMBER = 10**9
"""Of a partition in reads and addresses, where partitions that the queue doesn't have are empty; and of queues to list,
where more than ``MAX_READ`` counts as that."""
MAX_IDS = 100
"""Message ids per URL. More don't fit into the first line of a request."""

REQUIRED = "Required"
GIVEN_TWICE = "Given twice"

_NUMBER = re.compile(r"-?[0-9]{1,100}")
_SECONDS = re.compile(r"-?[0-9]{1,100}(?:\.[0-9]{0,100})?")
_DECIMAL_DIGITS = 250  # enough for exact arithmetic with all that _SECONDS matches

T = TypeVar("T")


class Invalid(ValueError):
    """A request is invalid. ``errors`` has a text for each invalid field."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {text}" for field, text in errors.items()))
        self.errors = dict(errors)


class MessageRef(NamedTuple):
    """The address of a message in its queue."""

    partition: int
    id: uuid.UUID


# Parsing


def parse_number(value: Any, least: int, most: int) -> int:
    """Parse a number within these bounds, given as a number or text. Raises ValueError, which says what is wrong."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f'"{readable_text(value)}" is not a number')
    if value < least:
        raise ValueError(f"{readable_text(value)} is less than minimum value {least}")
    if value > most:
        raise ValueError(f"{readable_text(value)} is greater than maximum value {most}")
    return value


def parse_choice(value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f'"{readable_text(value)}" is not one of {", ".join(choices)}')
    return str(value)


def parse_partitions(text: str, least: int, most: int) -> list[int]:
    """Parse a list of partition numbers such as ``"1,2"``, dropping duplicates. Raises ValueError."""
    return list(dict.fromkeys(parse_number(part, least, most) for part in text.split(",", MAX_PARTITIONS)))


def parse_since(text: str, *, descending: bool = False) -> Place:
    """Return the place where reading begins, given as a message id or as a time in seconds since 1970.

    Times are exact. One between two ticks is rounded in the direction of reading. Raises ValueError for any other text.
    """
    text = text.strip()
    if len(text) == 32:
        try:
            return ids.place(ids.parse(text))
        except ValueError:
            pass  # a time may have 32 characters, too
    if not _SECONDS.fullmatch(text):
        raise ValueError(f'"{readable_text(text)}" is not a timestamp or a message id')
    with localcontext(prec=_DECIMAL_DIGITS):
        seconds = Decimal(text).scaleb(7)
        exact = int(seconds.to_integral_value(ROUND_FLOOR if descending else ROUND_CEILING))
    ticks = min(max(exact, ids.MIN_TICKS), ids.MAX_TICKS)
    return Place(ticks, MAX_REST if descending else 0)


def parse_id(text: Any) -> uuid.UUID:
    if isinstance(text, str):
        try:
            return ids.parse(text)
        except ValueError:
            pass
    raise ValueError(f'"{readable_text(text)}" is not a message id')


def parse_ids(text: str) -> list[MessageRef]:
    """Parse addresses of messages such as ``"1:hex,2:hex"``, or ``"hex"`` for partition 1, dropping duplicates.

    Partitions that the queue doesn't have are valid, but empty. Raises Invalid for ``message_id`` or ``partition``.
    """
    parts = text.split(",", MAX_IDS)
    if len(parts) > MAX_IDS:
        raise Invalid({"message_id": f"More than {MAX_IDS} message ids"})
    found = []
    for part in parts:
        partition, colon, message_id = part.strip().rpartition(":")
        errors: dict[str, str] = {}
        where = collect_error(errors, "partition", lambda: parse_number(partition, 0, MAX_NUMBER) if colon else 1)  # noqa: B023
        what = collect_error(errors, "message_id", lambda: parse_id(message_id))  # noqa: B023
        if where is None or what is None:
            raise Invalid(errors)
        found.append(MessageRef(where, what))
    return list(dict.fromkeys(found))


def collect_error(errors: dict[str, str], field: str, check: Callable[[], T]) -> T | None:
    """Return the result of ``check``. If it fails, add its error and return None."""
    try:
        return check()
    except ValueError as error:
        errors[field] = str(error)
        return None


def readable_text(value: Any) -> str:
    """Return the start of a value as printable text. Of a list or an object, which may be nested, return the type."""
    return type(value).__name__ if isinstance(value, list | dict) else readable(str(value)[:MAX_NAME_LENGTH])
