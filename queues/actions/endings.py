"""What became of a queue that is gone, in words for its page."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from queues.models import QueueEvent
from queues.rules.conditions import ENDINGS

WHY_REMOVED = {"unregistered": "because it had no registration", "vhost": "with its virtual host"}


class Ending(NamedTuple):
    """How a queue ended: who did what, when, and why. ``messages`` says what became of its messages.

    ``facts`` are those of Guardian's decision to delete it for its length or its name.
    """

    what: str
    at: datetime
    why: str
    messages: str
    facts: Mapping[str, Any] = {}


def ending(events: Iterable[QueueEvent]) -> Ending | None:
    """Return how the queue of these events, newest first, was deleted, or None if Guardian did not delete it."""
    last = next((event for event in events if event.kind in ENDINGS), None)
    if last is None or last.kind == QueueEvent.Kind.GONE:
        return None
    details = last.details
    if last.kind == QueueEvent.Kind.DELETED:
        length, limit = details.get("length"), details.get("max")
        if length is not None and limit is not None and length > limit:
            why = f", because it had {length:,} messages and its deletion limit was {limit:,}"
        else:
            why = ", because of its length or its name"
        return Ending("Guardian deleted this queue", last.at, why, _lost(details), details)
    if "with" in details:
        return Ending("Guardian deleted this queue", last.at, f", with the Pulse user {details['with']}", "")
    if "why" in details:
        return Ending("Guardian deleted this queue", last.at, f", {WHY_REMOVED[details['why']]}", "")
    if "command" in details:
        return Ending(f"The command {details['command']} deleted this queue", last.at, "", "")
    who = last.by.email if last.by else "A deleted owner"
    return Ending(f"{who} deleted this queue", last.at, "", "")


def bindings_at_deletion(events: Iterable[QueueEvent]) -> list[dict[str, str]]:
    """Return the bindings of the queue of these events, newest first, when Guardian deleted it last."""
    last = next((event for event in events if event.kind == QueueEvent.Kind.DELETED), None)
    return (last.details.get("bindings") or []) if last else []


def _lost(details: dict[str, object]) -> str:
    """Return why messages were not archived, as a sentence, or an empty text if they were or it is not known."""
    why = details.get("why_not_archived")
    return f"Messages were not archived, because {why}." if why else ""
