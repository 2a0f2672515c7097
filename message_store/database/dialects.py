"""The statements in which PostgreSQL and SQLite differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    ProgrammingError,
    connection,
)
from django.db.backends.utils import CursorWrapper

from guardian_store._ids import TICKS_PER_SECOND
from message_store.store import StoreUnavailable

CONTENTS_OF_QUEUE = "(SELECT contents FROM message_store_queuerow WHERE id = %(queue)s)"


@dataclass(frozen=True)
class Dialect:
    """SQL that differs between the databases."""

    now: str
    """The current ticks since 1970. SQLite needs the parameter ``now``, so every statement passes it."""

    new_contents: str
    """An unused number for ``contents``."""

    row_id: str
    """The database's own identifier of a row, valid within one statement."""

    row_in: str
    """A condition that matches the rows whose ``row_id`` the query ``{}`` returns.

    It makes the database run the query once and fetch only these rows, whatever its statistics say.
    """

    skip_locked: str
    """Suffix of a query that locks its rows and omits locked ones."""


DIALECTS = {
    # The database's clock, so that the clocks of several machines don't matter.
    "postgresql": Dialect(
        now=f"(SELECT (extract(epoch FROM statement_timestamp()) * {TICKS_PER_SECOND})::bigint)",
        new_contents="nextval(pg_get_serial_sequence('message_store_queuerow', 'id'))",
        row_id="ctid",
        row_in="ctid = ANY (ARRAY({}))",
        skip_locked="FOR UPDATE SKIP LOCKED",
    ),
    # This machine's clock: SQLite's is too coarse, and all its processes run on one machine. It has only one writer at
    # a time, so the number stays unused.
    "sqlite": Dialect(
        now="%(now)s",
        new_contents="""(SELECT 1 + max(
            coalesce((SELECT max(contents) FROM message_store_queuerow), 0),
            coalesce((SELECT max(contents) FROM message_store_discarded), 0)
        ))""",
        row_id="rowid",
        row_in="rowid IN ({})",
        skip_locked="",
    ),
}


@contextmanager
def as_store_errors() -> Iterator[None]:
    """Raise ``StoreUnavailable`` for errors of the database that are not the statement's fault."""
    try:
        yield
    except (DataError, IntegrityError, NotSupportedError, ProgrammingError):
        raise
    except (DatabaseError, InterfaceError) as error:
        if not connection.in_atomic_block:
            connection.close()  # the next call opens a new one
        raise StoreUnavailable(f"the database query failed: {type(error).__name__}") from error


@contextmanager
def open_cursor() -> Iterator[CursorWrapper]:
    with as_store_errors(), connection.cursor() as cursor:
        yield cursor
