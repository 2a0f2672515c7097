"""The kinds of notification. The package that sends a kind registers it.

The templates of a kind are ``templates/mails/NAME.subject.txt``, ``NAME.txt`` and ``NAME.html``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notifications.models import Notification


class Obsolete(Exception):
    """The subject no longer exists, or the request was handled in the meantime, so nothing is sent."""


@dataclass(frozen=True)
class Kind:
    """A kind of notification.

    ``is_final``: it makes earlier notifications about its subject untrue, so it waits for no other and no quiet hours.
    ``needs_active_recipient``: it is about its recipient, and not sent to one who can no longer sign in. ``context``
    returns the templates' context besides the facts, and raises ``Obsolete``.
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
    """Return the kind of this name; a kind that is no longer registered gets the defaults."""
    return _kinds.get(name) or Kind(name, name)


def choices() -> list[tuple[str, str]]:
    """Return the names and texts of all kinds, for the model's field."""
    return [(kind.name, kind.text) for kind in _kinds.values()]


def names() -> list[str]:
    """Return the names of all kinds."""
    return list(_kinds)


def final() -> list[str]:
    """Return the names of the final kinds."""
    return [kind.name for kind in _kinds.values() if kind.is_final]
