"""Kinds of notification: what each says, and how it is sent. The package that sends a kind registers it.

Each has its words in ``templates/mails/``: ``NAME.subject.txt``, ``NAME.txt`` and ``NAME.html``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notifications.models import Notification


class Obsolete(Exception):
    """What the notification is about no longer exists or was done in the meantime, so there is nothing to say."""


@dataclass(frozen=True)
class Kind:
    """A kind of notification.

    ``is_final``: nothing earlier about the same thing is true after it, so it waits for nothing and for no quiet hours.
    ``needs_active_recipient``: it is about its recipient, and not sent to one who can't sign in any more. ``context`` returns
    what its templates need beside the facts, and raises ``Obsolete``.
    """

    name: str
    text: str
    is_final: bool = False
    needs_active_recipient: bool = False
    context: Callable[["Notification"], dict[str, Any]] = lambda notification: {}


_kinds: dict[str, Kind] = {}


def register(name: str, text: str, **options: Any) -> str:
    """Register a kind with the fields of :class:`Kind`, and return its name."""
    _kinds[name] = Kind(name, text, **options)
    return name


def get(name: str) -> Kind:
    """Return the kind of this name; one that is registered no longer has no text and nothing special."""
    return _kinds.get(name) or Kind(name, name)


def choices() -> list[tuple[str, str]]:
    """Return the names of all kinds with their texts, for the field of the model."""
    return [(kind.name, kind.text) for kind in _kinds.values()]


def names() -> list[str]:
    """Return the names of all kinds."""
    return list(_kinds)


def final() -> list[str]:
    """Return the names of the kinds that are final."""
    return [kind.name for kind in _kinds.values() if kind.is_final]
