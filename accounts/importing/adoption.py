"""Bulk adoption: assign owners to Pulse users that were created outside Guardian.

The plan is made from one set of lists of the broker. Nothing changes on the broker. To adopt a single Pulse user while
its name is leased, use ``pulse_users.adopt_pulse_user``; the same rules apply.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from django.conf import settings
from django.db import IntegrityError, transaction

from accounts import audit
from accounts.access import vouching
from accounts.models import Owner, PulseUser, normalize_address, owners_by_address
from accounts.pulse_users import ownership, validation
from core import broker, locks
from core.refusals import Refusal
from rabbit import names, permissions
from rabbit.permissions import Permissions

EXISTS, LEFT_OUT, ADOPT = "there already", "left out", "adopt"

BATCH_SIZE = 200
"""Pulse users adopted in one transaction."""


as_installation_file: Callable[[Iterable["Step"]], str]
"""Return the file for ``manage.py apply`` that has these steps. The package ``installation`` above sets it."""


class InvalidSource(ValueError):
    """The file or database can't be read, or has errors. The text says which, and never contains a password."""


class Ownership(NamedTuple):
    """A Pulse user, and the e-mail addresses of its future owners."""

    username: str
    owners: tuple[str, ...]


class Step(NamedTuple):
    """One step of a plan, for one ``owner``, ``account`` or ``queue``.

    ``do`` is the change, ``EXISTS`` or ``LEFT_OUT``. ``notes`` give the reasons. ``owners`` are those of a Pulse user.
    """

    what: str
    name: str
    do: str
    owners: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    vhost: str = ""

    @property
    def is_change(self) -> bool:
        return self.do not in (EXISTS, LEFT_OUT)


