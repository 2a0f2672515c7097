"""Which streams keep all messages: those without a limit of age or size, by argument or by policy."""

from collections.abc import Collection
from typing import Any

from rabbit.errors import NotOnBroker
from rabbit.management import Management
from rabbit.names import QueueName

MAX_SINGLE_REQUESTS = 20
"""Up to this many streams are requested singly. A list costs the broker the statistics of all queues."""

RETENTION = ("max-age", "max-length-bytes")

COLUMNS = "name,vhost,arguments,effective_policy_definition"


def without_retention(management: Management, streams: Collection[QueueName]) -> list[QueueName]:
    """Return those of these streams that keep all messages."""
    if len(streams) <= MAX_SINGLE_REQUESTS:
        rows = [row for key in streams if (row := _row(management, key)) is not None]
    else:
        listed = management.list_queues(None, {"columns": COLUMNS})
        rows = [row for row in listed if (row["vhost"], row["name"]) in streams]
    return sorted((row["vhost"], row["name"]) for row in rows if _keeps_all(row))


def _row(management: Management, key: QueueName) -> dict[str, Any] | None:
    try:
        return management.queue(*key)
    except NotOnBroker:
        return None


def _keeps_all(row: dict[str, Any]) -> bool:
    """Return whether a stream has no limit. False for a new one: the broker reports its policy after some seconds."""
    arguments, policy = row.get("arguments"), row.get("effective_policy_definition")
    if not isinstance(arguments, dict) or policy is None:
        return False
    return not any(f"x-{name}" in arguments or name in policy for name in RETENTION)
