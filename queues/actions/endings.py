"""What happened to a queue, and what became of it, in words."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from queues.models import QueueEvent
from queues.rules.conditions import ENDINGS
from queues.rules.temporary_limits import LIMITS
from rabbit.names import readable

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


BY_PEOPLE = (
    QueueEvent.Kind.REMOVING,
    QueueEvent.Kind.REMOVED,
    QueueEvent.Kind.PURGED,
    QueueEvent.Kind.ADJUSTED,
    QueueEvent.Kind.RESTORED,
    QueueEvent.Kind.ASKED,
    QueueEvent.Kind.DECLINED,
    QueueEvent.Kind.ACKNOWLEDGED,
)
BY_GUARDIAN = (
    QueueEvent.Kind.DELETED,
    QueueEvent.Kind.KEPT,
    QueueEvent.Kind.SKIPPED,
    QueueEvent.Kind.LIMITS_ENDED,
    QueueEvent.Kind.LIMITS_KEPT,
)


def describe_event(event: QueueEvent) -> tuple[str, str, str]:
    """Return an event's kind, its details and its actor, in words. The actor is empty if nobody acted."""
    what = event.get_kind_display()
    who = event.by.email if event.by else "a deleted owner" if event.kind in BY_PEOPLE else ""
    if event.kind in BY_GUARDIAN:
        who = "Guardian"
    if event.kind == QueueEvent.Kind.DELETED:
        what = QueueEvent.Kind.REMOVED.label
    if "command" in event.details:
        who = f"the command {event.details['command']}"
    if "with" in event.details:
        return what, f"with the Pulse user {event.details['with']}", "Guardian"
    if event.kind in (QueueEvent.Kind.SKIPPED, QueueEvent.Kind.REJECTED):
        count = event.details.get("count", 1)
        return what, f"{count:,} event{'' if count == 1 else 's'}: {event.details.get('why', '')}", who
    if event.kind == QueueEvent.Kind.ASKED:
        until = _until(event.details)
        return what, f"{event.details['wanted']:,} messages{until}: {event.details['reason']}", who
    if event.kind == QueueEvent.Kind.DECLINED:
        return what, event.details["reason"], who
    if event.kind == QueueEvent.Kind.RESTORED:
        return what, f"to {readable(to)}" if (to := event.details["to"]) else "", who
    if "why" in event.details:
        return what, WHY_REMOVED[event.details["why"]], "Guardian"
    before, after = event.details.get("before", {}), event.details.get("after", {})
    changed = [name for name in LIMITS if before.get(name) != after.get(name)]
    limits = "; ".join(f"{LIMITS_IN_WORDS[name]}: {_limit(after.get(name))}" for name in changed)
    return what, f"{limits}{_until(after)}".strip(), who


def _until(details: Mapping[str, Any]) -> str:
    """Return the end of limits for a text, or an empty text if they have none."""
    at = details.get("limits_until")
    return f" until {datetime.fromisoformat(at):%Y-%m-%d %H:%M %Z}" if at else ""


LIMITS_IN_WORDS = {"unbounded": "unbounded", "warn_length": "warning threshold", "max_length": "deletion limit"}


def _limit(value: bool | int | None) -> str:
    if value is None:
        return "default"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:,}"
