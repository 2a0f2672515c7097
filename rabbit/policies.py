"""The limits of a queue's length that the broker itself applies: arguments, policy and operator policy."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rabbit.arguments import QUORUM

DROP_HEAD = "drop-head"
"""The broker's default for a full queue: it drops the oldest messages. Every other value rejects new ones."""

MAX_LENGTH, MAX_BYTES, OVERFLOW = "max-length", "max-length-bytes", "overflow"

EXCHANGE = "exchange"

TYPES = {
    "classic": ("all", "queues", "classic_queues"),
    "quorum": ("all", "queues", "quorum_queues"),
    "stream": ("all", "queues", "streams"),
    EXCHANGE: ("all", "exchanges"),
}
"""The values of ``apply_to`` with which a policy applies to a queue, by the queue's type, or to an exchange."""


class BrokerPolicy(NamedTuple):
    """A policy or operator policy of a vhost. ``pattern`` is a regular expression, searched in a queue's name."""

    pattern: str
    apply_to: str
    priority: int
    definition: Mapping[str, Any]

    def applies_to(self, name: str, type_: str) -> bool:
        """Return whether this policy matches a queue. Erlang's expressions are read as Python's."""
        try:
            # The broker compares bytes.
            matches = re.search(self.pattern.encode(), name.encode()) is not None
        except re.error:
            return False
        return matches and self.apply_to in TYPES.get(type_, ("all", "queues"))


class LengthLimit(NamedTuple):
    """The broker's limits of a queue: messages, and bytes of their bodies. None is no limit."""

    messages: int | None
    size: int | None
    drops_oldest: bool

    def keeps_within(self, length: int) -> bool:
        """Return whether a queue with this limit never has more ready messages than this."""
        return self.messages is not None and self.messages < length


def limit_of(
    row: Mapping[str, Any], policies: Iterable[BrokerPolicy], operator_policies: Iterable[BrokerPolicy]
) -> LengthLimit | None:
    """Return the limits of a listed queue, given its ``name``, ``type`` and ``arguments``, and its vhost's policies."""
    arguments = row.get("arguments")
    return length_limit(
        arguments if isinstance(arguments, dict) else {},
        *(effective(of, row["name"], str(row.get("type"))) for of in (policies, operator_policies)),
    )


DELIVERY_LIMIT = "delivery-limit"
DEFAULT_DELIVERY_LIMIT = 20
"""RabbitMQ applies this limit from 4.0 on. Earlier versions have none, but a message may outlive an upgrade."""


def delivery_limit(
    row: Mapping[str, Any], policies: Iterable[BrokerPolicy], operator_policies: Iterable[BrokerPolicy]
) -> int | None:
    """Return how often messages may be returned to a listed quorum queue, or None for no limit. See ``limit_of``."""
    arguments = row.get("arguments")
    numbers = [
        arguments.get(f"x-{DELIVERY_LIMIT}") if isinstance(arguments, dict) else None,
        *(effective(of, row["name"], QUORUM).get(DELIVERY_LIMIT) for of in (policies, operator_policies)),
    ]
    limits = [number for number in numbers if type(number) is int]
    if not limits:
        return DEFAULT_DELIVERY_LIMIT
    return min((limit for limit in limits if limit >= 0), default=None)


def effective(policies: Iterable[BrokerPolicy], name: str, type_: str) -> Mapping[str, Any]:
    """Return the definition of the policy that applies to a queue or an ``EXCHANGE``.

    It is the matching one with the highest priority.
    """
    matching = [policy for policy in policies if policy.applies_to(name, type_)]
    return max(matching, key=lambda policy: policy.priority).definition if matching else {}


def length_limit(
    arguments: Mapping[str, Any], policy: Mapping[str, Any], operator_policy: Mapping[str, Any]
) -> LengthLimit | None:
    """Return the limits that apply to a queue, or None if the broker does not limit it.

    The lowest number applies, wherever it is set. For the overflow behaviour an argument precedes a policy.
    """

    def lowest(key: str) -> int | None:
        numbers = [arguments.get(f"x-{key}"), policy.get(key), operator_policy.get(key)]
        return min((number for number in numbers if type(number) is int), default=None)

    messages, size = lowest(MAX_LENGTH), lowest(MAX_BYTES)
    if messages is None and size is None:
        return None
    overflow = arguments.get(f"x-{OVERFLOW}") or operator_policy.get(OVERFLOW) or policy.get(OVERFLOW) or DROP_HEAD
    return LengthLimit(messages, size, overflow == DROP_HEAD)
