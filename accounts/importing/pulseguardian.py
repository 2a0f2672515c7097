"""The import from PulseGuardian: read its database, plan the steps, apply them.

The tables differ between versions, so the reader checks which columns exist first. It writes nothing, and reads
everything in one transaction, to get a consistent snapshot.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import psycopg2
import psycopg2.extensions
from allauth.account.models import EmailAddress
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef

from accounts import audit
from accounts.access import vouching
from accounts.importing import adoption
from accounts.importing.adoption import EXISTS, LEFT_OUT, Ownership, Step
from accounts.models import Owner, Vouching, check_address, normalize_address
from accounts.signing_in import owners as signing_in_owners
from core.refusals import Refusal

MAX_ROWS = 100_000
"""Of each table."""

MAX_CELL_BYTES = 1_000_000

CONNECT_TIMEOUT_SECONDS = 10
STATEMENT_TIMEOUT_SECONDS = 60

CREATE, CREATE_OPERATOR, APPROVE, PROMOTE = "create", "create as operator", "approve access", "make operator"
REASON = "Had access in PulseGuardian; by the command import_pulseguardian"

MAX_TEXT_LENGTH = 300
"""In characters; longer than any valid address or name. SQLite has no limit."""

Rows = Iterable[tuple[Any, ...]]

_URL_FORMS = "write postgres://user:password@host:5432/name, or sqlite:///path"

_COLUMNS_ON_POSTGRESQL = """
    SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE c.relname IN ('users', 'emails', 'pulse_users', 'pulse_user_owners', 'queues')
        AND c.relkind IN ('r', 'v', 'm', 'p', 'f') AND pg_table_is_visible(c.oid)
        AND a.attnum > 0 AND NOT a.attisdropped
"""
_COLUMNS_ON_SQLITE = """
    SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c
    WHERE m.name IN ('users', 'emails', 'pulse_users', 'pulse_user_owners', 'queues') AND m.type IN ('table', 'view')
"""

_SELECT_PEOPLE = "SELECT id, email, admin FROM users ORDER BY id"
_SELECT_PEOPLE_WITH_EMAILS = """
    SELECT u.id, e.address, u.admin FROM users u LEFT JOIN emails e ON e.id = u.email_id ORDER BY u.id
"""
_SELECT_PULSE_USERS = "SELECT id, username FROM pulse_users ORDER BY id"
_SELECT_OWNERS = "SELECT pulse_users_id, users_id FROM pulse_user_owners ORDER BY pulse_users_id, users_id"
_SELECT_SINGLE_OWNERS = "SELECT id, owner_id FROM pulse_users WHERE owner_id IS NOT NULL ORDER BY id"
_SELECT_QUEUES = "SELECT name, unbounded FROM queues ORDER BY name"


class SourceError(ValueError):
    """The database can't be read, or isn't PulseGuardian's. The text says why, and never contains a password."""


class Person(NamedTuple):
    """A user of PulseGuardian: the address as stored there, and whether the user is an administrator there."""

    email: str
    admin: bool


class Found(NamedTuple):
    """The content of the database.

    ``unbounded`` are the names of queues that are never deleted, or None if this version has no such flag.
    """

    people: list[Person]
    pulse_users: list[Ownership]
    unbounded: list[str] | None


# Reading


def read(url: str) -> Found:
    """Return the content of the PulseGuardian database at this URL, ``postgres://…`` or ``sqlite:///…``.

    Raises:
        SourceError: the database can't be read, or isn't PulseGuardian's.
    """
    scheme, _, rest = url.partition("://")
    dialect = scheme.partition("+")[0].lower()  # SQLAlchemy's URLs may name the driver, too
    if dialect in ("mysql", "mariadb"):
        raise SourceError(
            "MySQL is not supported. Copy the database to PostgreSQL or SQLite first, for example with pgloader."
        )
    if dialect in ("postgres", "postgresql") and rest:
        return _read_postgresql(rest)
    if dialect == "sqlite" and rest:
        return _read_sqlite(rest)
    raise SourceError(f"This is not the URL of a supported database; {_URL_FORMS}.")


