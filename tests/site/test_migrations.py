"""Rolling upgrades: the previous release runs on the new tables until its last process has ended.

A migration therefore only adds. To remove something, one release stops using it, and the next release drops it. The
migration that drops it is listed in ``CONTRACTS`` with the reason why no running code uses it.
"""

import datetime
import uuid

import httpx
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
from knox.crypto import create_token_string, hash_token

from core.checks import is_older_than_version_1
from guardian_site import api_urls
from tests.support.served import database_url, serving

pytestmark = pytest.mark.sqlite

BASELINE = [
    ("core", "0001_version_1"), ("accounts", "0002_plain_names"), ("notifications", "0001_version_1"),
    ("queues", "0002_plain_names"), ("agents", "0001_version_1"),
    ("message_store", "0001_version_1"), ("consumers", "0001_initial"), ("installation", None),
]  # fmt: skip
"""The newest migrations of the first release with rolling upgrades; None for an app that it did not have."""

EXISTING = [(app, name) for app, name in BASELINE if name is not None]

FIRST = [key for key in MigrationLoader(None).graph.root_nodes() if key[0] in dict(BASELINE)]
"""The first migration of each app."""

CONTRACTS = {
    "queues.0013_fetch_attempts": "the column that it removes from the model stays, with a default of the database",
    "queues.0014_vocabulary": "fields are renamed in the code, and their columns keep their names",
}
"""Migrations that remove something or cannot be checked automatically, and why the old code still works."""

GROWING = {"queue", "queuesample", "queueevent", "notification"}
"""Tables with so many rows that building an index blocks writers for long."""

SAFE_OPERATIONS = (
    migrations.CreateModel,
    migrations.RemoveIndex,
    migrations.RenameIndex,
    migrations.AlterModelOptions,
    migrations.AlterModelManagers,
)

PYTHON_ONLY_OPTIONS = {
    "blank", "choices", "default", "editable", "error_messages", "help_text", "on_delete", "related_name",
    "related_query_name", "validators", "verbose_name",
}  # fmt: skip
"""Options of a field that do not change the database."""


def fault(operation, app, state):
    """Return why this operation breaks the old code, or None if it does not."""
    if isinstance(operation, SAFE_OPERATIONS):
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
    return "this operation is not known to be safe for the old code"


def alteration_fault(old, new):
    (*_, old_kind, _, before), (*_, new_kind, _, after) = old.deconstruct(), new.deconstruct()
    if old_kind != new_kind:
        return "the old code writes another type"
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)} - PYTHON_ONLY_OPTIONS
    if "null" in changed and not new.null:
        return "the old code writes NULL"
    if "max_length" in changed and (new.max_length or 0) < (old.max_length or 0):
        return "the old code writes longer values"
    if "db_default" in changed and not new.has_db_default():
        return "the old code leaves the value to the database"
    if left := changed - {"null", "max_length", "db_default"}:
        return f"a changed {', '.join(sorted(left))} is not known to be safe for the old code"
    return None


def is_newer(key, loader):
    return key[0] in dict(EXISTING) and not any(
        key in loader.graph.forwards_plan(baseline) for baseline in EXISTING if baseline[0] == key[0]
    )


def test_every_app_with_tables_is_checked():
    ours = [app for app in apps.get_app_configs() if "site-packages" not in app.path]
    assert {app.label for app in ours if list(app.get_models())} == set(dict(BASELINE))


def test_no_new_migration_breaks_the_previous_release():
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
def test_an_operation_that_breaks_the_old_code_is_found(operation, state):
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
def test_an_operation_that_is_safe_for_the_old_code_is_accepted(operation, state):
    assert fault(operation, "queues", state) is None


@pytest.fixture
def empty_database(tmp_path, transactional_db, django_db_blocker):
    """Create an empty database of the session's vendor and give its alias."""
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


def create_row(model, alias, made):
    """Create a row with the rows that it references, and return it."""
    values = {}
    for field in model._meta.concrete_fields:
        if field.is_relation and not field.null:
            values[field.name] = create_row(field.remote_field.model, alias, made)
        elif not field.auto_created and (field.unique or not (field.has_default() or field.null)):
            values[field.name] = sample_value(field, len(made))
    row = model._base_manager.using(alias).create(**values)
    made.append(row)
    return row


def sample_value(field, number):
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


def guardian_models(apps):
    return [
        model for model in apps.get_models() if model._meta.app_label in dict(BASELINE) and not model._meta.auto_created
    ]


def contents(apps, alias):
    return {
        model._meta.label: sorted(model._base_manager.using(alias).values_list(), key=repr)
        for model in guardian_models(apps)
    }


