"""The import from PulseGuardian: read its database, plan the steps, apply them.

The tables are those of PulseGuardian's last version. The reader writes nothing, and reads everything in one
transaction, to get a consistent snapshot.
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
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
from accounts.importing.adoption import EXISTS, LEFT_OUT, InvalidSource, Ownership, Step
from accounts.models import Owner, Vouching, check_address, normalize_address, owner_with_address, owners_by_address
from accounts.signing_in import owners as signing_in_owners
from core.refusals import Refusal

CONNECT_TIMEOUT_SECONDS = 10
STATEMENT_TIMEOUT_SECONDS = 60

CREATE, CREATE_OPERATOR, APPROVE, PROMOTE = "create", "create as operator", "approve access", "make operator"
REASON = "Had access in PulseGuardian; by the command import_pulseguardian"

_URL_FORMS = "write postgres://user:password@host:5432/name, or sqlite:///path"

_PEOPLE = "SELECT email, admin FROM users ORDER BY id"
_PULSE_USERS = """
    SELECT p.id, p.username, u.email FROM pulse_users p
    LEFT JOIN pulse_user_owners o ON o.pulse_users_id = p.id LEFT JOIN users u ON u.id = o.users_id
    ORDER BY p.id, u.id
"""
_QUEUES = "SELECT name, unbounded FROM queues ORDER BY name"

_FLAGS = {None: False, 0: False, 1: True}

Rows = Iterable[tuple[Any, ...]]


class Person(NamedTuple):
    """A user of PulseGuardian: the address as stored there, and whether the user is an administrator there."""

    email: str
    admin: bool


class Found(NamedTuple):
    """The content of the database. ``unbounded`` are the names of queues that are never deleted."""

    people: list[Person]
    pulse_users: list[Ownership]
    unbounded: list[str]


# Reading


def read(url: str) -> Found:
    """Return the content of the PulseGuardian database at this URL, ``postgres://…`` or ``sqlite:///…``.

    Raises InvalidSource if the database can't be read, or isn't PulseGuardian's.
    """
    scheme, _, rest = url.partition("://")
    dialect = scheme.partition("+")[0].lower()  # SQLAlchemy's URLs may name the driver, too
    if dialect in ("mysql", "mariadb"):
        raise InvalidSource(
            "MySQL is not supported. Copy the database to PostgreSQL or SQLite first, for example with pgloader."
        )
    if dialect in ("postgres", "postgresql") and rest:
        return _read_postgresql(rest)
    if dialect == "sqlite" and rest:
        return _read_sqlite(rest)
    raise InvalidSource(f"This is not the URL of a supported database; {_URL_FORMS}.")


def _read_postgresql(rest: str) -> Found:
    parameters = _parameters(rest)
    try:
        with closing(psycopg2.connect(**parameters)) as connection:
            connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            connection.set_client_encoding("UTF8")
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL statement_timeout = %s", [STATEMENT_TIMEOUT_SECONDS * 1000])

                def rows(statement: str) -> Rows:
                    cursor.execute(statement)
                    yield from cursor

                return _read(rows)
    except (psycopg2.Error, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        if password := parameters.get("password"):
            text = text.replace(password, "…")
        raise InvalidSource(f"The database can't be read: {text}") from None


def _parameters(rest: str) -> dict[str, Any]:
    """Return the connection parameters. libpq's own errors for an invalid URL would contain the password."""
    invalid = InvalidSource(
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
        raise InvalidSource(f"There is no file '{path}'. An absolute path needs four slashes: sqlite:////var/lib/…")
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        with closing(
            sqlite3.connect(uri, uri=True, timeout=CONNECT_TIMEOUT_SECONDS, isolation_level=None)
        ) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            connection.execute("PRAGMA query_only = ON")
            connection.execute("BEGIN")
            return _read(connection.execute)
    except sqlite3.Error as error:
        raise InvalidSource(f"The database '{path}' can't be read: {error}.") from error


def _read(rows: Callable[[str], Rows]) -> Found:
    people = [Person(email or "", _flag(admin, "users.admin")) for email, admin in rows(_PEOPLE)]
    pulse_users: dict[int, Ownership] = {}
    for id_, username, email in rows(_PULSE_USERS):
        _, owners = pulse_users.get(id_, ("", ()))
        pulse_users[id_] = Ownership(username or "", (*owners, email) if email else owners)
    unbounded = [name for name, flag in rows(_QUEUES) if _flag(flag, "queues.unbounded")]
    return Found(people, list(pulse_users.values()), unbounded)


def _flag(cell: Any, column: str) -> bool:
    """Return the value of a boolean column, which is a number on SQLite. NULL is False."""
    if cell not in _FLAGS:
        raise InvalidSource(f"The column {column} contains '{str(cell)[:20]}' instead of 0, 1, true or false.")
    return _FLAGS[cell]


# Planning


def plan(found: Found, *, operators: bool) -> list[Step]:
    """Return the steps for owners and Pulse users. Sends two requests to the broker and changes nothing.

    ``operators``: make administrators of PulseGuardian operators here.
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
    with_records = Owner.objects.annotate(has_record=Exists(Vouching.objects.filter(owner=OuterRef("pk"))))
    here = owners_by_address(admins, with_records)
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
    """Apply the steps, owners first. Each step is applied completely or not at all. After a failure, plan again."""
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
        owner = owner_with_address(step.name)
        if owner is None:
            raise Refusal(f"{step.name} no longer exists.")
        owner = vouching.lock(owner)
        if step.do == PROMOTE:
            owner.is_staff = owner.is_superuser = True
            owner.save(update_fields=["is_staff", "is_superuser"])
        signing_in_owners.mark_address_verified(owner)
        if not owner.vouched:
            vouching.vouch(owner, None, REASON)