def _read_postgresql(rest: str) -> Found:
    parameters = _parameters(rest)
    try:
        with closing(psycopg2.connect(**parameters)) as connection:
            connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            connection.set_client_encoding("UTF8")

            def rows(statement: str) -> Rows:
                # A named cursor keeps the rows on the server until they are fetched.
                with connection.cursor(name="import_pulseguardian") as cursor:
                    cursor.execute(statement)
                    yield from cursor

            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL statement_timeout = %s", [STATEMENT_TIMEOUT_SECONDS * 1000])
            return _read(rows(_COLUMNS_ON_POSTGRESQL), rows)
    except (psycopg2.Error, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        if password := parameters.get("password"):
            text = text.replace(password, "…")
        raise SourceError(f"The database can't be read: {text}") from None


def _parameters(rest: str) -> dict[str, Any]:
    """Return the connection parameters. libpq's own errors for an invalid URL would contain the password."""
    invalid = SourceError(
        f"This is not the URL of a database; {_URL_FORMS}. In a user or password write @ as %40, / as %2F and % as %25."
    )
    try:
        parameters: dict[str, Any] = psycopg2.extensions.parse_dsn("postgresql://" + rest)
    except psycopg2.Error:
        raise invalid from None
    # An unescaped @ or / moves a part of the password into the host or the name, which errors would show.
    misparsed = any("@" in parameters.get(name, "") for name in ("host", "dbname"))
    if misparsed or not parameters.get("port", "0").replace(",", "0").isdecimal():
        raise invalid
    return {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "application_name": "guardian", **parameters}


def _read_sqlite(rest: str) -> Found:
    path = Path(rest.removeprefix("/").partition("?")[0])
    if not path.is_file():
        raise SourceError(f"There is no file '{path}'. An absolute path needs four slashes: sqlite:////var/lib/…")
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        with closing(
            sqlite3.connect(uri, uri=True, timeout=CONNECT_TIMEOUT_SECONDS, isolation_level=None)
        ) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            connection.execute("PRAGMA query_only = ON")
            connection.execute("BEGIN")

            return _read(connection.execute(_COLUMNS_ON_SQLITE), connection.execute)
    except sqlite3.Error as error:
        raise SourceError(f"The database '{path}' can't be read: {error}.") from error


def _read(columns: Rows, rows: Callable[[str], Rows]) -> Found:
    existing: dict[str, set[str]] = {}
    for table, column in columns:
        existing.setdefault(table, set()).add(column)
    # One version has a separate table of addresses. In earlier ones a Pulse user has one owner.
    by_address = "email_id" in existing.get("users", ()) and "email" not in existing["users"]
    many_owners = "pulse_user_owners" in existing
    needed = {
        "users": ["id", "email_id" if by_address else "email", "admin"],
        "emails": ["id", "address"] if by_address else [],
        "pulse_users": ["id", "username"] if many_owners else ["id", "username", "owner_id"],
        "pulse_user_owners": ["pulse_users_id", "users_id"] if many_owners else [],
        "queues": ["name"],
    }
    _require(existing, needed)

    people = {
        id_: Person(_text(email), _flag(admin, "users.admin"))
        for id_, email, admin in _limited(rows(_SELECT_PEOPLE_WITH_EMAILS if by_address else _SELECT_PEOPLE))
    }
    owners: dict[Any, list[str]] = {}
    for pulse_user, owner in _limited(rows(_SELECT_OWNERS if many_owners else _SELECT_SINGLE_OWNERS)):
        if owner in people and people[owner].email:
            owners.setdefault(pulse_user, []).append(people[owner].email)
    pulse_users = [
        Ownership(_text(name), tuple(owners.get(id_, ()))) for id_, name in _limited(rows(_SELECT_PULSE_USERS))
    ]
    if "unbounded" not in existing["queues"]:
        return Found(list(people.values()), pulse_users, None)
    queues = [(_text(name), _flag(flag, "queues.actions.unbounded")) for name, flag in _limited(rows(_SELECT_QUEUES))]
    return Found(list(people.values()), pulse_users, [name for name, is_unbounded in queues if is_unbounded])


def _limited(rows: Rows) -> Iterator[tuple[Any, ...]]:
    for number, row in enumerate(rows):
        if number == MAX_ROWS:
            raise SourceError(f"A table has more than {MAX_ROWS:,} rows. PulseGuardian's have far fewer.")
        yield row


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)[:MAX_TEXT_LENGTH]


def _flag(cell: Any, column: str) -> bool:
    """Return the value of a boolean column in any of the databases' notations. NULL is False."""
    flag = _FLAGS.get(_text(cell).strip().lower())
    if flag is None:
        raise SourceError(f"The column {column} contains '{_text(cell)[:20]}' instead of 0, 1, true or false.")
    return flag


_FLAGS = {"": False, "0": False, "f": False, "false": False, "1": True, "t": True, "true": True}


def _require(existing: Mapping[str, set[str]], needed: Mapping[str, Sequence[str]]) -> None:
    tables = [table for table, columns in needed.items() if columns and table not in existing]
    columns = [
        f"{table}.{column}"
        for table, columns in needed.items()
        for column in columns
        if table in existing and column not in existing[table]
    ]
    if tables or columns:
        missing = [f"the table {name}" for name in tables] + [f"the column {name}" for name in columns]
        raise SourceError(
            f"This is not a PulseGuardian database, or one of an unknown version: it lacks {', '.join(missing)}."
        )


