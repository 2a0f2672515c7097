"""What a notification says. Mails and channels render it, so that text and HTML have the same parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from django.urls import reverse

from core.links import absolute_url
from core.time_zones import zone_of
from rabbit.names import readable

if TYPE_CHECKING:
    from notifications.models import Notification

MAX_NAME_IN_SUBJECT = 80


class Link(NamedTuple):
    text: str
    url: str


class Fact(NamedTuple):
    """A row of a table of facts. The value may have several lines."""

    label: str
    value: str


class Row(NamedTuple):
    name: str
    cells: tuple[str, ...] = ()
    url: str = ""


@dataclass(frozen=True)
class Table:
    """A table about several subjects. ``heads`` are those of the cells. ``more`` counts the rows that are left out."""

    rows: Sequence[Row]
    title: str = ""
    heads: tuple[str, ...] = ()
    name_head: str = ""
    more: int = 0


class Why(NamedTuple):
    text: str
    link: Link | None = None


@dataclass(frozen=True)
class Content:
    """The parts of a message, in their order.

    ``advice`` is what the recipient can do, ``action`` the button for it. ``help`` leads to the section of the
    documents about it. Without ``why``, the recipient owns the queue or operates this installation.
    """

    subject: str
    happened: str
    next: str
    advice: str = ""
    commands: Sequence[str] = ()
    action: Link | None = None
    help: Link | None = None
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    why: Why | None = None


def name_in_subject(name: str) -> str:
    """Return a name of the broker for a subject, shortened."""
    name = readable(name)
    return name if len(name) <= MAX_NAME_IN_SUBJECT else f"{name[: MAX_NAME_IN_SUBJECT - 1]}…"


def as_of(notification: "Notification") -> Fact:
    """Return the time of the facts. The message may be read hours later."""
    return Fact("As of", local_time(notification, notification.created))


def local_time(notification: "Notification", at: datetime) -> str:
    zone = zone_of(notification.facts.get("time_zone", "UTC"))
    return f"{at.astimezone(zone):%Y-%m-%d %H:%M %Z}"


def subject_url(notification: "Notification") -> str:
    """Return the address of the subject's page. An added address has no access to it."""
    if notification.subject is None or "account" in notification.facts:
        return ""
    return absolute_url(notification.subject.path)


def operators_help(section: str) -> Link:
    return Link("Help with this alarm", f"{absolute_url(reverse('help_document', args=['operators']))}#{section}")


def is_to_operator(notification: "Notification") -> bool:
    """Return whether the recipient gets this as an operator only."""
    return notification.recipient not in notification.facts.get("owners", []) and "account" not in notification.facts


def why_added(notification: "Notification", pulse_users: Sequence[str]) -> Why:
    facts = notification.facts
    ask = f"its owners: {', '.join(facts['owners'])}" if facts.get("owners") else "an operator"
    return Why(
        f"You get this because {facts.get('added_by') or 'an owner'} added your address to the "
        f"Pulse user{'' if len(pulse_users) == 1 else 's'} {', '.join(pulse_users)}. To be removed, ask {ask}."
    )


def why_owner(text: str) -> Why:
    return Why(text, Link("Change when and where you are notified", absolute_url(reverse("settings"))))


def why(notification: "Notification") -> Why:
    facts = notification.facts
    if facts.get("account"):
        return why_added(notification, [facts["account"]])
    if is_to_operator(notification):
        return Why("You get this as an operator of this installation.")
    queue = "belongs to your agents" if facts.get("agents") else "belongs to your Pulse user"
    return why_owner(f"You get this because the queue {queue}.")
