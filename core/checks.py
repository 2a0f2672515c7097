"""A system check of the database: `migrate` and `doctor` refuse one that was created before version 1."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder

APPS_WITH_NEW_MIGRATIONS = ("accounts", "queues", "message_store")
"""The apps whose old migrations version 1 replaced."""

OLD_DATABASE_REMEDY = (
    "Create an empty database, set DATABASE_URL to it, and run manage.py migrate. Then run manage.py adopt_broker to "
    "adopt the broker's users; the next pass lists the queues. Create tokens and channels again."
)


@register(Tags.database)
def check_version(
    app_configs: Sequence[Any] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    return [
        Error("This database was created before version 1 of Guardian.", hint=OLD_DATABASE_REMEDY, id="guardian.E022")
        for alias in databases or ()
        if is_older_than_version_1(connections[alias])
    ]


def is_older_than_version_1(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a migration that ``0001_version_1`` replaced was applied to the database."""
    applied = MigrationRecorder(connection).applied_migrations()
    return any((app, "0001_initial") in applied for app in APPS_WITH_NEW_MIGRATIONS)