def migrate(alias, targets):
    executor = MigrationExecutor(connections[alias])
    executor.migrate(targets)
    return MigrationExecutor(connections[alias]).loader


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_the_old_code_works_before_and_after_migrating_and_back(empty_database):
    alias = empty_database
    loader = migrate(alias, EXISTING)
    old = loader.project_state(EXISTING).apps
    made = []
    for model in guardian_models(old):
        create_row(model, alias, made)
    before = contents(old, alias)
    assert all(before.values()), before

    newest = [key for key in loader.graph.leaf_nodes() if key[0] in dict(BASELINE)]
    assert len(newest) == len(BASELINE)
    migrate(alias, newest)
    assert contents(old, alias) == before  # the old code reads what it wrote
    for model in guardian_models(old):  # and it still writes
        create_row(model, alias, made)
        row = model._base_manager.using(alias).latest("pk")
        row.save(using=alias)
    new = loader.project_state(newest).apps
    for model in guardian_models(new):  # the new code reads all rows and writes more
        known = list(model._base_manager.using(alias).all())
        create_row(model, alias, made)
        assert model._base_manager.using(alias).count() > len(known)
    both = contents(old, alias)

    migrate(alias, BASELINE)
    assert contents(old, alias) == both
    for model in guardian_models(old):
        create_row(model, alias, made)
    left = connections[alias].introspection.table_names()
    assert not [
        table for table in left for app in dict(BASELINE).keys() - dict(EXISTING) if table.startswith(f"{app}_")
    ]


LISTS = [
    str(pattern.pattern) for pattern in api_urls.urlpatterns
    if getattr(pattern.callback, "actions", {}).get("get") == "list" and "<" not in str(pattern.pattern)
]  # fmt: skip


@pytest.fixture
def upgraded(empty_database, environment, agents):
    """Serve Guardian on a database of the first migrations that was upgraded.

    Give a client with the token of each of four people, and the UUID of their offering.
    """
    old = migrate(empty_database, FIRST).project_state(FIRST).apps

    def create(model, **values):
        return old.get_model(model)._base_manager.using(empty_database).create(**values)

    offering = create("agents.Offering", name="Cluster")
    keys = {}
    for name in ("owner", "operator", "publisher", "agent"):
        keys[name] = create_token_string()
        values = {"vouched": True, "is_staff": name == "operator", "last_login": MOMENT}
        person = create("accounts.Owner", email=f"{name}@example.org", **values)
        create("accounts.AuthToken", digest=hash_token(keys[name]), token_key=keys[name][:15], user=person)
        offering.members.add(person)
        if name == "publisher":
            offering.publishers.add(person)
    call_command("migrate", database=empty_database, verbosity=0)
    with serving(**{**environment, "DATABASE_URL": database_url(empty_database)}) as port:
        yield (
            {
                name: httpx.Client(
                    base_url=f"http://127.0.0.1:{port}/api/",
                    headers={"Authorization": f"Token {key}"},
                    timeout=60,
                    trust_env=False,
                )
                for name, key in keys.items()
            },
            offering.uuid.hex,
        )


@pytest.mark.slow
def test_tokens_from_before_scopes_keep_their_rights(upgraded):
    clients, offering = upgraded
    refused = {(name, path) for path in LISTS for name, one in clients.items() if one.get(path).status_code != 200}
    for_operators = {(name, "owners/") for name in clients if name != "operator"}
    assert refused == for_operators | {(name, "tokens/") for name in clients}

    identity = clients["agent"].post("agent-identities/", json={"offering": offering, "name": "cellar"}).json()
    registered = clients["agent"].post(f"agent-identities/{identity['uuid']}/register_queue/", json={})
    assert registered.status_code == 201
    event = {"object_type": "order", "payload": {}}
    published = clients["publisher"].post(f"offerings/{offering}/events/", json=event)
    assert published.json()["delivered"] == 1
    assert clients["owner"].patch("settings/", json={"weekly_summary": True}).status_code == 200
    assert clients["operator"].post("owners/vouch/", json={"email": "owner@example.org"}).status_code == 204


@pytest.mark.django_db(transaction=True)
def test_migrate_and_doctor_refuse_a_database_older_than_version_1(empty_database):
    recorder = MigrationRecorder(connections[empty_database])
    recorder.ensure_schema()
    recorder.record_applied("queues", "0001_initial")
    with pytest.raises(SystemCheckError, match=r"created before version 1[^$]*adopt_broker"):
        call_command("migrate", database=empty_database, verbosity=0, skip_checks=False)
    assert connections[empty_database].introspection.table_names() == ["django_migrations"]
    assert is_older_than_version_1(connections[empty_database])


@pytest.mark.django_db
def test_a_database_of_version_1_is_accepted():
    assert not is_older_than_version_1(connection)