def as_table(steps: Sequence[Step]) -> list[str]:
    """Return the lines of a table of the steps, followed by their counts."""
    things = ["Pulse user" if step.what == "account" else step.what for step in steps]
    rows = [
        (thing, step.do, _name(step), " ".join([", ".join(step.owners), *step.notes]).strip())
        for thing, step in zip(things, steps, strict=True)
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = Counter((thing, do) for thing, do, *_ in rows)
    return [*lines, *(f"{number} {what}{'' if number == 1 else 's'}: {do}" for (what, do), number in counts.items())]


def _name(step: Step) -> str:
    name = names.readable(step.name) or "''"
    return f"{name} in {names.readable(step.vhost)}" if step.vhost else name


def batches(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Yield the steps in batches, one for each transaction."""
    for start in range(0, len(steps), BATCH_SIZE):
        yield steps[start : start + BATCH_SIZE]


# Planning


class PulseUserLists(NamedTuple):
    """The Pulse users in the database (``stored``) and the broker's users, with their tags.

    The database is read first: the row of a Pulse user outlives the user on the broker.
    """

    stored: Mapping[str, PulseUser]
    tags: Mapping[str, frozenset[str]]

    @classmethod
    def fetch(cls) -> "PulseUserLists":
        """Fetch both lists, with two queries and one request to the broker."""
        stored = {row.username: row for row in PulseUser.objects.order_by().prefetch_related("owners")}
        return cls(stored, {user.name: user.tags for user in broker.management().users()})

    def why_not_adoptable(self, username: str) -> str:
        """Return why this Pulse user can't be adopted, or "" if it can. Whether it is stored is not checked."""
        try:
            names.check_user_name(username)
        except names.InvalidUserName as error:
            return str(error)
        if username not in self.tags:
            return "The broker has no such user."
        return validation.why_not_ownable(username, self.tags[username])


def plan(wanted: Iterable[Ownership], usable: Collection[str]) -> list[Step]:
    """Return the steps for these Pulse users. Sends two requests to the broker and changes nothing.

    ``usable`` are the addresses of owners who may own a Pulse user. Other owners are left out, and so is a Pulse user
    without a usable owner.
    """
    lists = PulseUserLists.fetch()
    granted = broker.management().all_permissions()
    steps: list[Step] = []
    planned = set()
    for username, emails in wanted:
        owners = tuple(dict.fromkeys(map(normalize_address, emails)))
        usable_owners = tuple(email for email in owners if email in usable)
        notes = [f"{names.readable(email)} can't own it." for email in owners if email not in usable]
        if username in planned:
            steps.append(Step("account", username, LEFT_OUT, notes=("It is listed twice.",)))
        elif (stored := lists.stored.get(username)) is not None:
            steps.append(Step("account", username, *_existing_step(stored, usable_owners)))
        elif reason := lists.why_not_adoptable(username):
            steps.append(Step("account", username, LEFT_OUT, notes=(reason,)))
        elif not usable_owners:
            steps.append(Step("account", username, LEFT_OUT, notes=(*notes, "It would have no owner.")))
        elif len(usable_owners) > ownership.MAX_OWNERS:
            too_many = f"It has {len(usable_owners)} owners; {ownership.MAX_OWNERS} are allowed."
            steps.append(Step("account", username, LEFT_OUT, notes=(too_many,)))
        else:
            notes += differences(username, granted.get(username, {}))
            steps.append(Step("account", username, ADOPT, usable_owners, tuple(notes)))
        planned.add(username)
    return steps


def _existing_step(stored: PulseUser, wanted: Sequence[str]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    if stored.removing_since is not None:
        return LEFT_OUT, (), ("It is being removed here.",)
    if not stored.ready:
        return LEFT_OUT, (), ("It is being created here.",)
    owners = tuple(sorted(normalize_address(owner.email) for owner in stored.owners.all()))
    return EXISTS, owners, () if set(owners) == set(wanted) else ("It keeps its current owners.",)


def differences(username: str, granted: Mapping[str, Permissions]) -> list[str]:
    """Return sentences that say how a Pulse user's permissions, by vhost, differ from those that Guardian grants."""
    usual = permissions.for_pulse_user(username)
    own_vhost = settings.GUARDIAN_PULSE_VHOST
    found = []
    if own_vhost not in granted:
        found.append(f"It has no permissions on the vhost '{own_vhost}'.")
    for vhost, patterns in sorted(granted.items()):
        if vhost != own_vhost:
            found.append(f"It also has permissions on the vhost '{vhost}'.")
            continue
        sentences = permissions.in_words(patterns, username)
        found += [
            sentence
            for pattern, expected, sentence in zip(patterns, usual, sentences, strict=True)
            if _without_needless_escapes(pattern) != _without_needless_escapes(expected)
        ]
    return found


def _without_needless_escapes(pattern: str) -> str:
    # Some versions of Python escape characters that need no escape.
    return re.sub(r"\\([_/-])", r"\1", pattern)


# Applying


def adopt(steps: Sequence[Step], *, notify: bool) -> None:
    """Adopt the Pulse users of a plan: create their rows with their owners. Sends no request to the broker.

    Each Pulse user is adopted with all its owners or not at all. After a crash, plan and adopt again. ``notify`` the
    owners: one message to each about all Pulse users of a batch. After a Refusal, make a new plan: a Pulse user was
    created or adopted since, or is being changed; or an owner may no longer use the broker.
    """
    for batch in batches([step for step in steps if step.do == ADOPT]):
        _adopt(batch, notify=notify)


def _adopt(steps: Sequence[Step], *, notify: bool) -> None:
    for name in locks.locked_names([step.name for step in steps]):
        raise Refusal(f"Another request is changing '{name}' right now.")
    try:
        with transaction.atomic():
            emails = {email for step in steps for email in step.owners}
            owners = owners_by_address(emails)
            for email in sorted(emails - owners.keys()):
                raise Refusal(f"{email} no longer exists.")
            for owner in vouching.lock_all(owners.values()):
                vouching.require_vouched(owner)
            rows = PulseUser.objects.bulk_create([PulseUser(username=step.name, ready=True) for step in steps])
            pulse_users: dict[Owner, list[PulseUser]] = {}
            for row, step in zip(rows, steps, strict=True):
                for email in step.owners:
                    pulse_users.setdefault(owners[email], []).append(row)
            through = PulseUser.owners.through
            through.objects.bulk_create(
                [through(pulseuser=row, owner=owner) for owner, owned in pulse_users.items() for row in owned]
            )
            if notify:
                ownership.assigned(pulse_users, by=None)
            audit.record(
                None, "adopted", None, pulse_users=[f"{step.name}: {', '.join(step.owners)}" for step in steps]
            )
    except IntegrityError as error:
        raise Refusal("One of these Pulse users was created or adopted just now.") from error
