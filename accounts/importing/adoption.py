"""Bulk adoption: assign owners to Pulse users that were created outside Guardian.

The plan is made from one set of lists of the broker. Nothing changes on the broker. To adopt a single Pulse user while
its name is leased, use ``pulse_users.adopt_pulse_user``; the same rules apply.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.db import IntegrityError, transaction

from accounts import audit
from accounts.access import vouching
from accounts.models import Owner, PulseUser, normalize_address
from accounts.pulse_users import addresses, ownership, validation
from core import broker, locks
from core.refusals import Refusal
from rabbit import names, permissions, snapshot
from rabbit.permissions import Permissions

EXISTS, LEFT_OUT, ADOPT = "there already", "left out", "adopt"

BATCH_SIZE = 200
"""Pulse users adopted in one transaction."""

MAX_FILE_BYTES = 10 * 1024 * 1024

COLUMNS = ("username", "owners", "guess", "queues", "messages", "connections")

_FORMULA = re.compile(r"[=+\-@\t\r]")
_SEPARATORS = re.compile(r"[\s;,]+")


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
    def thing(self) -> str:
        """What the step is for, in words."""
        return "Pulse user" if self.what == "account" else self.what

    @property
    def is_change(self) -> bool:
        """Whether this step changes something."""
        return self.do not in (EXISTS, LEFT_OUT)

    def as_json(self) -> dict[str, object]:
        """Return the step as ``--json`` prints it."""
        return {**self._asdict(), "owners": list(self.owners), "notes": list(self.notes)}


def as_table(steps: Sequence[Step]) -> list[str]:
    """Return the lines of a table of the steps, followed by their counts."""
    rows = [
        (
            step.thing,
            step.do,
            _name(step),
            " ".join([*filter(None, [", ".join(step.owners)]), *step.notes]),
        )
        for step in steps
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    counts = Counter((step.thing, step.do) for step in steps)
    return [*lines, *(f"{number} {what}{'' if number == 1 else 's'}: {do}" for (what, do), number in counts.items())]


def _name(step: Step) -> str:
    name = names.readable(step.name) or "''"
    return f"{name} in {names.readable(step.vhost)}" if step.vhost else name


def batches(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Yield the steps in batches, one for each transaction."""
    for start in range(0, len(steps), BATCH_SIZE):
        yield steps[start : start + BATCH_SIZE]


# Planning


class _StoredPulseUser(NamedTuple):
    ready: bool
    removing: bool
    owners: frozenset[str]


class PulseUserLists(NamedTuple):
    """The Pulse users in the database (``stored``) and the broker's users, with their tags.

    The database is read first: the row of a Pulse user outlives the user on the broker.
    """

    stored: Mapping[str, _StoredPulseUser]
    tags: Mapping[str, frozenset[str]]

    @classmethod
    def fetch(cls) -> "PulseUserLists":
        """Fetch both lists, with two queries and one request to the broker.

        Raises:
            BrokerError: the broker is unreachable or refuses.
        """
        owners: dict[str, set[str]] = {}
        owned = PulseUser.owners.through.objects.values_list("pulseuser__username", "owner__email")
        for username, email in owned:
            owners.setdefault(username, set()).add(email)
        rows = PulseUser.objects.order_by().values_list("username", "ready", "removing_since")
        stored = {
            name: _StoredPulseUser(ready, removing_since is not None, frozenset(owners.get(name, ())))
            for name, ready, removing_since in rows
        }
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

    Raises:
        BrokerError: the broker is unreachable or refuses.
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


