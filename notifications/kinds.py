"""The kinds of notification. The package that sends a kind registers it, with what its message says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from notifications.content import Content

if TYPE_CHECKING:
    from notifications.models import Notification


class Obsolete(Exception):
    """The subject no longer exists, or the request was handled in the meantime, so nothing is sent."""


class OfAnotherRelease(Exception):
    """Only processes of another release can send it, as during an upgrade."""


class Severity(StrEnum):
    """How bad the news is. One that is normal ends what an earlier notification of its topic began."""

    CRITICAL = "critical"
    WARNING = "warning"
    NORMAL = "normal"
    INFO = "info"


class Brief(NamedTuple):
    """What happened to a subject, in a few words, for a table, and in fewer, to count by: "deleted"."""

    text: str
    counted_as: str


@dataclass(frozen=True)
class Kind:
    """A kind of notification.

    - ``topic``: what it says about its subject. A later notification of this topic replaces an unsent one. A
      notification with a topic is not sent once its subject is gone, and may be sent in one message with others.
    - ``severity``: None is that of the queue's state in the facts. What is critical waits for no quiet hours, and
      owners choose it as they choose deletions.
    - ``is_final``: it replaces unsent notifications of all topics, and is itself never replaced.
    - ``needs_active_recipient``: it is about its recipient, and not sent to one who can no longer sign in.
    - ``content`` returns what the message says, and raises ``Obsolete``.
    - ``brief`` returns what the facts say, for a table. A kind with a topic needs it.
    """

    name: str
    text: str
    content: Callable[["Notification"], Content]
    topic: str = ""
    severity: Severity | None = Severity.INFO
    is_final: bool = False
    needs_active_recipient: bool = False
    brief: Callable[[Mapping[str, Any]], Brief] = lambda facts: Brief("", "")

    @property
    def is_critical(self) -> bool:
        """Whether something is lost, or will be soon."""
        return self.severity is Severity.CRITICAL

    def severity_of(self, facts: Mapping[str, Any]) -> Severity:
        return self.severity or (Severity.WARNING if facts.get("state") == "warned" else Severity.NORMAL)


_kinds: dict[str, Kind] = {}


def register(name: str, text: str, content: Callable[["Notification"], Content], **options: Any) -> str:
    """Register a kind with the fields of :class:`Kind`, and return its name."""
    _kinds[name] = Kind(name, text, content, **options)
    return name


def get(name: str) -> Kind:
    """Return the kind of this name. The content of one that is not registered raises ``OfAnotherRelease``."""
    return _kinds.get(name) or Kind(name, name, _unregistered)


def _unregistered(notification: "Notification") -> Content:
    raise OfAnotherRelease(f"This release has no notification '{notification.kind}'.")


def choices() -> list[tuple[str, str]]:
    return [(kind.name, kind.text) for kind in _kinds.values()]


def names() -> list[str]:
    return list(_kinds)


def critical() -> list[str]:
    return [kind.name for kind in _kinds.values() if kind.is_critical]


def replacements() -> list[tuple[list[str], list[str]]]:
    """Return, for each topic, the names of the kinds that can be replaced, and of those that replace them."""
    final = [kind.name for kind in _kinds.values() if kind.is_final]
    by_topic: dict[str, list[str]] = {}
    for kind in _kinds.values():
        if kind.topic and not kind.is_final:
            by_topic.setdefault(kind.topic, []).append(kind.name)
    return [(kinds, [*kinds, *final]) for kinds in by_topic.values()]
