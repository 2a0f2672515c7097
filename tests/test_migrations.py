"""Releases follow each other without a break: the old code runs on the new tables until the last of it has ended.

A migration therefore only adds. What is to go is first no longer used, by a release of its own, and goes with the next
one: that migration is named in ``CONTRACTS``, with the reason why no code that may still run uses it.
"""

import datetime
import uuid

import pytest
from django.apps import apps
from django.contrib.postgres.operations import AddIndexConcurrently
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections, migrations, models
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ModelState, ProjectState

from core.checks import is_older_than_version_1

BASELINE = [
    ("core", "0001_version_1"), ("accounts", "0001_version_1"), ("notifications", "0001_version_1"),
    ("queues", "0001_version_1"), ("agents", "0001_version_1"),
    ("message_store", "0001_version_1"), ("consumers", "0001_initial"),
]  # fmt: skip
"""The newest migrations of the first release that is followed by another without a break; None: it had no such app."""

THERE = [(app, name) for app, name in BASELINE if name is not None]

CONTRACTS: dict[str, str] = {}
"""Migrations that take something away, or that nobody can judge by what they are made of; why the old code survives."""

GROWING = {"queue", "queuesample", "queueevent", "notification"}
"""Tables with so many rows that building an index holds up everybody who writes to them."""

HARMLESS = (
    migrations.CreateModel,
    migrations.RemoveIndex,
    migrations.RenameIndex,
    migrations.AlterModelOptions,
    migrations.AlterModelManagers,
)

IN_PYTHON = {
    "blank", "choices", "default", "editable", "error_messages", "help_text", "on_delete", "related_name",
    "related_query_name", "validators", "verbose_name",
}  # fmt: skip
"""What of a field the database knows nothing of."""


def fault(operation, app, state):
    """Return what the old code would not survive in this; None: nothing."""
    if isinstance(operation, HARMLESS):
        return None
    if isinstance(operation, migrations.AddField):
        field = operation.field
        if field.many_to_many or field.null or field.has_db_default():
            return None
        return "the old code writes rows without it: it needs null=True or a db_default"
    if isinstance(operation, migrations.AddIndex):
        if operation.model_name.lower() in GROWING and not isinstance(operation, AddIndexConcurrently):
            return "its table grows: build the index concurrently on PostgreSQL, in a migration that isn't atomic"
        return None
    if isinstance(operation, migrations.AlterField):
        return alteration_fault(
            state.models[app, operation.model_name.lower()].get_field(operation.name), operation.field
        )
    return "nobody can say that the old code survives it"


def alteration_fault(old, new):
    (*_, old_kind, _, before), (*_, new_kind, _, after) = old.deconstruct(), new.deconstruct()
    if old_kind != new_kind:
        return "the old code writes another type"
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)} - IN_PYTHON
    if "null" in changed and not new.null:
        return "the old code writes NULL"
    if "max_length" in changed and (new.max_length or 0) < (old.max_length or 0):
        return "the old code writes longer ones"
    if "db_default" in changed and not new.has_db_default():
        return "the old code leaves the value to the database"
    if left := changed - {"null", "max_length", "db_default"}:
        return f"nobody can say that the old code survives another {', '.join(sorted(left))}"
    return None


def is_newer(key, loader):
    return key[0] in dict(THERE) and not any(
        key in loader.graph.forwards_plan(baseline) for baseline in THERE if baseline[0] == key[0]
    )


def test_every_app_of_ours_that_has_tables_is_looked_at():
    ours = [app for app in apps.get_app_configs() if "site-packages" not in app.path]
    assert {app.label for app in ours if list(app.get_models())} == set(dict(BASELINE))


def test_a_migration_takes_nothing_away_that_the_release_before_it_uses():
    loader = MigrationLoader(None)
    newer = [key for key in loader.disk_migrations if is_newer(key, loader)]
    faults = []
    for key in newer:
        state = loader.project_state(key, at_end=False)
        for operation in loader.disk_migrations[key].operations:
            if why := fault(operation, key[0], state):
                faults.append(f"{'.'.join(key)}: {operation.describe()}: {why}")
            operation.state_forwards(key[0], state)
    names = {".".join(key) for key in newer}
    assert [one for one in faults if one.split(":")[0] not in CONTRACTS] == []
    assert set(CONTRACTS) <= names
    assert all(CONTRACTS.values())


@pytest.fixture
def state():
    fields = [("id", models.BigAutoField(primary_key=True)), ("name", models.CharField(max_length=20, null=True))]
    state = ProjectState()
    state.add_model(ModelState("queues", "Queue", fields))
    state.add_model(ModelState("queues", "Pass", fields))
    return state


NAME = models.CharField(max_length=20)


@pytest.mark.parametrize(
    "operation",
    [
        migrations.RemoveField("queue", "name"),
        migrations.RenameField("queue", "name", "title"),
        migrations.DeleteModel("queue"),
        migrations.RenameModel("queue", "line"),
        migrations.AlterModelTable("queue", "line"),
        migrations.RunPython(migrations.RunPython.noop),
        migrations.RunSQL("DROP TABLE queues_queue"),
        migrations.AddField("queue", "title", NAME),
        migrations.AddField("queue", "title", models.CharField(max_length=20, default="")),
        migrations.AddConstraint("queue", models.UniqueConstraint(fields=["name"], name="one")),
        migrations.AddIndex("queue", models.Index(fields=["name"], name="by_name")),
        migrations.AlterField("queue", "name", models.CharField(max_length=20)),
        migrations.AlterField("queue", "name", models.CharField(max_length=19, null=True)),
        migrations.AlterField("queue", "name", models.CharField(max_length=20, null=True, unique=True)),
        migrations.AlterField("queue", "name", models.CharField(max_length=20, null=True, db_column="title")),
        migrations.AlterField("queue", "name", models.IntegerField(null=True)),
    ],
    ids=lambda operation: operation.describe(),
)
def test_what_the_old_code_would_not_survive_is_found(operation, state):
    assert fault(operation, "queues", state)


