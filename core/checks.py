"""A system check of the database: `migrate` and `doctor` refuse one that can't be migrated, before it is changed."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState

APPS_WITH_NEW_MIGRATIONS = ("accounts", "queues", "message_store")
"""The apps whose old migrations version 1 replaced."""

OUR_APPS = frozenset({"core", "accounts", "notifications", "queues", "agents", "message_store"})

OLD_DATABASE_REMEDY = (
    "Create an empty database, set DATABASE_URL to it, and run manage.py migrate. Then run manage.py adopt_broker to "
    "adopt the broker's users; the next pass lists the queues. See 'From before version 1' in docs/operators.md."
)


@register(Tags.database)
def check_migrations(
    app_configs: Sequence[Any] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    return [
        Error(f"This database can't be migrated: {why}.", hint=OLD_DATABASE_REMEDY, id="guardian.E022")
        for alias in databases or ()
        if (why := why_not_migratable(connections[alias]))
    ]


def why_not_migratable(connection: BaseDatabaseWrapper) -> str:
    """Return why migrations of this database were replaced or would fail halfway, or "" if they are fine."""
    applied = MigrationRecorder(connection).applied_migrations()
    if any((app, "0001_initial") in applied for app in APPS_WITH_NEW_MIGRATIONS):
        return "it was created before version 1 of Guardian"
    differing = [".".join(column) for column in sorted(_differences(connection))]
    if not differing:
        return ""
    more = f" and {len(differing) - 3} more columns" if len(differing) > 3 else ""
    return f"it is from between two releases, since its migrations don't match {', '.join(differing[:3])}{more}"


def _differences(connection: BaseDatabaseWrapper) -> set[tuple[str, str]]:
    """Return the columns of applied migrations that are missing, and those of pending migrations that exist.

    Those of a newer release are in no migration here, and don't count.
    """
    loader = MigrationLoader(connection)
    applied = _columns(loader.project_state([key for key in loader.applied_migrations if key in loader.graph.nodes]))
    pending = _columns(loader.project_state()) - applied
    introspection = connection.introspection
    with connection.cursor() as cursor:
        existing = {
            (table, column.name)
            for table in introspection.table_names(cursor)
            for column in introspection.get_table_description(cursor, table)
        }
    return (applied - existing) | (pending & existing)


def _columns(state: ProjectState) -> set[tuple[str, str]]:
    return {
        (model._meta.db_table, field.column)
        for model in state.apps.get_models(include_auto_created=True)
        if model._meta.app_label in OUR_APPS
        for field in model._meta.local_concrete_fields
        if field.column
    }
