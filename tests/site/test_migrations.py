"""Rolling upgrades: the previous release runs on the new tables until its last process has ended.

A migration therefore only adds. To remove something, one release stops using it, and the next release drops it. The
migration that drops it is listed in ``CONTRACTS`` with the reason why no running code uses it.
"""

import os
import re
import subprocess
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

from core.checks import why_not_migratable
from guardian_site import api_urls
from message_store.models import Application, ApplicationKey, MessageRow, Position
from tests.site.test_docs import FROM_BEFORE_VERSION_1, shell
from tests.support.plugin import ROOT
from tests.support.rows import MOMENT, create_row
from tests.support.served import database_url, serving
from tools.postgresql import binaries

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


def changed_models(loader, key):
    """Return the models that a migration changes, as the code before it has them."""
    if not is_newer(key, loader):
        return []
    state = loader.project_state(key, at_end=False)
    operations = loader.disk_migrations[key].operations
    flat = [one for operation in operations for one in getattr(operation, "state_operations", [operation])]
    names = {one.model_name_lower for one in flat if hasattr(one, "model_name_lower")}
    return [state.apps.get_model(key[0], name) for name in sorted(names) if (key[0], name) in state.models]


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
    for model in [model for key in loader.disk_migrations for model in changed_models(loader, key)]:
        create_row(model, alias, made)  # so do all releases since
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


STORE = [("message_store", "0001_version_1"), ("message_store", "0002_stored_bytes")]


@pytest.mark.parametrize(
    ("migrated", "record", "why"),
    [
        ([], lambda recorder: recorder.record_applied("queues", "0001_initial"), "created before version 1"),
        (STORE[:1], lambda recorder: recorder.record_applied(*STORE[1]), "between two releases"),
        (STORE, lambda recorder: recorder.record_unapplied(*STORE[1]), "between two releases"),
    ],
    ids=["old", "without a column of an applied migration", "with a column of a pending migration"],
)
def test_migrate_refuses_a_database_that_it_can_not_finish_and_changes_nothing(empty_database, migrated, record, why):
    migrate(empty_database, migrated)
    recorder = MigrationRecorder(connections[empty_database])
    record(recorder)
    before = recorder.applied_migrations().keys(), connections[empty_database].introspection.table_names()
    with pytest.raises(SystemCheckError, match=f"{why}[^$]*adopt_broker"):
        call_command("migrate", database=empty_database, verbosity=0, skip_checks=False)
    assert (recorder.applied_migrations().keys(), connections[empty_database].introspection.table_names()) == before


def test_a_database_of_this_release_or_a_later_one_is_accepted(db):
    assert why_not_migratable(connection) == ""
    MigrationRecorder(connection).record_applied("queues", "9999_later")
    assert why_not_migratable(connection) == ""


OLD_ROWS = """
from django.utils import timezone
from accounts.models import Owner, PulseUser
from message_store.models import Application, ApplicationKey, MessageRow, Position, QueueRow
from queues.models import AgentIdentity, AgentVhost, Consumer, EventSubscription, Offering, Queue

alice = Owner.objects.create_user("alice@example.org", vouched=True)
bob = Owner.objects.create_user("bob@example.org")
builds = PulseUser.objects.create(username="builds", ready=True, warn_length=5, max_length=9000)
builds.owners.add(alice, bob)
Queue.objects.create(
    vhost="/", name="queue/builds/log", type="classic", durable=True, auto_delete=False, exclusive=False,
    unbounded=True, first_seen=timezone.now(), last_seen=timezone.now(),
)
AgentVhost.objects.create(owner=alice, name=alice.uuid.hex)
agent = AgentIdentity.objects.create(owner=alice, offering=Offering.objects.create(name="Cluster"), name="cellar")
login = EventSubscription.objects.create(owner=alice, identity=agent, object_type="order")
ApplicationKey.objects.create(application=Application.objects.create(name="shop"), digest="0" * 64, beginning="0" * 8)
orders = QueueRow.objects.create(
    application="shop", name="orders", created=1, partitions=1, type="user", consistency="strong", contents=1
)
MessageRow.objects.create(contents=1, partition=1, ticks=1, rest=1, body=b"a book", content_type="", expires=2**62)
Position.objects.create(queue=orders, consumer="shipping", partition=1, message_id=alice.uuid)
print(alice.uuid.hex, login.uuid.hex, Consumer.objects.create(identity=agent).rmq_username)
"""


@pytest.mark.slow
@pytest.mark.skipif(connection.vendor != "postgresql", reason="the documented commands are PostgreSQL's")
def test_what_a_database_from_before_version_1_knows_is_taken_along(empty_database, transactional_db, tmp_path):
    [commit] = re.findall(r"commit `(\w+)`", (ROOT / "docs" / "operators.md").read_text())
    if subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, check=False).returncode:
        pytest.skip("the history of the repository is not here")
    shell(f"git archive {commit} | tar --extract --directory {tmp_path}", cwd=ROOT)
    (tmp_path / "httptools.py").write_text("def __getattr__(name): return Exception")  # packages that it needed
    (tmp_path / "drf_spectacular_sidecar.py").touch()
    env = {
        "PATH": f"{binaries()}:{os.environ['PATH']}", "SECRET_KEY": "old", "OLD": database_url(empty_database),
        "DATABASE_URL": database_url(empty_database),
    }  # fmt: skip
    shell(".venv/bin/python manage.py migrate --no-input", cwd=tmp_path, env=env)
    vhost, *logins = shell(f".venv/bin/python manage.py shell -c '{OLD_ROWS}'", cwd=tmp_path, env=env).split()[-3:]

    dump = 'pg_dump "$OLD" | grep --invert-match restrict'  # a random key
    before = shell(dump, env=env)
    with pytest.raises(SystemCheckError, match=r"created before version 1[^$]*adopt_broker"):
        call_command("migrate", database=empty_database, verbosity=0, skip_checks=False)
    assert shell(dump, env=env) == before

    env["DATABASE_URL"] = database_url("default")
    owners, pulse_users, copy, lengths, queues, offerings, vhosts, users = FROM_BEFORE_VERSION_1
    shell(copy, env=env)
    assert ApplicationKey.objects.get().application.name == Position.objects.get().queue.application == "shop"
    assert bytes(MessageRow.objects.get().body) == b"a book"
    Application.objects.create(name="another")  # the sequences came along
    shell(pulse_users, cwd=tmp_path, env=env)
    assert (tmp_path / "owners.csv").read_text() == "username,owners\nbuilds,alice@example.org\n"
    for line, known in (
        (owners, ["alice@example.org"]), (lengths, ["builds", "9000"]), (queues, ["queue/builds/log"]),
        (offerings, ["Cluster"]), (vhosts, [vhost]), (users, logins),
    ):  # fmt: skip
        found = shell(line.partition(" | xargs ")[0], env=env)
        assert [one for one in known if one not in found] == []
