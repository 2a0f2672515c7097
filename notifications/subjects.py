"""The subjects of notifications, by the key in ``Notification.about``: their current ownership and page.

The package that sends notifications about a kind of subject registers its lookup. A notification may wait for hours,
so its recipients are checked again before it is sent.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from notifications.audience import Ownership


class Subject(NamedTuple):
    """The current ownership of a subject, the path of its page, and whether it is gone."""

    ownership: Ownership
    path: str
    is_gone: bool = False


Lookup = Callable[[Collection[int]], Mapping[int, Subject]]
"""Returns the subjects with these ids. Those that no longer exist are left out."""

_lookups: dict[str, Lookup] = {}


def register(kind: str, lookup: Lookup) -> None:
    """Register the lookup of this kind of subject, whose keys are ``"KIND ID"``."""
    _lookups[kind] = lookup


def key(kind: str, id_: int) -> str:
    return f"{kind} {id_}"


def is_key(text: str) -> bool:
    return text.rpartition(" ")[0] in _lookups


def look_up(keys: Collection[str]) -> dict[str, Subject]:
    """Return the subjects of these keys. Keys of unregistered kinds are left out."""
    ids: dict[str, list[int]] = {}
    for one in set(keys):
        kind, _, id_ = one.rpartition(" ")
        if kind in _lookups and id_.isdecimal():
            ids.setdefault(kind, []).append(int(id_))
    return {key(kind, id_): subject for kind, these in ids.items() for id_, subject in _lookups[kind](these).items()}