@pytest.mark.parametrize(
    "operation",
    [
        migrations.CreateModel("Line", [("id", models.BigAutoField(primary_key=True))]),
        migrations.AddField("queue", "title", models.CharField(max_length=20, null=True)),
        migrations.AddField("queue", "title", models.CharField(max_length=20, db_default="")),
        migrations.AddIndex("pass", models.Index(fields=["name"], name="by_name")),
        AddIndexConcurrently("queue", models.Index(fields=["name"], name="by_name")),
        migrations.AlterField("queue", "name", models.CharField(max_length=21, null=True, help_text="In words.")),
        migrations.AlterField("queue", "name", models.CharField(max_length=20, null=True, db_default="")),
    ],
    ids=lambda operation: operation.describe(),
)
def test_what_the_old_code_survives_is_let_through(operation, state):
    assert fault(operation, "queues", state) is None


@pytest.fixture
def empty_database(tmp_path, django_db_blocker):
    """Give the alias of a database of the test's own, of the kind that the session has, without a table in it."""
    name = f"rolling_{uuid.uuid4().hex[:12]}"
    with django_db_blocker.unblock():
        options = {**connections.settings["default"], "NAME": str(tmp_path / name)}
        if connection.vendor == "postgresql":
            options["NAME"] = name
            with connection._nodb_cursor() as cursor:
                cursor.execute(f'CREATE DATABASE "{name}"')
        connections.settings["rolling"] = options
        yield "rolling"
        connections["rolling"].close()
        del connections["rolling"], connections.settings["rolling"]
        if connection.vendor == "postgresql":
            with connection._nodb_cursor() as cursor:
                cursor.execute(f'DROP DATABASE "{name}"')


MOMENT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def fill(model, alias, made):
    """Write a row as this model's release does, with the rows that it leads to, and return it."""
    values = {}
    for field in model._meta.concrete_fields:
        if field.is_relation and not field.null:
            values[field.name] = fill(field.remote_field.model, alias, made)
        elif not field.auto_created and (field.unique or not (field.has_default() or field.null)):
            values[field.name] = invented(field, len(made))
    row = model._base_manager.using(alias).create(**values)
    made.append(row)
    return row


def invented(field, number):
    if isinstance(field, models.UUIDField):
        return uuid.uuid4()
    if isinstance(field, models.DateTimeField):
        return MOMENT
    if isinstance(field, models.BooleanField):
        return True
    if isinstance(field, models.IntegerField | models.FloatField):
        return number
    if isinstance(field, models.JSONField):
        return {"number": number}
    if isinstance(field, models.BinaryField):
        return b"\x00\xff"
    return f"{field.name[:3]}-{number}"[: field.max_length]


def of_ours(apps):
    return [
        model for model in apps.get_models() if model._meta.app_label in dict(BASELINE) and not model._meta.auto_created
    ]


def contents(apps, alias):
    return {
        model._meta.label: sorted(model._base_manager.using(alias).values_list(), key=repr) for model in of_ours(apps)
    }


def migrate(alias, targets):
    executor = MigrationExecutor(connections[alias])
    executor.migrate(targets)
    return MigrationExecutor(connections[alias]).loader


@pytest.mark.django_db(transaction=True)
def test_the_old_code_goes_on_while_a_filled_database_is_migrated_and_back(empty_database):
    alias = empty_database
    loader = migrate(alias, THERE)
    old = loader.project_state(THERE).apps
    made = []
    for model in of_ours(old):
        fill(model, alias, made)
    before = contents(old, alias)
    assert all(before.values()), before

    newest = [key for key in loader.graph.leaf_nodes() if key[0] in dict(BASELINE)]
    assert len(newest) == len(BASELINE)
    migrate(alias, newest)
    assert contents(old, alias) == before  # what it wrote is what it reads
    for model in of_ours(old):  # and it writes on
        fill(model, alias, made)
        row = model._base_manager.using(alias).latest("pk")
        row.save(using=alias)
    new = loader.project_state(newest).apps
    for model in of_ours(new):  # the new code reads all of it, and writes beside it
        known = list(model._base_manager.using(alias).all())
        fill(model, alias, made)
        assert model._base_manager.using(alias).count() > len(known)
    both = contents(old, alias)

    migrate(alias, BASELINE)
    assert contents(old, alias) == both
    for model in of_ours(old):
        fill(model, alias, made)
    left = connections[alias].introspection.table_names()
    assert not [table for table in left for app in dict(BASELINE).keys() - dict(THERE) if table.startswith(f"{app}_")]


@pytest.mark.django_db(transaction=True)
def test_a_database_of_before_version_1_is_refused_by_migrate_and_by_the_doctor(empty_database):
    recorder = MigrationRecorder(connections[empty_database])
    recorder.ensure_schema()
    recorder.record_applied("queues", "0001_initial")
    with pytest.raises(SystemCheckError, match=r"created before version 1[^$]*adopt_broker"):
        call_command("migrate", database=empty_database, verbosity=0, skip_checks=False)
    assert connections[empty_database].introspection.table_names() == ["django_migrations"]
    assert is_older_than_version_1(connections[empty_database])


@pytest.mark.django_db
def test_a_database_of_version_1_is_not():
    assert not is_older_than_version_1(connection)
