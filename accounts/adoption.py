"""Giving many RabbitMQ accounts that were made elsewhere their owners at once.

One look at the broker decides about all of them, and nothing is asked or changed there afterwards. For one account,
with its name held meanwhile, there is ``pulse_users.adopt_pulse_user``; what may be adopted is the same.
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

from accounts import addresses, audit, pulse_users, vouching
from accounts.models import Owner, PulseUser, normalize_address
from core import broker, locks
from rabbit import names, permissions, snapshot
from rabbit.permissions import Permissions

EXISTS, LEFT_OUT, ADOPT = "there already", "left out", "adopt"

BATCH_SIZE = 200
"""So many are written in one transaction."""

MAX_FILE_BYTES = 10 * 1024 * 1024
"""The largest file that is read."""

COLUMNS = ("username", "owners", "guess", "queues", "messages", "connections")

_FORMULA = re.compile(r"[=+\-@\t\r]")
_SEPARATORS = re.compile(r"[\s;,]+")


class PlanOutdated(Exception):
    """Somebody changed what this was about to change. Plan it anew."""


class Ownership(NamedTuple):
    """An account, and the addresses of who is to own it."""

    username: str
    owners: tuple[str, ...]


class Step(NamedTuple):
    """What follows for one ``owner``, ``account`` or ``queue``, and why.

    ``do`` says what is to be done, or that it is there already, or left out. ``owners`` are an account's.
    """

    what: str
    name: str
    do: str
    owners: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    vhost: str = ""

    @property
    def is_change(self) -> bool:
        """Whether something is to be done."""
        return self.do not in (EXISTS, LEFT_OUT)

    def as_json(self) -> dict[str, object]:
        """Return it in the form that ``--json`` prints."""
        return {**self._asdict(), "owners": list(self.owners), "notes": list(self.notes)}


def as_table(steps: Sequence[Step]) -> list[str]:
    """Return the steps as a person reads them: a table, and how many of each there are."""
    rows = [
        (step.what, step.do, _name(step), " ".join([*filter(None, [", ".join(step.owners)]), *step.notes]))
        for step in steps
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    counts = Counter((step.what, step.do) for step in steps)
    return [*lines, *(f"{number} {what}{'' if number == 1 else 's'}: {do}" for (what, do), number in counts.items())]


def _name(step: Step) -> str:
    name = names.readable(step.name) or "''"
    return f"{name} in {names.readable(step.vhost)}" if step.vhost else name


def batches(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Return the steps in pieces of a size that one transaction takes."""
    for start in range(0, len(steps), BATCH_SIZE):
        yield steps[start : start + BATCH_SIZE]


# Deciding


class _StoredAccount(NamedTuple):
    ready: bool
    removing: bool
    owners: frozenset[str]


class AccountLists(NamedTuple):
    """The accounts stored here (``known``) and those listed by the broker, with their tags.

    The rows are read first: an account that is being removed keeps its row after it is gone from the broker.
    """

    known: Mapping[str, _StoredAccount]
    tags: Mapping[str, frozenset[str]]

    @classmethod
    def fetch(cls) -> "AccountLists":
        """Return the accounts of both sides, by two queries and one request to the broker.

        Raises:
            BrokerError: the broker is away or refused.
        """
        owners: dict[str, set[str]] = {}
        owned = PulseUser.owners.through.objects.values_list("pulseuser__username", "owner__email")
        for username, email in owned:
            owners.setdefault(username, set()).add(email)
        rows = PulseUser.objects.order_by().values_list("username", "ready", "removing_since")
        known = {
            name: _StoredAccount(ready, since is not None, frozenset(owners.get(name, ())))
            for name, ready, since in rows
        }
        return cls(known, {user.name: user.tags for user in broker.management().users()})

    def why_not_adoptable(self, username: str) -> str:
        """Return why an account of this name can't be adopted; empty: it can be, unless it is known already."""
        try:
            names.check_user_name(username)
        except names.InvalidUserName as error:
            return str(error)
        if username not in self.tags:
            return "The broker has no such account."
        return pulse_users.why_nobodys(username, self.tags[username])


def plan(wanted: Iterable[Ownership], usable: Collection[str]) -> list[Step]:
    """Return what follows for these accounts. The broker is asked twice; nothing is changed.

    ``usable`` are the addresses of those who may own an account. An owner who isn't among them is left out, and so is
    an account that would be without any.

    Raises:
        BrokerError: the broker is away or refused.
    """
    lists = AccountLists.fetch()
    granted = broker.management().all_permissions()
    steps: list[Step] = []
    planned = set()
    for username, emails in wanted:
        owners = tuple(dict.fromkeys(map(normalize_address, emails)))
        may = tuple(email for email in owners if email in usable)
        notes = [f"{names.readable(email)} can't own it." for email in owners if email not in usable]
        if username in planned:
            steps.append(Step("account", username, LEFT_OUT, notes=("It stands there twice.",)))
        elif (known := lists.known.get(username)) is not None:
            steps.append(Step("account", username, *_existing_step(known, may)))
        elif reason := lists.why_not_adoptable(username):
            steps.append(Step("account", username, LEFT_OUT, notes=(reason,)))
        elif not may:
            steps.append(Step("account", username, LEFT_OUT, notes=(*notes, "Nobody would own it.")))
        elif len(may) > pulse_users.MAX_OWNERS:
            too_many = f"It has {len(may)} owners; {pulse_users.MAX_OWNERS} are allowed."
            steps.append(Step("account", username, LEFT_OUT, notes=(too_many,)))
        else:
            notes += differences(username, granted.get(username, {}))
            steps.append(Step("account", username, ADOPT, may, tuple(notes)))
        planned.add(username)
    return steps


