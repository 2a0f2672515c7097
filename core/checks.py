"""A system check of the database: `migrate` and `doctor` refuse one that was created before version 1."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder

STARTED_ANEW = ("accounts", "queues", "message_store")
"""The apps whose migrations started anew with version 1."""

REMEDY = (
    "Create an empty database, set DATABASE_URL to it, and run manage.py migrate. Then take over what the broker has "
    "with manage.py adopt_broker; the next pass lists the queues again. Create tokens and channels anew."
)


@register(Tags.database)
def check_version(
    app_configs: Sequence[Any] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Refuse a database that was created before version 1."""
    return [
        Error("This database was created before version 1 of Guardian.", hint=REMEDY, id="guardian.E022")
        for alias in databases or ()
        if is_older_than_version_1(connections[alias])
    ]


def is_older_than_version_1(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the database has the tables of migrations that were replaced by ``0001_version_1``."""
    applied = MigrationRecorder(connection).applied_migrations()
    return any((app, "0001_initial") in applied for app in STARTED_ANEW)
