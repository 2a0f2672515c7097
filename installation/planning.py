"""What would change: wanted resources compared with the present ones. Pure.

A plan is made completely, or not at all: then :class:`InvalidFile` has every problem that can be seen without trying.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError

from accounts.models import check_thresholds
from accounts.pulse_users.validation import check_not_reserved
from core.confirmation import AffectedQueue
from core.refusals import Refusal
from installation.reading import did_you_mean
from installation.resources import (
    DEFAULTS,
    PEOPLE,
    InvalidFile,
    Key,
    Kind,
    Position,
    Present,
    Problem,
    State,
    Values,
    Wanted,
)
from rabbit.names import readable, user_of_queue

_THRESHOLDS = ("warn_length", "max_length")

MAX_SUGGESTIONS = 10
"""Problems with the most similar address: finding it takes a look at all owners."""


class Do(Enum):
    """What is done to a resource, with its sign in a printed plan."""

    CREATE = "+ create"
    ADOPT = "+ adopt"
    CHANGE = "~ change"
    REMOVE = "- remove"


@dataclass(frozen=True)
class Change:
    """A change to a resource. ``old`` and ``new`` have the fields that change. ``pk`` is 0 for a new row."""

    do: Do
    kind: Kind
    key: Key
    name: str
    old: Values = field(default_factory=dict)
    new: Values = field(default_factory=dict)
    pk: int = 0

    def __str__(self) -> str:
        where = f" in {readable(self.key[0])}" if self.kind is Kind.QUEUE else ""
        is_new = self.do in (Do.CREATE, Do.ADOPT)
        fields = (
            f"{name} {_text(new)}" if is_new else f"{name} {_text(self.old[name])} → {_text(new)}"
            for name, new in self.new.items()
            if not (is_new and name == "name")
        )
        return f"{self.do.value} {self.kind.value} {readable(self.name)}{where}: {', '.join(fields)}".removesuffix(": ")


@dataclass(frozen=True)
class Plan:
    """The changes in the order in which they are carried out. ``notes`` say what is left as it is, and why."""

    changes: Sequence[Change]
    unchanged: int
    notes: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        yield from map(str, self.changes)
        yield from self.notes
        counts = {do: sum(change.do is do for change in self.changes) for do in Do}
        created, adopted, changed, removed = counts.values()
        yield (
            f"{created} to create, {adopted} to adopt, {changed} to change, {removed} to remove, "
            f"{self.unchanged} unchanged."
        )

    def digest(self, deleted: Iterable[AffectedQueue]) -> str:
        """Return the text that confirms this plan. The queues that it deletes count, their messages do not."""
        changes = [(one.do.name, one.kind.name, one.key, one.old, one.new) for one in self.changes]
        queues = sorted((queue.vhost, queue.name) for queue in deleted)
        return hashlib.sha256(json.dumps([changes, queues], sort_keys=True).encode()).hexdigest()[:16]


def make_plan(wanted: Sequence[Wanted], state: State, *, prune: bool = False) -> Plan:
    """Return the plan that brings the installation to the wanted state. ``prune``: remove what the file lacks."""
    planner = _Planner(state)
    # Queues last, because the thresholds of their Pulse users count. Names have precedence over patterns.
    for one in sorted(wanted, key=lambda one: (one.kind is Kind.QUEUE, bool(one.pattern))):
        planner.add(one)
    if prune:
        planner.prune(any(one.kind is Kind.OWNER for one in wanted))
    planner.check_operators()
    if planner.problems:
        raise InvalidFile(planner.problems)
    return Plan(sorted(planner.changes, key=_rank), planner.unchanged, planner.notes)


def _rank(change: Change) -> tuple[bool, float, str]:
    """Return the place of a change. Owners are created before what they own, and removed after it.

    A Pulse user is created, and its limit raised, before the limits of its queues change. It is lowered after that.
    """
    is_removal, kind = change.do is Do.REMOVE, float(list(Kind).index(change.kind))
    is_lowered = change.do is not Do.CREATE and _limit(change.new) < _limit(change.old)
    if change.kind is Kind.PULSE_USER and not (is_removal or is_lowered):
        kind -= 1.5
    return is_removal, -kind if is_removal else kind, change.name


def _limit(values: Values) -> int:
    limit = values.get("max_length")
    return settings.GUARDIAN_MAX_QUEUE_LENGTH if limit is None else int(limit)


class _Planner:
    def __init__(self, state: State) -> None:
        self._state = state
        self.changes: list[Change] = []
        self.unchanged = 0
        self.notes: list[str] = []
        self.problems: list[Problem] = []
        self._kept: set[tuple[Kind, Key]] = set()
        self._owners = {
            one.key[0]: dict(one.values) for one in state.of_kind(Kind.OWNER) if one.is_whole and not one.obstacle
        }
        self._pulse_users = {one.key: one.values for one in state.of_kind(Kind.PULSE_USER)}
        self._had_operators = self._has_operators()
        self._demoted_at = Position(1, 1)

    def _has_operators(self) -> bool:
        return any(values["operator"] for values in self._owners.values())

    def add(self, wanted: Wanted) -> None:
        """Add what is to be done about a resource of the file."""
        if wanted.pattern:
            matches = re.compile(wanted.pattern).fullmatch
            for one in self._state.of_kind(Kind.QUEUE):
                if one.key[0] != wanted.key[0] or not matches(one.key[1]):
                    continue
                if one.is_whole and not one.obstacle:
                    self._add(wanted, one.key, one.key[1])
                else:
                    self._kept.add((one.kind, one.key))
            return
        key = wanted.key
        if wanted.kind is Kind.OFFERING and not key:
            found = [one.key for one in self._state.of_kind(Kind.OFFERING) if one.values["name"] == wanted.name]
            if len(found) > 1:
                self._refuse(wanted, "name", f"There are {len(found)} offerings of this name. Write the uuid, too.")
            key = found[0] if found else ("", wanted.name)
        self._add(wanted, key, wanted.name)

    def _add(self, wanted: Wanted, key: Key, name: str) -> None:
        if (wanted.kind, key) in self._kept:  # another entry has precedence
            if not wanted.pattern:
                self._refuse(wanted, "", f"'{wanted.name}' is here twice.")
            return
        self._kept.add((wanted.kind, key))
        present = self._state.get(wanted.kind, key)
        if present is not None and present.obstacle:
            self._refuse(wanted, "", present.obstacle)
            return
        is_new = present is None or (not present.is_whole and wanted.kind is not Kind.QUEUE)
        old = DEFAULTS[wanted.kind] if present is None or is_new else present.values
        values = {**old, **wanted.values}
        if wanted.kind is Kind.OWNER:
            values = self._checked_owner(wanted, old, values)
        self._check_people(wanted, old, values)
        if any(values.get(name) != old.get(name) for name in _THRESHOLDS):
            self._check_thresholds(wanted, key, values)
        do = Do.CREATE if is_new else Do.CHANGE
        if wanted.kind is Kind.PULSE_USER:
            self._pulse_users[key] = values
            if present is None and name in self._state.broker_users:
                do = Do.ADOPT
                if reason := self._state.broker_users[name]:
                    self._refuse(wanted, "", reason)
            if is_new and not values["owners"]:
                self._refuse(wanted, "owners", "A new Pulse user needs at least one owner: write owners: [address].")
            if do is Do.CREATE and is_new:
                self._check_name(wanted)
            for email in values["notification_emails"]:
                if email in values["owners"] and email not in old["notification_emails"]:
                    text = f"{email} belongs to an owner, who gets all notifications anyway. Leave it out."
                    self._refuse(wanted, "notification_emails", text)
        new = {field: value for field, value in values.items() if value != old[field]}
        if new or (is_new and wanted.kind is not Kind.QUEUE):
            changed = {field: old[field] for field in new}
            self.changes.append(Change(do, wanted.kind, key, name, changed, new, present.pk if present else 0))
        else:
            self.unchanged += 1

    def _check_name(self, wanted: Wanted) -> None:
        try:
            check_not_reserved(wanted.name)
        except Refusal as error:
            self._refuse(wanted, "", str(error))

    def _checked_owner(self, wanted: Wanted, old: Values, values: dict[str, Any]) -> dict[str, Any]:
        if values["operator"]:
            if wanted.values.get("access") is False:
                self._refuse(wanted, "access", "An operator always has access. Write access: true, or leave it out.")
            values["access"] = True
        elif old["operator"]:
            self._demoted_at = wanted.positions["operator"]
        self._owners[wanted.key[0]] = values
        return values

    def check_operators(self) -> None:
        """Refuse a plan after which nobody could run the installation."""
        if self._had_operators and not self._has_operators():
            self.problems.append(Problem(self._demoted_at, "No operator would remain. Name another one first."))

    def _check_people(self, wanted: Wanted, old: Values, values: Values) -> None:
        """Refuse new owners, members and publishers who are unknown or have no access."""
        for people in PEOPLE.get(wanted.kind, ()):
            self._kept.update((Kind.OWNER, (email,)) for email in wanted.values.get(people, ()))
            for email in sorted(set(values[people]) - set(old[people])):
                if email not in self._owners:
                    is_shown = len(self.problems) < MAX_SUGGESTIONS
                    suggestion = did_you_mean(email, self._owners) if is_shown else ""
                    text = f"There is no active owner {email}, here or in the file.{suggestion}"
                    self._refuse(wanted, people, text)
                elif not self._owners[email]["access"]:
                    self._refuse(wanted, people, f"{email} has no access to the broker. Write access: true.")

    def _check_thresholds(self, wanted: Wanted, key: Key, values: Values) -> None:
        of_pulse_user: Values = {}
        if wanted.kind is Kind.QUEUE and key[0] == settings.GUARDIAN_PULSE_VHOST:
            of_pulse_user = self._pulse_users.get((user_of_queue(key[1]) or "",), {})
        thresholds = (values[name] if values[name] is not None else of_pulse_user.get(name) for name in _THRESHOLDS)
        try:
            if any(values[name] is not None for name in _THRESHOLDS):
                check_thresholds(*thresholds)
        except ValidationError as error:
            field = "max_length" if "max_length" in wanted.values else "warn_length"
            self._refuse(wanted, field, " ".join(error.messages))

    def _refuse(self, wanted: Wanted, field: str, text: str) -> None:
        self.problems.append(Problem(wanted.positions.get(field, wanted.at), text))

    def prune(self, has_owners: bool) -> None:
        """Remove what an earlier ``apply`` created and the file no longer has."""
        if not has_owners:
            text = "A file without owners removes nothing: it may be incomplete. Name the owners, or leave out --prune."
            self.problems.append(Problem(Position(1, 1), text))
            return
        removed = []
        for key, one in self._state.resources.items():
            if key in self._kept or key not in self._state.created:
                continue
            if why_not := self._why_not_removed(one):
                self.notes.append(f"Not removed: {one.kind.value} {_name(one)}. {why_not}")
            elif one.values != DEFAULTS[Kind.QUEUE]:
                removed.append(one)
        for one in removed:
            self._pulse_users.pop(one.key if one.kind is Kind.PULSE_USER else (), None)
        still_own: Mapping[str, list[str]] = _owned(self._pulse_users)
        for one in removed:
            name = _name(one)
            if one.kind is Kind.OWNER and (owned := still_own.get(one.key[0])):
                self.notes.append(f"The owner {name} stays, as the owner of {', '.join(sorted(owned))}.")
            else:
                limits = DEFAULTS[Kind.QUEUE] if one.kind is Kind.QUEUE else {}
                reset = {field: value for field, value in limits.items() if value != one.values[field]}
                self.changes.append(Change(Do.REMOVE, one.kind, one.key, name, one.values, reset, one.pk))
                if one.kind is Kind.OWNER:
                    self._owners.pop(one.key[0], None)

    def _why_not_removed(self, one: Present) -> str:
        if one.kind is Kind.QUEUE and one.values == DEFAULTS[Kind.QUEUE]:
            return ""  # nothing is left to remove
        if not self._state.created[one.kind, one.key]:
            return "A person changed it since."
        has_queues = one.kind is Kind.APPLICATION and one.key[0] in self._state.with_queues
        return "It has queues." if has_queues else one.obstacle


def _name(one: Present) -> str:
    return str(one.values.get("name") or one.key[-1])


def _owned(pulse_users: Mapping[Key, Values]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, values in pulse_users.items():
        for email in values["owners"]:
            found.setdefault(email, []).append(key[0])
    return found


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "nobody"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "default" if value is None else readable(str(value))
