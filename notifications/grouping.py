"""Messages with several notifications: what one pass has to say to one recipient about many subjects."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from notifications import kinds
from notifications.models import Notification

MAX_SEPARATE = 3
"""Up to this many notifications of a group are sent as messages of their own."""

MAX_LINES = 200
"""The lines of a table. Some mail programs cut off mails of more than 100 kB."""

MAX_BRIEF_LINES = 10
"""The lines of a table in a channel."""

Delivery = Sequence[Notification]
"""The notifications of one message, at least one. They have the same recipient, channel, and claim."""


class Line(NamedTuple):
    """One line of a table. ``length`` counts messages; ``limit`` is the deletion limit in words."""

    queue: str
    vhost: str
    happened: str
    counted_as: str
    length: int | None
    limit: str
    owners: str
    url: str
    is_final: bool
    is_growing: bool
    is_blocked: bool

    @property
    def rank(self) -> tuple[bool, int, str]:
        """The place in the table: deletions first, then the longest queues."""
        return not self.is_final, -(self.length or 0), self.queue


def deliveries(claimed: Sequence[Notification]) -> list[Delivery]:
    """Return the messages that deliver these notifications."""
    groups: dict[object, list[Notification]] = {}
    for one in claimed:
        key = one.id if one.group is None else (one.group, one.recipient, one.channel)
        groups.setdefault(key, []).append(one)
    messages: list[Delivery] = []
    for group in groups.values():
        messages += [group] if len(group) > MAX_SEPARATE else [[one] for one in group]
    return messages


def line(notification: Notification, context: Mapping[str, Any]) -> Line:
    """Return the line of a notification, from the context of its own mail."""
    kind = kinds.get(notification.kind)
    brief = kind.brief(notification.facts)
    limit = _limit(context)
    return Line(
        queue=context["queue"],
        vhost=context["vhost"],
        happened=brief.text,
        counted_as=brief.counted_as,
        length=context.get("length"),
        limit=limit,
        owners=", ".join(context.get("owners", [])),
        url=context["url"],
        is_final=kind.is_final,
        is_growing=context.get("state") == "warned" and limit.replace(",", "").isdigit(),
        is_blocked=bool(context["blocked"]),
    )


def _limit(context: Mapping[str, Any]) -> str:
    broker_limit = context["broker_limit"]
    if broker_limit and broker_limit["messages"] is not None and not context["blocked"]:
        return f"{broker_limit['messages']:,} by the broker"
    if context.get("spared"):
        return "none"
    limit = context.get("max")
    if limit is None:
        return ""
    return f"{limit:,}, blocked" if context["blocked"] else f"{limit:,}"


def table(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the context of a message with these lines."""
    lines = sorted(lines, key=lambda one: one.rank)
    vhosts = {one.vhost for one in lines}
    return {
        "number": len(lines),
        "counts": [f"{number:,} {what}" for what, number in Counter(one.counted_as for one in lines).items()],
        "only_vhost": next(iter(vhosts)) if len(vhosts) == 1 else "",
        "deleted": any(one.is_final for one in lines),
        "growing": any(one.is_growing for one in lines),
        "blocked": any(one.is_blocked for one in lines),
        "lines": lines[:MAX_LINES],
        "more": max(0, len(lines) - MAX_LINES),
        "first_lines": lines[:MAX_BRIEF_LINES],
        "more_than_first": max(0, len(lines) - MAX_BRIEF_LINES),
        "width": max(len(one.happened) for one in lines),
        "limit_width": max(len("Deletion limit"), *(len(one.limit) for one in lines)),
    }