# Planning


def plan(found: Found, *, operators: bool) -> list[Step]:
    """Return the steps for owners and Pulse users. Sends two requests to the broker and changes nothing.

    ``operators``: make administrators of PulseGuardian operators here.

    Raises:
        BrokerError: the broker is unreachable or refuses.
    """
    people = _plan_people(found.people, operators=operators)
    usable = {step.name for step in people if step.do != LEFT_OUT}
    return people + adoption.plan(found.pulse_users, usable)


def _plan_people(people: Iterable[Person], *, operators: bool) -> list[Step]:
    steps: list[Step] = []
    admins: dict[str, bool] = {}
    for email, admin in people:
        address = normalize_address(email)
        if not address:
            steps.append(Step("owner", email, LEFT_OUT, notes=("It has no address.",)))
        elif address in admins:
            admins[address] = admins[address] or admin
            steps.append(Step("owner", email, LEFT_OUT, notes=(f"It is the same address as {address}.",)))
        else:
            try:
                check_address(address)
            except ValidationError:
                steps.append(Step("owner", email, LEFT_OUT, notes=("It is not a valid e-mail address.",)))
            else:
                admins[address] = admin
    # An owner with a record who is not vouched for had the vouching withdrawn.
    here = {
        owner.email: owner
        for owner in Owner.objects.annotate(has_record=Exists(Vouching.objects.filter(owner=OuterRef("pk"))))
    }
    decided = [_person(address, here.get(address), admin=admins[address], operators=operators) for address in admins]
    return decided + steps


def _person(address: str, owner: Any, *, admin: bool, operators: bool) -> Step:
    """Return the step for one address. ``owner`` is the owner here, annotated with ``has_record``, or None."""
    notes = (
        ("An administrator in PulseGuardian; becomes an operator with --operators.",) if admin and not operators else ()
    )
    if owner is None:
        return Step("owner", address, CREATE_OPERATOR if admin and operators else CREATE, notes=notes)
    if not owner.is_active:
        return Step("owner", address, LEFT_OUT, notes=("Deactivated here.",))
    if admin and operators and not owner.is_staff:
        return Step("owner", address, PROMOTE)
    if owner.vouched or owner.is_staff:
        return Step("owner", address, EXISTS, notes=() if owner.is_staff else notes)
    if owner.has_record:
        return Step("owner", address, LEFT_OUT, notes=("Access was withdrawn here.",))
    return Step("owner", address, APPROVE, notes=notes)


# Applying


def apply(steps: Sequence[Step]) -> None:
    """Apply the steps, owners first. Each step is applied completely or not at all. After a failure, plan again.

    Raises:
        Refusal: another request changed an owner or Pulse user of the plan.
    """
    for batch in adoption.batches([step for step in steps if step.do in (CREATE, CREATE_OPERATOR)]):
        _create_owners(batch)
    for step in steps:
        if step.do in (APPROVE, PROMOTE):
            _change_owner(step)
    adoption.adopt(steps, notify=False)  # they own the Pulse users already


def _create_owners(steps: Sequence[Step]) -> None:
    owners = []
    for step in steps:
        is_operator = step.do == CREATE_OPERATOR
        owner = Owner(email=step.name, vouched=True, is_staff=is_operator, is_superuser=is_operator)
        owner.set_unusable_password()
        owners.append(owner)
    try:
        with transaction.atomic():
            Owner.objects.bulk_create(owners)
            Vouching.objects.bulk_create([Vouching(owner=owner, vouched=True, reason=REASON) for owner in owners])
            # PulseGuardian's sign-in has verified the addresses. Old rows belong to previous owners of the addresses.
            EmailAddress.objects.filter(email__in=[owner.email for owner in owners]).delete()
            EmailAddress.objects.bulk_create(
                [EmailAddress(user=owner, email=owner.email, primary=True, verified=True) for owner in owners]
            )
            audit.record(
                None,
                "imported owners",
                None,
                owners=[owner.email for owner in owners if not owner.is_staff],
                operators=[owner.email for owner in owners if owner.is_staff],
            )
    except IntegrityError as error:
        raise Refusal("One of these people signed in for the first time just now.") from error


def _change_owner(step: Step) -> None:
    with transaction.atomic():
        owner = Owner.objects.filter(email=step.name).first()
        if owner is None:
            raise Refusal(f"{step.name} no longer exists.")
        owner = vouching.lock(owner)
        if step.do == PROMOTE:
            owner.is_staff = owner.is_superuser = True
            owner.save(update_fields=["is_staff", "is_superuser"])
        signing_in_owners.mark_address_verified(owner)
        if not owner.vouched:
            vouching.vouch(owner, None, REASON)
