"""What notifications are about, by the key in ``Notification.about``: who is notified of it now, and its page.

The package that sends notifications about a kind of thing registers how these are looked up. A notification may wait
for hours, so its recipients are compared with this again before it is sent.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from notifications.audience import Ownership


class Subject(NamedTuple):
    """A thing that notifications are about, as it is now: whose it is, and the path of its page."""

    ownership: Ownership
    path: str


Lookup = Callable[[Collection[int]], Mapping[int, Subject]]
"""Returns what there is of these ids. Things that no longer exist are left out."""

_lookups: dict[str, Lookup] = {}


def register(kind: str, lookup: Lookup) -> None:
    """Have things of this kind, whose keys are ``"KIND ID"``, looked up by this function."""
    _lookups[kind] = lookup


def key(kind: str, id_: int) -> str:
    """Return the key of a thing."""
    return f"{kind} {id_}"


def look_up(keys: Collection[str]) -> dict[str, Subject]:
    """Return the things that these keys stand for. A key of no registered kind stands for nothing."""
    ids: dict[str, list[int]] = {}
    for one in set(keys):
        kind, _, id_ = one.rpartition(" ")
        if kind in _lookups and id_.isdecimal():
            ids.setdefault(kind, []).append(int(id_))
    return {key(kind, id_): subject for kind, these in ids.items() for id_, subject in _lookups[kind](these).items()}