def _existing_step(known: _StoredAccount, wanted: Sequence[str]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    if known.removing:
        return LEFT_OUT, (), ("It is being removed here.",)
    if not known.ready:
        return LEFT_OUT, (), ("It is just being made here.",)
    if known.owners != set(wanted):
        return EXISTS, tuple(sorted(known.owners)), ("It keeps the owners that it has here.",)
    return EXISTS, tuple(sorted(known.owners)), ()


def differences(username: str, granted: Mapping[str, Permissions]) -> list[str]:
    """Return how an account's permissions, by vhost, differ from those that Guardian gives, in sentences."""
    usual = permissions.for_pulse_user(username)
    own_vhost = settings.GUARDIAN_PULSE_VHOST
    found = []
    if own_vhost not in granted:
        found.append(f"It has no permissions on the vhost '{own_vhost}'.")
    for vhost, there in sorted(granted.items()):
        if vhost != own_vhost:
            found.append(f"It has permissions on the vhost '{vhost}', too.")
            continue
        said = permissions.in_words(there, username)
        given = zip(there, usual, said, strict=True)
        found += [
            sentence
            for one, other, sentence in given
            if _without_needless_escapes(one) != _without_needless_escapes(other)
        ]
    return found


def _without_needless_escapes(pattern: str) -> str:
    # Some versions of Python write a backslash before what needs none.
    return re.sub(r"\\([_/-])", r"\1", pattern)


# Doing


def adopt(steps: Sequence[Step]) -> None:
    """Give the accounts that are to be adopted their owners. Nothing changes on the broker, which isn't asked.

    Each is adopted with all its owners or not at all; what a crash leaves undone is done by planning and doing it anew.

    Raises:
        PlanOutdated: somebody made, adopted or is changing one of them.
        NotVouched: an owner may not use the broker any more.
    """
    for batch in batches([step for step in steps if step.do == ADOPT]):
        _adopt(batch)


def _adopt(steps: Sequence[Step]) -> None:
    for name in locks.locked_names([step.name for step in steps]):
        raise PlanOutdated(f"Somebody is changing '{name}' right now.")
    try:
        with transaction.atomic():
            emails = {email for step in steps for email in step.owners}
            owners = {owner.email: owner for owner in vouching.lock_all(Owner.objects.filter(email__in=emails))}
            for email in sorted(emails - owners.keys()):
                raise PlanOutdated(f"{email} was removed meanwhile.")
            for owner in owners.values():
                vouching.require_vouched(owner)
            rows = PulseUser.objects.bulk_create([PulseUser(username=step.name, ready=True) for step in steps])
            through = PulseUser.owners.through
            through.objects.bulk_create(
                [
                    through(pulseuser=row, owner=owners[email])
                    for row, step in zip(rows, steps, strict=True)
                    for email in step.owners
                ]
            )
            audit.note(None, "adopted", None, accounts=[f"{step.name}: {', '.join(step.owners)}" for step in steps])
    except IntegrityError as error:
        raise PlanOutdated("Somebody made or adopted one of these accounts just now.") from error


# Proposing owners, and reading who they are to be


class Proposal(NamedTuple):
    """An account that could be adopted, who may be its owner by the looks of it, and what it has on the broker.

    ``messages`` is None where a queue's length isn't known; ``connections`` are those of this moment.
    """

    username: str
    guess: str
    queues: int
    messages: int | None
    connections: int


class Proposals(NamedTuple):
    """The accounts that could be adopted, and why others can't be, by name."""

    adoptable: list[Proposal]
    left_out: dict[str, str]


def propose() -> Proposals:
    """Return all accounts of the broker that have no owner here.

    An owner is guessed where the part of the address before the @ is the account's name, or a part of one of its
    queues' names, and that fits no other account and nobody else.

    Raises:
        BrokerError: the broker is away or refused.
    """
    lists = AccountLists.fetch()
    management = broker.management()
    # By their names queues belong to accounts in this vhost alone.
    seen = snapshot.take(management, [settings.GUARDIAN_PULSE_VHOST]).queues
    connected = Counter(client.user for client in management.clients(None))
    free = sorted(lists.tags.keys() - lists.known.keys())
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
    """Return the owner of each account whose parts fit nobody else, if the owner fits no other account."""
    fitting: dict[str, list[str]] = {}
    for email in vouching.possible_owners().values_list("email", flat=True):
        fitting.setdefault(email.rpartition("@")[0], []).append(email)
    of_account = {name: [email for part in its for email in fitting.get(part, ())] for name, its in parts.items()}
    times = Counter(email for emails in of_account.values() for email in emails)
    return {name: emails[0] for name, emails in of_account.items() if len(emails) == 1 and times[emails[0]] == 1}


def as_csv(proposals: Iterable[Proposal]) -> str:
    """Return the accounts as a CSV file to be filled in: with a header, and a column of owners that is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for username, guess, queues, messages, connected in proposals:
        figures = (queues, "" if messages is None else messages, connected)
        writer.writerow([_escape_formula(username), "", _escape_formula(guess), *figures])
    return text.getvalue()


def _escape_formula(cell: str) -> str:
    """Return a cell that a spreadsheet takes for text, and not for a formula."""
    return f"'{cell}" if _FORMULA.match(cell) else cell


def _unescape_formula(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell


class InvalidFile(ValueError):
    """The file can't be used. ``errors`` say why, each with its line."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = list(errors)


class Row(NamedTuple):
    """One line of the file: an account, and the addresses of its owners in their normal form."""

    line: int
    username: str
    owners: tuple[str, ...]


def plan_file(path: Path) -> tuple[list[Step], int]:
    """Return what follows from a filled CSV file, and how many accounts in it have no owner and are skipped.

    Everything in it is looked at first: of a file with one wrong line nothing is used.

    Raises:
        InvalidFile: it can't be read, or lines of it are wrong.
        BrokerError: the broker is away or refused.
    """
    rows = read_file(path)
    filled = {row.username: row for row in rows if row.owners}
    emails = {email for row in filled.values() for email in row.owners}
    askable = [email for email in emails if addresses.is_address(email)]
    usable = set(vouching.possible_owners().filter(email__in=askable).values_list("email", flat=True))
    # Wrong addresses are told of below, each with its line.
    steps = plan([Ownership(row.username, row.owners) for row in filled.values()], emails)
    errors = _errors(rows, {step.name: step for step in steps}, usable)
    if errors:
        raise InvalidFile(errors)
    return steps, len(rows) - len(filled)


def read_file(path: Path) -> list[Row]:
    """Return the rows of a CSV file that says who is to own which account. No name is looked up.

    Its first line names the columns, ``username`` and ``owners`` among them. They are separated by commas, semicolons
    or tabs, and the addresses in a cell by spaces, semicolons or commas.

    Raises:
        InvalidFile: it can't be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidFile([f"{path}: {error.strerror}."]) from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidFile([f"{path}: it has more than {MAX_FILE_BYTES // 1024 // 1024} MB."])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidFile([f"{path}: it isn't written in UTF-8. A spreadsheet calls that 'CSV UTF-8'."]) from None
    first = text.lstrip("\r\n").splitlines()[:1]
    for delimiter in ",;\t":
        header = [cell.strip().casefold() for row in csv.reader(first, delimiter=delimiter) for cell in row]
        if {"username", "owners"} <= set(header):
            return _rows(text, header, delimiter)
    raise InvalidFile(["line 1: the first line has to name the columns, username and owners among them."])


def _rows(text: str, header: Sequence[str], delimiter: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    username_at, owners_at = header.index("username"), header.index("owners")
    rows: list[Row] = []
    errors: list[str] = []
    has_header = False
    while True:
        line = reader.line_num + 1  # of a cell with line breaks in it the first
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
                f"line {line}: it has {len(cells)} cells, and the first line {len(header)}. "
                "Put several addresses between quotes, or spaces between them."
            )
        else:
            cells += [""] * (len(header) - len(cells))
            owners = filter(None, _SEPARATORS.split(_unescape_formula(cells[owners_at])))
            row = Row(line, _unescape_formula(cells[username_at]), tuple(dict.fromkeys(map(normalize_address, owners))))
            if not row.username:
                errors.append(f"line {line}: it names no account.")
            rows.append(row)
    if errors:
        raise InvalidFile(errors)
    return rows


def _errors(rows: Iterable[Row], steps: Mapping[str, Step], usable: Collection[str]) -> list[str]:
    """Return what is wrong in these rows, each with its line."""
    errors = []
    first: dict[str, int] = {}
    for line, username, owners in rows:
        if username in first:
            errors.append(f"line {line}: {names.readable(username)} stands on line {first[username]}, too.")
            continue
        first[username] = line
        if (step := steps.get(username)) is not None and step.do == LEFT_OUT:
            errors.append(f"line {line}: {names.readable(username)}: {' '.join(step.notes)}")
        for email in owners:
            if not addresses.is_address(email):
                errors.append(f"line {line}: '{names.readable(email)}' is no e-mail address.")
            elif email not in usable:
                errors.append(
                    f"line {line}: nobody who may use the broker has the address {email}; "
                    f"make one with: manage.py create_owner {email} --vouched"
                )
    return errors
