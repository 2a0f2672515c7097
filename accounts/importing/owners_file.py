"""The CSV file of Pulse users and their owners: Guardian proposes it, an operator fills it, and it becomes a plan."""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from django.conf import settings

from accounts.access import vouching
from accounts.importing import adoption
from accounts.importing.adoption import LEFT_OUT, InvalidSource, Ownership, PulseUserLists, Step
from accounts.models import normalize_address, owners_by_address
from accounts.pulse_users import addresses
from core import broker
from rabbit import names, snapshot

MAX_FILE_BYTES = 10 * 1024 * 1024

_FORMULA = re.compile(r"[=+\-@\t\r]")
_SEPARATORS = re.compile(r"[\s;,]+")


class Proposal(NamedTuple):
    """A user that can be adopted, its probable owner, and what it has on the broker.

    ``messages`` is None if the length of a queue is unknown. ``connections`` counts the live connections.
    """

    username: str
    guess: str
    queues: int
    messages: int | None
    connections: int


def propose() -> tuple[list[Proposal], dict[str, str]]:
    """Return the users of the broker that have no owner here, and by name the reasons why others can't be adopted.

    The guessed owner is the one whose address, before the @, equals the Pulse user's name or a part of one of its
    queues' names. There is no guess if several owners match the Pulse user, or the owner matches several Pulse users.
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
    adoptable = []
    for name, of_queues in lengths.items():
        messages = None if None in of_queues else sum(length or 0 for length in of_queues)
        adoptable.append(Proposal(name, guesses.get(name, ""), len(of_queues), messages, connected[name]))
    return adoptable, left_out


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
    writer.writerow(["username", "owners", "guess", "queues", "messages", "connections"])
    for username, guess, *figures in proposals:
        writer.writerow([_escape_formula(username), "", _escape_formula(guess), *figures])
    return text.getvalue()


def _escape_formula(cell: str) -> str:
    """Return the cell, quoted if a spreadsheet would take it for a formula."""
    return f"'{cell}" if _FORMULA.match(cell) else cell


def _unescape_formula(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell


class Row(NamedTuple):
    """One line of the file: a Pulse user, and the addresses of its owners in normal form."""

    line: int
    username: str
    owners: tuple[str, ...]


def plan(path: Path) -> tuple[list[Step], int]:
    """Return the steps for a filled CSV file, and the number of Pulse users skipped because they have no owner.

    One invalid line invalidates the whole file: InvalidSource.
    """
    rows = _rows(_read(path))
    filled = {row.username: row for row in rows if row.owners}
    emails = {email for row in filled.values() for email in row.owners}
    valid = [email for email in emails if addresses.is_address(email)]
    usable = set(owners_by_address(valid, vouching.possible_owners()))
    # All addresses pass here; _errors reports the wrong ones with their lines.
    steps = adoption.plan([Ownership(row.username, row.owners) for row in filled.values()], emails)
    if errors := _errors(rows, {step.name: step for step in steps}, usable):
        raise _invalid(*errors)
    return steps, len(rows) - len(filled)


def _invalid(*errors: str) -> InvalidSource:
    return InvalidSource("\n".join(["The file is invalid:", *errors]))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _invalid(f"{path}: {error.strerror}.") from error
    if len(content) > MAX_FILE_BYTES:
        raise _invalid(f"{path}: the file is larger than {MAX_FILE_BYTES // 1024 // 1024} MB.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _invalid(f"{path}: the file is not UTF-8. Save it as 'CSV UTF-8'.") from None


def _rows(text: str) -> list[Row]:
    """Return the rows of a CSV file. No name is looked up.

    The first line names the columns, which include ``username`` and ``owners``. The delimiter is the first line's: a
    comma, a semicolon or a tab. Addresses in a cell are separated by spaces, semicolons or commas.
    """
    first = text.lstrip("\r\n").partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    rows: list[Row] = []
    errors: list[str] = []
    try:
        header = [cell.strip().casefold() for cell in next((cells for cells in reader if cells), [])]
        if not {"username", "owners"} <= set(header):
            raise _invalid("line 1: the first line must name the columns, including username and owners.")
        line = reader.line_num + 1
        for cells in reader:
            if any(cell.strip() for cell in cells[: len(header)]):
                named = dict(zip(header, map(_unescape_formula, cells), strict=False))
                owners = filter(None, _SEPARATORS.split(named.get("owners", "")))
                rows.append(Row(line, named.get("username", ""), tuple(dict.fromkeys(map(normalize_address, owners)))))
            if any(cells[len(header) :]):
                errors.append(
                    f"line {line}: it has {len(cells)} cells, but the first line has {len(header)}. "
                    "Quote a cell with several addresses, or separate them with spaces."
                )
            line = reader.line_num + 1  # of the next row; cells may contain line breaks
    except csv.Error as error:
        errors.append(f"line {reader.line_num}: {error}.")
    errors += [f"line {row.line}: it names no Pulse user." for row in rows if not row.username]
    if errors:
        raise _invalid(*errors)
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
