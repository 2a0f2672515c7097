"""Messages with several notifications: what one pass has to say to one recipient about many subjects."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.urls import reverse

from core.formatting import counted
from core.links import absolute_url
from notifications import kinds
from notifications.content import (
    Content,
    Link,
    Row,
    Table,
    Why,
    as_of,
    is_to_operator,
    subject_url,
    why_added,
    why_owner,
)
from notifications.models import Notification
from rabbit.names import readable

MAX_SEPARATE = 3
"""Up to this many notifications of a group are sent as messages of their own."""

MAX_LINES = 200
"""The lines of a table. Some mail programs cut off mails of more than 100 kB."""

MAX_BRIEF_LINES = 2
"""The lines of a table in a channel, before the one with the link."""

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
    is_critical: bool
    is_growing: bool
    is_blocked: bool

    @property
    def rank(self) -> tuple[bool, bool, int, str]:
        """The place in the table: deletions first, then last calls, then the longest queues."""
        return not self.is_final, not self.is_critical, -(self.length or 0), self.queue


def deliveries(claimed: Sequence[Notification]) -> list[Delivery]:
    groups: dict[object, list[Notification]] = {}
    for one in claimed:
        key = one.id if one.group is None else (one.group, one.recipient, one.channel)
        groups.setdefault(key, []).append(one)
    messages: list[Delivery] = []
    for group in groups.values():
        messages += [group] if len(group) > MAX_SEPARATE else [[one] for one in group]
    return messages


def content(notifications: Delivery) -> Content:
    first = notifications[0]
    lines = _lines(notifications)
    pulse_users = sorted({one.facts["account"] for one in notifications if one.facts.get("account")})
    to_operator = all(map(is_to_operator, notifications))
    vhosts = {one.vhost for one in lines}
    counts = ", ".join(f"{number:,} {what}" for what, number in Counter(one.counted_as for one in lines).items())
    where = f" in the virtual host {lines[0].vhost}" if len(vhosts) == 1 else ""

    def row(one: Line) -> Row:
        vhost = f" in {one.vhost}" if len(vhosts) > 1 else ""
        owners = f" ({one.owners or 'no owner'})" if to_operator else ""
        length = "unknown" if one.length is None else f"{one.length:,}"
        return Row(f"{one.queue}{vhost}{owners}", (one.happened, length, one.limit), one.url)

    table = Table(
        [row(one) for one in lines[:MAX_LINES]],
        heads=("What happened", "Messages", "Deletion limit"),
        name_head="Queue",
        more=max(0, len(lines) - MAX_LINES),
    )
    return Content(
        subject=f"{len(lines):,} queues: {counts}",
        happened=f"{len(lines):,} of {'the' if to_operator else 'your'} queues{where}: {counts}.",
        next=_next(lines),
        advice=ADVICE if any(one.is_growing or one.is_final for one in lines) else "",
        action=None if pulse_users else Link("Open the queues", absolute_url(reverse("queues"))),
        facts=[as_of(first)],
        tables=[table],
        why=_why(first, pulse_users),
    )


ADVICE = (
    "Start the consumers of these queues, or make sure that they keep up. Delete the queues that nobody needs any more."
)


def _next(lines: Sequence[Line]) -> str:
    sentences = []
    if any(one.is_growing for one in lines):
        sentences.append("Guardian deletes a queue that grows past its deletion limit.")
    if any(one.is_blocked for one in lines):
        sentences.append("The deletion of queues marked as blocked waits for an operator's decision.")
    if any(one.is_final for one in lines):
        sentences.append("A consumer that declares a deleted queue again gets an empty one.")
    return " ".join(sentences) or "Nothing. Guardian keeps watching these queues."


def _why(notification: Notification, pulse_users: Sequence[str]) -> Why | None:
    if pulse_users:
        return why_added(notification, pulse_users)
    if is_to_operator(notification):
        return None
    return why_owner("You get this because these queues belong to you.")


def brief_text(notifications: Delivery) -> str:
    """Return the first lines of a table and a link, for a channel."""
    lines = _lines(notifications)
    text = []
    for one in lines[:MAX_BRIEF_LINES]:
        length = "" if one.length is None or one.is_final else f", {counted(one.length, 'message')}"
        text.append(f"{one.queue}: {one.happened}{length}")
    return "\n".join([*text, f"… and {len(lines) - MAX_BRIEF_LINES:,} more: {absolute_url(reverse('queues'))}"])


def _lines(notifications: Delivery) -> list[Line]:
    return sorted(map(_line, notifications), key=lambda one: one.rank)


def _line(notification: Notification) -> Line:
    facts = notification.facts
    kind = kinds.get(notification.kind)
    brief = kind.brief(facts)
    limit = _limit(facts)
    return Line(
        queue=readable(facts["queue"]),
        vhost=readable(facts["vhost"]),
        happened=brief.text,
        counted_as=brief.counted_as,
        length=facts.get("length"),
        limit=limit,
        owners=", ".join(facts.get("owners", [])),
        url=subject_url(notification),
        is_final=kind.is_final,
        is_critical=kind.is_critical,
        is_growing=facts.get("state") == "warned" and limit.replace(",", "").isdigit(),
        is_blocked=bool(facts.get("blocked")),
    )


def _limit(facts: Mapping[str, Any]) -> str:
    broker_limit, blocked = facts.get("broker_limit"), facts.get("blocked")
    if broker_limit and broker_limit["messages"] is not None and not blocked:
        return f"{broker_limit['messages']:,} by the broker"
    if facts.get("spared"):
        return "none"
    limit = facts.get("max")
    if limit is None:
        return ""
    return f"{limit:,}, blocked" if blocked else f"{limit:,}"
