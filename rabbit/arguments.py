"""The arguments of queues: those of the queues made here, and how what is wanted differs from what there is."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rabbit.names import DEAD_LETTER_QUEUE

QUEUE_TYPE = "x-queue-type"

REGISTERED_MAX_LENGTH = 10_000
"""The limit on messages of each queue registered by agents, dead-letter queues included."""
TTL_MILLISECONDS = 3_600_000
DEAD_LETTER_TTL_MILLISECONDS = 7 * 24 * 3_600_000

REGISTERED_QUEUE_ARGUMENTS: Mapping[str, Any] = {
    QUEUE_TYPE: "classic",  # whatever the vhost's default is
    "x-message-ttl": TTL_MILLISECONDS,
    "x-max-length": REGISTERED_MAX_LENGTH,
    "x-overflow": "reject-publish-dlx",
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": DEAD_LETTER_QUEUE,
}
"""What every subscription and consumer queue is declared with."""

DEAD_LETTER_QUEUE_ARGUMENTS: Mapping[str, Any] = {
    QUEUE_TYPE: "classic",
    "x-message-ttl": DEAD_LETTER_TTL_MILLISECONDS,
    "x-max-length": REGISTERED_MAX_LENGTH,
    "x-overflow": "drop-head",  # the newest tell most about what is wrong
}
"""What the dead-letter queue of an agents' vhost is declared with."""

_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for (?:queue|exchange) '.*' in vhost '.*': "
    r"received (?P<wanted>none|'.*'|the value '.*' of type '\w+') "
    r"but current is (?P<found>none|'.*'|the value '.*' of type '\w+')",
    re.DOTALL,
)
_TYPED = re.compile(r"the value '(?P<value>.*)' of type '(?P<type>\w+)'", re.DOTALL)


class Difference(NamedTuple):
    """One argument that isn't as wanted: what it is on the broker, and what it should be. None: not set."""

    argument: str
    found: Any
    wanted: Any


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """Return where the wanted arguments and those that the broker lists differ, in the order of their names.

    ``x-queue-type: classic`` is what a queue is anyway: saying so is equal to not saying it.
    """
    wanted, found = _said(wanted), _said(found)
    pairs = [(name, found.get(name), wanted.get(name)) for name in sorted({*wanted, *found})]
    return [Difference(*pair) for pair in pairs if not _equal(pair[1], pair[2])]


def parse_inequivalent(reason: str) -> Difference | None:
    """Read the broker's reason for refusing to declare something that exists; None where it is another reason.

    Numbers and booleans come back as such where the broker names their type, which it does only when one of the two
    values isn't there. Everything else comes back as the text that it gave: ``durable`` is "true" or "false".
    """
    match = _INEQUIVALENT.search(reason)
    if match is None:
        return None
    return Difference(match["argument"], found=_value(match["found"]), wanted=_value(match["wanted"]))


def _said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in arguments.items()
        if value is not None and not (name == QUEUE_TYPE and value == "classic")
    }


def _equal(found: Any, wanted: Any) -> bool:
    # To Python True is 1 and 1.0; to the broker these are values of three types.
    return type(found) is type(wanted) and bool(found == wanted)


def _value(text: str) -> str | int | bool | None:
    if text == "none":
        return None
    typed = _TYPED.fullmatch(text)
    if typed is None:
        return text[1:-1]
    value = typed["value"]
    if typed["type"] == "bool":
        return value == "true"
    if re.fullmatch(r"-?[0-9]+", value) and typed["type"] != "longstr":
        return int(value)
    return value
