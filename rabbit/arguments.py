"""The arguments that Guardian declares queues with, and their differences from a queue that exists."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rabbit.names import DEAD_LETTER_QUEUE

QUEUE_TYPE = "x-queue-type"
SINGLE_ACTIVE_CONSUMER = "x-single-active-consumer"

REGISTERED_MAX_LENGTH = 10_000
"""Messages in each queue that agents register, and in each dead-letter queue."""
TTL_MILLISECONDS = 3_600_000
DEAD_LETTER_TTL_MILLISECONDS = 7 * 24 * 3_600_000

CLASSIC, QUORUM = "classic", "quorum"

REGISTERED_QUEUE_ARGUMENTS: Mapping[str, Any] = {
    QUEUE_TYPE: "classic",  # the vhost's default may be another type
    "x-message-ttl": TTL_MILLISECONDS,
    "x-max-length": REGISTERED_MAX_LENGTH,
    "x-overflow": "reject-publish-dlx",
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": DEAD_LETTER_QUEUE,
}

DEAD_LETTER_QUEUE_ARGUMENTS: Mapping[str, Any] = {
    QUEUE_TYPE: "classic",
    "x-message-ttl": DEAD_LETTER_TTL_MILLISECONDS,
    "x-max-length": REGISTERED_MAX_LENGTH,
    "x-overflow": "drop-head",  # the newest messages are the most useful for finding the cause
}


def passes_others_over(row: Mapping[str, Any], consumers: int | None) -> bool:
    """Return whether a listed queue with this many consumers gives its messages to its active consumer alone.

    A classic queue with a single active consumer gives them to basic.get, too.
    """
    arguments = row.get("arguments")
    is_single = isinstance(arguments, Mapping) and arguments.get(SINGLE_ACTIVE_CONSUMER)
    return bool(row.get("type") == QUORUM and is_single and consumers)


def of_type(queue_type: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a registered or dead-letter queue, for queues of another type.

    A quorum queue may not reject a message and dead-letter it too: when it is full, it only rejects.
    """
    changed = {**arguments, QUEUE_TYPE: queue_type}
    if queue_type == QUORUM and changed["x-overflow"] == "reject-publish-dlx":
        changed["x-overflow"] = "reject-publish"
    return changed


class Difference(NamedTuple):
    """An argument with another value on the broker (``found``) than wanted. None: it is not set."""

    argument: str
    found: Any
    wanted: Any


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between the wanted arguments and those that the broker lists, sorted by name.

    ``x-queue-type: classic`` equals a missing type, because classic is the default.
    """
    wanted, found = _without_defaults(wanted), _without_defaults(found)
    pairs = [(name, found.get(name), wanted.get(name)) for name in sorted({*wanted, *found})]
    return [Difference(*pair) for pair in pairs if not _equal(pair[1], pair[2])]


def differences_from_row(declared: Mapping[str, Any], row: Mapping[str, Any]) -> list[Difference]:
    """Return how a listed queue differs from what is declared: its ``arguments``, ``durable`` and ``auto_delete``."""
    found = row.get("arguments")
    return [
        *differences(declared["arguments"], found if isinstance(found, dict) else {}),
        *(
            Difference(field, found=row[field], wanted=declared[field])
            for field in ("durable", "auto_delete")
            if row.get(field, declared[field]) != declared[field]
        ),
    ]


def _without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in arguments.items()
        if value is not None and not (name == QUEUE_TYPE and value == "classic")
    }


def _equal(found: Any, wanted: Any) -> bool:
    # In Python True == 1 == 1.0; to the broker these are values of three types.
    return type(found) is type(wanted) and bool(found == wanted)