def _existing_step(stored: _StoredPulseUser, wanted: Sequence[str]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    if stored.removing:
        return LEFT_OUT, (), ("It is being removed here.",)
    if not stored.ready:
        return LEFT_OUT, (), ("It is being created here.",)
    if stored.owners != set(wanted):
        return EXISTS, tuple(sorted(stored.owners)), ("It keeps its current owners.",)
    return EXISTS, tuple(sorted(stored.owners)), ()


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
    owners: one message to each about all Pulse users of a batch.

    Raises:
        Refusal: a Pulse user was created or adopted since, or is being changed; or an owner may no longer use the
            broker. Make a new plan.
    """
    for batch in batches([step for step in steps if step.do == ADOPT]):
        _adopt(batch, notify=notify)


def _adopt(steps: Sequence[Step], *, notify: bool) -> None:
    for name in locks.locked_names([step.name for step in steps]):
        raise Refusal(f"Another request is changing '{name}' right now.")
    try:
        with transaction.atomic():
            emails = {email for step in steps for email in step.owners}
            owners = {owner.email: owner for owner in vouching.lock_all(Owner.objects.filter(email__in=emails))}
            for email in sorted(emails - owners.keys()):
                raise Refusal(f"{email} no longer exists.")
            for owner in owners.values():
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


# The CSV file


class Proposal(NamedTuple):
    """A user that can be adopted, its probable owner, and what it has on the broker.

    ``messages`` is None if the length of a queue is unknown. ``connections`` counts the live connections.
    """

    username: str
    guess: str
    queues: int
    messages: int | None
    connections: int


class Proposals(NamedTuple):
    """The Pulse users that can be adopted, and the reasons why others can't, by name."""

    adoptable: list[Proposal]
    left_out: dict[str, str]


def propose() -> Proposals:
    """Return all users of the broker that have no owner here.

    The guessed owner is the one whose address, before the @, equals the Pulse user's name or a part of one of its
    queues' names. There is no guess if several owners match the Pulse user, or the owner matches several Pulse users.

    Raises:
        BrokerError: the broker is unreachable or refuses.
    """
    lists = PulseUserLists.fetch()
    management = broker.management()
    # Queue names identify a Pulse user in this vhost only.
    seen = snapshot.take(management, [settings.GUARDIAN_PULSE_VHOST]).queues
    connected = Counter(client.user for client in management.clients(None))
    free = sorted(lists.tags.keys() - lists.stored.keys())
    left_out = {name: reason for name in free if (reason := lists.why_not_adoptable(name))}
    lengths: dict[str, list[int | None]] = {name: [] for name in free if name not in left_out}
    parts: dict[str, set[str]] = {name: {name.casefold()} for name in lengths}
    for queue in seen:
        username = names.user_of_queue(queue.name)
        if username is not None and username in lengths:
            lengths[username].append(queue.length)
            parts[username].update(part.casefold() for part in queue.name.split("/")[2:])
    guesses = _guesses(parts)
    return Proposals(
        [
            Proposal(
                name,
                guesses.get(name, ""),
                len(of_queues),
                None if None in of_queues else sum(length or 0 for length in of_queues),
                connected[name],
            )
            for name, of_queues in lengths.items()
        ],
        left_out,
    )


def _guesses(parts: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the guessed owner of each Pulse user that matches exactly one owner, who matches no other Pulse user."""
    by_local_part: dict[str, list[str]] = {}
    for email in vouching.possible_owners().values_list("email", flat=True):
        by_local_part.setdefault(email.rpartition("@")[0], []).append(email)
    matches = {
        name: [email for part in pulse_user_parts for email in by_local_part.get(part, ())]
        for name, pulse_user_parts in parts.items()
    }
    counts = Counter(email for emails in matches.values() for email in emails)
    return {name: emails[0] for name, emails in matches.items() if len(emails) == 1 and counts[emails[0]] == 1}


def as_csv(proposals: Iterable[Proposal]) -> str:
    """Return the Pulse users as a CSV file with a header and an empty column for owners."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for username, guess, queues, messages, connected in proposals:
        figures = (queues, "" if messages is None else messages, connected)
        writer.writerow([_escape_formula(username), "", _escape_formula(guess), *figures])
    return text.getvalue()


def _escape_formula(cell: str) -> str:
    """Return the cell, quoted if a spreadsheet would take it for a formula."""
    return f"'{cell}" if _FORMULA.match(cell) else cell


def _unescape_formula(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell


class InvalidFile(ValueError):
    """The file is invalid. ``errors`` are sentences with line numbers."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = list(errors)


class Row(NamedTuple):
    """One line of the file: a Pulse user, and the addresses of its owners in normal form."""

    line: int
    username: str
    owners: tuple[str, ...]


def plan_file(path: Path) -> tuple[list[Step], int]:
    """Return the steps for a filled CSV file, and the number of Pulse users skipped because they have no owner.

    One invalid line invalidates the whole file.

    Raises:
        InvalidFile: the file can't be read, or lines are invalid.
        BrokerError: the broker is unreachable or refuses.
    """
    rows = read_file(path)
    filled = {row.username: row for row in rows if row.owners}
    emails = {email for row in filled.values() for email in row.owners}
    valid = [email for email in emails if addresses.is_address(email)]
    usable = set(vouching.possible_owners().filter(email__in=valid).values_list("email", flat=True))
    # All addresses pass here; _errors reports the wrong ones with their lines.
    steps = plan([Ownership(row.username, row.owners) for row in filled.values()], emails)
    errors = _errors(rows, {step.name: step for step in steps}, usable)
    if errors:
        raise InvalidFile(errors)
    return steps, len(rows) - len(filled)


def read_file(path: Path) -> list[Row]:
    """Return the rows of a CSV file of Pulse users and owners. No name is looked up.

    The first line names the columns, which include ``username`` and ``owners``. The delimiter is a comma, a semicolon
    or a tab. Addresses in a cell are separated by spaces, semicolons or commas.

    Raises:
        InvalidFile: the file can't be read or parsed.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidFile([f"{path}: {error.strerror}."]) from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidFile([f"{path}: the file is larger than {MAX_FILE_BYTES // 1024 // 1024} MB."])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidFile([f"{path}: the file is not UTF-8. Save it as 'CSV UTF-8'."]) from None
    first = text.lstrip("\r\n").splitlines()[:1]
    for delimiter in ",;\t":
        header = [cell.strip().casefold() for row in csv.reader(first, delimiter=delimiter) for cell in row]
        if {"username", "owners"} <= set(header):
            return _rows(text, header, delimiter)
    raise InvalidFile(["line 1: the first line must name the columns, including username and owners."])


def _rows(text: str, header: Sequence[str], delimiter: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    username_at, owners_at = header.index("username"), header.index("owners")
    rows: list[Row] = []
    errors: list[str] = []
    has_header = False
    while True:
        line = reader.line_num + 1  # the first line of the row; cells may contain line breaks
        try:
            cells = next(reader, None)
        except csv.Error as error:
            errors.append(f"line {reader.line_num}: {error}.")
            break
        if cells is None:
            break
        if not any(cell.strip() for cell in cells):
            continue
        if not has_header:
            has_header = True
        elif len(cells) > len(header):
            errors.append(
                f"line {line}: it has {len(cells)} cells, but the first line has {len(header)}. "
                "Quote a cell with several addresses, or separate them with spaces."
            )
        else:
            cells += [""] * (len(header) - len(cells))
            owners = filter(None, _SEPARATORS.split(_unescape_formula(cells[owners_at])))
            row = Row(line, _unescape_formula(cells[username_at]), tuple(dict.fromkeys(map(normalize_address, owners))))
            if not row.username:
                errors.append(f"line {line}: it names no Pulse user.")
            rows.append(row)
    if errors:
        raise InvalidFile(errors)
    return rows


def _errors(rows: Iterable[Row], steps: Mapping[str, Step], usable: Collection[str]) -> list[str]:
    """Return the errors of these rows, with line numbers."""
    errors = []
    first: dict[str, int] = {}
    for line, username, owners in rows:
        if username in first:
            errors.append(f"line {line}: {names.readable(username)} is already on line {first[username]}.")
            continue
        first[username] = line
        if (step := steps.get(username)) is not None and step.do == LEFT_OUT:
            errors.append(f"line {line}: {names.readable(username)}: {' '.join(step.notes)}")
        for email in owners:
            if not addresses.is_address(email):
                errors.append(f"line {line}: '{names.readable(email)}' is not an e-mail address.")
            elif email not in usable:
                errors.append(
                    f"line {line}: no owner with access has the address {email}; "
                    f"create one with: manage.py create_owner {email} --vouched"
                )
    return errors
