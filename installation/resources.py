"""What a file can describe: kinds of resources, their fields, and the values of new ones."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

Key = tuple[str, ...]
"""What identifies a resource: its address or name; a queue's vhost and name; an offering's UUID in hex."""

Values = Mapping[str, Any]


class Kind(Enum):
    """A kind of resource, with its name for people. Changes are carried out in this order."""

    OWNER = "owner"
    APPLICATION = "application"
    OFFERING = "offering"
    QUEUE = "limits of the queue"
    PULSE_USER = "Pulse user"


DEFAULTS: Mapping[Kind, Values] = {
    Kind.OWNER: {"access": False, "operator": False},
    Kind.APPLICATION: {},
    Kind.OFFERING: {"name": "", "members": [], "publishers": []},
    Kind.QUEUE: {"warn_length": None, "max_length": None, "unbounded": False},
    Kind.PULSE_USER: {
        "owners": [],
        "warn_length": None,
        "max_length": None,
        "keeps_archives": True,
        "hold_off_minutes": 0,
        "notification_emails": [],
    },
}
"""The fields of each kind, and their values in a resource for which the file does not name them."""

PEOPLE = {Kind.OFFERING: ("members", "publishers"), Kind.PULSE_USER: ("owners",)}
"""The fields that are addresses of owners."""


class Position(NamedTuple):
    """A place in a file, counted from 1."""

    line: int
    column: int


class Problem(NamedTuple):
    """What is wrong at a place in a file, as sentences that say what to do."""

    at: Position
    text: str


class InvalidFile(Exception):
    """The file has these problems, so nothing was done."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(problem.text for problem in problems))
        self.problems = sorted(problems)


@dataclass(frozen=True)
class Wanted:
    """A resource as a file describes it. ``values`` are those that the file names; others stay as they are.

    ``name`` is what the file calls it. The key of an offering without a UUID is empty. ``pattern`` is the regular
    expression of the names of queues, if there is one instead of a name.
    """

    kind: Kind
    key: Key
    name: str
    values: Values
    at: Position
    positions: Mapping[str, Position] = field(default_factory=dict)
    pattern: str = ""


@dataclass(frozen=True)
class Present:
    """A resource as the database has it.

    ``is_whole`` is False for a Pulse user whose creation was interrupted, for a person who has typed an address on the
    sign-in page and never proved to have it, and for a queue that is gone. ``obstacle`` says why it can't be changed.
    """

    kind: Kind
    key: Key
    pk: int
    values: Values
    is_whole: bool = True
    obstacle: str = ""


@dataclass(frozen=True)
class State:
    """The present installation.

    ``created`` are the resources that an earlier ``apply`` created, mapped to whether they are as it left them: the
    same address, or the same limits. ``with_queues`` are the applications among them that have queues. ``broker_users``
    maps users of the broker without owners here to why they can't be adopted, or "".
    """

    resources: Mapping[tuple[Kind, Key], Present]
    created: Mapping[tuple[Kind, Key], bool] = field(default_factory=dict)
    with_queues: Set[str] = frozenset()
    broker_users: Mapping[str, str] = field(default_factory=dict)

    def of_kind(self, kind: Kind) -> list[Present]:
        return [one for one in self.resources.values() if one.kind is kind]

    def get(self, kind: Kind, key: Key) -> Present | None:
        return self.resources.get((kind, key))
