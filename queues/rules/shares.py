"""Which archives are deleted when they take too many bytes. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from queues.rules.turns import Group

SHARE = 5
"""The archives of one group may take this fraction of the bytes of all."""


class Kept(NamedTuple):
    """A kept archive: its primary key, whose it is, and the bytes that it takes."""

    pk: int
    group: Group
    bytes: int


def share(total: int) -> int:
    """Return the bytes that the archives of one group may take, of ``total`` for all."""
    return total // SHARE


def room(unfinished: Iterable[Kept], total: int, new: int) -> int:
    """Return the bytes that the archive ``new`` may take, beside the others of its group that are being written."""
    archives = list(unfinished)
    group = next((one.group for one in archives if one.pk == new), None)
    return share(total) - sum(one.bytes for one in archives if one.group == group and one.pk != new)


def to_delete(archives: Iterable[Kept], total: int, new: int | None = None) -> list[int]:
    """Return the archives to delete, as primary keys. The given ones are in the order in which a group loses them.

    A group that takes more than its share loses its first ones. Then the group that takes most does, until all take
    ``total`` bytes at most. The ``new`` archive, which was promised a moment ago, stays.
    """
    by_group: dict[Group, list[Kept]] = defaultdict(list)
    taken: Counter[Group] = Counter()
    for one in archives:
        taken[one.group] += one.bytes
        if one.pk != new:
            by_group[one.group].append(one)
    deleted = []

    def delete_first(group: Group) -> None:
        first = by_group[group].pop(0)
        taken[group] -= first.bytes
        deleted.append(first.pk)

    for group in by_group:
        while by_group[group] and taken[group] > share(total):
            delete_first(group)
    while taken.total() > total and (left := [group for group in by_group if by_group[group]]):
        delete_first(max(left, key=lambda group: taken[group]))
    return deleted
