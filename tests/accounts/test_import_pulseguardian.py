"""``import_pulseguardian``: from PulseGuardian's databases to owners, Pulse users and flags."""

import hashlib
import io
import json
import re
import sqlite3
import uuid
from importlib import import_module
from pathlib import Path

import psycopg2
import pytest
from allauth.account.models import EmailAddress
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone
from psycopg2 import sql

from accounts.access import vouching
from accounts.importing import adoption, pulseguardian
from accounts.importing.adoption import InvalidSource
from accounts.models import AuditEntry, Owner, PulseUser, Vouching
from accounts.pulse_users.ownership import find_owners
from core import locks
from core.leases import lease
from core.refusals import Refusal
from notifications.models import Notification
from queues.actions import unbounded
from queues.guard.monitor import LEASE
from queues.guard.once import run_once
from queues.models import Queue, QueueEvent
from rabbit.management import Management
from rabbit.permissions import FULL_ACCESS, Permissions
from tests.accounts.test_adopt_broker import owners_by_pulse_user
from tests.conftest import Amqp
from tests.support.toolbox import Killed, calling_first, queue_names, url_for

pytestmark = pytest.mark.usefixtures("guarded")

# The tables of the last version.
TABLES = [
    "CREATE TABLE users (id INTEGER NOT NULL PRIMARY KEY, email VARCHAR(255) UNIQUE, admin BOOLEAN)",
    "CREATE TABLE pulse_users (id INTEGER NOT NULL PRIMARY KEY, username VARCHAR(255) UNIQUE)",
    "CREATE TABLE pulse_user_owners (users_id INTEGER REFERENCES users (id),"
    " pulse_users_id INTEGER REFERENCES pulse_users (id))",
    "CREATE TABLE queues (name VARCHAR(255) NOT NULL PRIMARY KEY, owner_id INTEGER REFERENCES pulse_users (id),"
    " size INTEGER, unbounded BOOLEAN, warned BOOLEAN, durable BOOLEAN NOT NULL)",
    "CREATE TABLE bindings (id INTEGER NOT NULL PRIMARY KEY, exchange VARCHAR(255), routing_key VARCHAR(255),"
    " queue_name VARCHAR(255) REFERENCES queues (name))",
]


class Source:
    """A PulseGuardian database, on SQLite or on the server of Guardian's own."""

    def __init__(self, url, opened):
        self.url, self._opened = url, opened
        self._mark = "?" if url.startswith("sqlite") else "%s"

    def run(self, statement, *values):
        cursor = self._opened.cursor()
        cursor.execute(statement.replace("?", self._mark), values)
        self._opened.commit()

    def make(self, tables=TABLES):
        for table in tables:
            self.run(table)

    def person(self, number, email, admin=False):
        self.run("INSERT INTO users (id, email, admin) VALUES (?, ?, ?)", number, email, admin)

    def pulse_user(self, number, username, *owners):
        self.run("INSERT INTO pulse_users (id, username) VALUES (?, ?)", number, username)
        for owner in owners:
            self.run("INSERT INTO pulse_user_owners (users_id, pulse_users_id) VALUES (?, ?)", owner, number)

    def queue(self, name, flag=False):
        self.run(
            "INSERT INTO queues (name, size, unbounded, warned, durable) VALUES (?, 3, ?, ?, ?)",
            name, flag, False, True,
        )  # fmt: skip


@pytest.fixture
def empty_source(tmp_path):
    """Return an empty database of the same kind as Guardian's own."""
    if connection.vendor == "sqlite":
        opened = sqlite3.connect(tmp_path / "pulse guardian.db")
        yield Source(f"sqlite:///{tmp_path}/pulse guardian.db", opened)
        opened.close()
        return
    server = connection.settings_dict
    name = f"pulseguardian_{uuid.uuid4().hex[:8]}"
    reach = {"host": server["HOST"], "port": server["PORT"], "user": server["USER"], "password": server["PASSWORD"]}
    administering = psycopg2.connect(**reach, dbname=server["NAME"])
    administering.autocommit = True
    administering.cursor().execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    opened = psycopg2.connect(**reach, dbname=name)
    yield Source("postgresql://{user}:{password}@{host}:{port}/".format(**reach) + name, opened)
    opened.close()
    administering.cursor().execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
    administering.close()


@pytest.fixture
def source(empty_source):
    empty_source.make()
    return empty_source


@pytest.fixture
def create_pulse_user(create_pulse_user, management, guarded):
    """Return a function that creates a Pulse user with the permissions that PulseGuardian sets, or these."""

    def create(stem, tags=(), granted=None):
        name = create_pulse_user(stem, tags)
        own = f"^(queue/{name}/.*|exchange/{name}/.*)"
        management.set_permissions(guarded, name, granted or Permissions(own, own, f"^(queue/{name}/.*|exchange/.*)"))
        return name

    return create


@pytest.fixture
def usernames(source, create_pulse_user):
    """Return the names of two Pulse users: the first Alice's and O'Brien's, the second Alice's alone."""
    source.person(1, "alice@example.org", admin=True)
    source.person(2, "o'brien@example.org")
    source.person(3, "carol@example.org")
    names = create_pulse_user("builds"), create_pulse_user("tests")
    source.pulse_user(1, names[0], 1, 2)
    source.pulse_user(2, names[1], 1)
    source.queue(f"queue/{names[0]}/archive", flag=True)
    source.queue(f'queue/{names[0]}/it\'s "quoted"', flag=True)
    source.queue(f"queue/{names[0]}/jobs")
    return names


def run_import(url, *options):
    out = io.StringIO()
    call_command("import_pulseguardian", url, "--json", *options, stdout=out)
    return json.loads(out.getvalue())


def refusal(url, *options):
    with pytest.raises(CommandError) as error:
        run_import(url, *options)
    assert error.value.returncode == 1
    return str(error.value)


def steps_done(report):
    return {(step["what"], step["name"]): step["do"] for step in report["steps"]}


def notes(report):
    return {step["name"]: " ".join(step["notes"]) for step in report["steps"]}


def all_rows():
    models = (Owner, PulseUser, PulseUser.owners.through, Vouching, EmailAddress, Queue, QueueEvent, Notification)
    return {model.__name__: list(model._default_manager.order_by("pk").values()) for model in (*models, AuditEntry)}


def test_owners_pulse_users_and_flags_are_imported_once_without_changing_the_broker(
    usernames, source, broker, guarded, management
):
    connected = Amqp(url_for(broker, usernames[0], "secret"), guarded)
    before, rows = (management.users(), management.all_permissions()), all_rows()
    planned = run_import(source.url)
    assert (planned["applied"], all_rows()) == (False, rows)
    report = run_import(source.url, "--apply")
    assert (report["applied"], report["steps"]) == (True, planned["steps"])
    assert owners_by_pulse_user() == {
        usernames[0]: ["alice@example.org", "o'brien@example.org"],
        usernames[1]: ["alice@example.org"],
    }
    assert all(PulseUser.objects.values_list("ready", flat=True))
    assert (management.users(), management.all_permissions()) == before
    connected.queue(f"queue/{usernames[0]}/still")  # its connection, password and permissions still work
    connected.connection.close()
    for owner in Owner.objects.all():
        assert (owner.vouched, owner.is_staff, owner.has_usable_password()) == (True, False, False)
        assert owner.vouchings.get().reason == pulseguardian.REASON
    assert find_owners(["carol@example.org"]) == [Owner.objects.get(email="carol@example.org")]
    assert not Notification.objects.exists()
    entries = {entry.event: entry.additional_data for entry in AuditEntry.objects.all()}
    assert entries["imported owners"]["owners"] == ["alice@example.org", "o'brien@example.org", "carol@example.org"]
    assert entries["adopted"]["pulse_users"][1] == f"{usernames[1]}: alice@example.org"
    assert len(entries["made unbounded"]["queues"]) == 2
    before = all_rows()
    report = run_import(source.url, "--apply")
    assert report["applied"] is False
    assert set(steps_done(report).values()) == {"there already"}
    assert all_rows() == before


def test_an_import_keeps_changes_made_here_since(usernames, source):
    run_import(source.url, "--apply")
    alice, brien = (Owner.objects.get(email=email) for email in ("alice@example.org", "o'brien@example.org"))
    pulse_user = PulseUser.objects.get(username=usernames[1])
    pulse_user.owners.set([brien])
    vouching.unvouch(alice, None)
    report = run_import(source.url, "--apply")
    assert report["applied"] is False
    assert steps_done(report)["owner", "alice@example.org"] == "left out"
    assert notes(report)[usernames[1]] == "It keeps its current owners."
    assert list(pulse_user.owners.all()) == [brien]
    alice.refresh_from_db()
    assert not alice.vouched


def test_the_first_pass_keeps_an_imported_unbounded_queue(usernames, source, amqp, management, guarded):
    archive, jobs = f"queue/{usernames[0]}/archive", f"queue/{usernames[0]}/jobs"
    amqp.queue(archive, 12)
    amqp.queue(jobs, 12)
    run_import(source.url, "--apply")
    report = run_once()
    assert (report.deleted, report.warned, report.errors) == (1, 1, [])
    assert queue_names(management, guarded) == {archive}
    queue = Queue.objects.get(name=archive)
    assert (queue.state, queue.unbounded, queue.length) == ("warned", True, 12)
    assert queue.pulse_user.username == usernames[0]


def test_a_stored_queue_keeps_its_row_and_records_the_import(usernames, source, amqp, client):
    amqp.queue(f"queue/{usernames[0]}/archive", 6)
    run_once()
    queue = Queue.objects.get()
    assert steps_done(run_import(source.url, "--apply"))["queue", queue.name] == "make unbounded"
    queue.refresh_from_db()
    assert (queue.state, queue.unbounded) == ("warned", True)
    event = queue.events.get(kind="adjusted")
    assert (event.details["before"]["unbounded"], event.details["after"]["unbounded"]) == (False, True)
    client.force_login(Owner.objects.create_superuser("ops@example.org"))
    assert "the command import_pulseguardian" in client.get(f"/queues/{queue.uuid}/").text


def test_an_unbounded_flag_applies_in_every_vhost(usernames, source, amqp, broker, guarded, management):
    other = f"test-{uuid.uuid4().hex[:12]}"
    name = f"queue/{usernames[0]}/archive"
    management.create_vhost(other)
    try:
        amqp.queue(name)
        elsewhere = Amqp(broker.amqp_url, other)
        elsewhere.queue(name)
        elsewhere.connection.close()
        run_import(source.url, "--apply")
    finally:
        management.delete_vhost(other)
    rows = Queue.objects.filter(name=name).values_list("vhost", "unbounded")
    assert sorted(rows) == sorted([(guarded, True), (other, True)])


def test_invalid_rows_are_left_out_with_a_reason(source, create_pulse_user, guarded, management):
    administrator = create_pulse_user("root", tags=["administrator"])
    withdrawn, closed = Owner.objects.create_user("w@example.org", vouched=True), "closed@example.org"
    vouching.unvouch(withdrawn, None)
    Owner.objects.create_user(closed, vouched=True, is_active=False)
    people = [
        "alice@example.org", "ALICE@example.org", " Alice@Example.org", "no address", "", None, "w@example.org", closed,
    ]  # fmt: skip
    for number, email in enumerate(people):
        if email is None or connection.vendor == "sqlite" or email == email.strip():
            source.person(number, email)
    fine = create_pulse_user("fine")
    agents = "a" * 32
    management.put_user(agents, None)
    names = [fine, administrator, "not-there", "1st", "it's", 'quoted"', "two\nlines", "", agents, "nobodys"]
    for number, name in enumerate(names):
        owners = {fine: (0, 1, 6, 7), "nobodys": ()}.get(name, (0,))
        source.pulse_user(number, name, *owners)
    of_others, nobodys = create_pulse_user("others"), create_pulse_user("nobodys")
    source.pulse_user(100, of_others, 6, 7)
    source.pulse_user(101, nobodys)
    source.queue("x" * 255, flag=True)
    try:
        report = run_import(source.url, "--apply")
    finally:
        management.delete_user(agents)
    notes_of = notes(report)
    assert owners_by_pulse_user() == {fine: ["alice@example.org"]}
    assert {name for name, emails in owners_by_pulse_user().items()} == {fine}
    assert "the same address as alice@example.org" in notes_of["ALICE@example.org"]
    assert "not a valid e-mail address" in notes_of["no address"]
    assert "withdrawn here" in notes_of["w@example.org"]
    assert "deactivated here" in notes_of[closed].lower()
    assert notes_of[fine] == "w@example.org can't own it. closed@example.org can't own it."
    assert "administrator of the broker" in notes_of[administrator]
    assert notes_of["not-there"] == notes_of["nobodys"] == "The broker has no such user."
    assert "must start with a letter" in notes_of["1st"]
    assert "character" in notes_of["it's"]
    assert "character" in notes_of['quoted"']
    assert "character '\\n'" in notes_of["two\nlines"]
    assert "agent's login" in notes_of[agents]
    assert notes_of[of_others].endswith("It would have no owner.")
    assert notes_of[nobodys] == "It would have no owner."
    assert set(Owner.objects.values_list("email", flat=True)) == {"alice@example.org", "w@example.org", closed}
    assert Queue.objects.get().name == "x" * 255


def test_an_owner_who_signed_in_already_gets_access_and_a_notification(source, mailbox):
    Owner.objects.create_user("alice@example.org", last_login=timezone.now())
    source.person(1, "Alice@example.org")
    assert steps_done(run_import(source.url, "--apply")) == {("owner", "alice@example.org"): "approve access"}
    assert Owner.objects.get().vouched
    assert Notification.objects.get().kind == "vouched"


def test_administrators_become_operators_only_with_the_option(source):
    Owner.objects.create_user("old@example.org", vouched=True)
    source.person(1, "new@example.org", admin=True)
    source.person(2, "old@example.org", admin=True)
    source.person(3, "carol@example.org", admin=None)
    run_import(source.url, "--apply")
    assert not Owner.objects.filter(is_staff=True).exists()
    Owner.objects.get(email="new@example.org").delete()
    report = run_import(source.url, "--apply", "--operators")
    assert steps_done(report) == {
        ("owner", "new@example.org"): "create as operator", ("owner", "old@example.org"): "make operator",
        ("owner", "carol@example.org"): "there already",
    }  # fmt: skip
    operators = Owner.objects.filter(is_staff=True, is_superuser=True, vouched=True)
    assert set(operators.values_list("email", flat=True)) == {"new@example.org", "old@example.org"}
    assert run_import(source.url, "--operators")["applied"] is False


def test_permissions_that_differ_from_guardians_are_reported(source, create_pulse_user, management, guarded):
    source.person(1, "alice@example.org")
    escaped = create_pulse_user("with_a.dash-")  # older Pythons escape every special character
    own = "\\_".join(escaped.split("_")).replace("-", "\\-").replace(".", "\\.")
    write = f"^(queue/{own}/.*|exchange/{own}/.*)"
    management.set_permissions(guarded, escaped, Permissions(write, write, f"^(queue/{own}/.*|exchange/.*)"))
    everything, elsewhere, nothing = (
        create_pulse_user("all", granted=FULL_ACCESS),
        create_pulse_user("two"),
        create_pulse_user("none"),
    )
    dots = create_pulse_user("dots.")
    management.set_permissions("/", elsewhere, Permissions("", "", ".*"))
    management.delete_permissions(guarded, nothing)
    for number, name in enumerate([escaped, everything, elsewhere, nothing, dots]):
        source.pulse_user(number, name, 1)
    notes_of = notes(run_import(source.url))
    assert notes_of[escaped] == ""
    assert "It can create and delete all queues and exchanges, of all owners." in notes_of[everything]
    assert notes_of[elsewhere] == "It also has permissions on the vhost '/'."
    assert notes_of[nothing] == f"It has no permissions on the vhost '{guarded}'."
    assert "match the pattern" in notes_of[dots]  # its dot stands for any character


def test_a_pulse_user_listed_twice_is_adopted_once(create_pulse_user):
    Owner.objects.create_user("alice@example.org", vouched=True)
    wanted = adoption.Ownership(create_pulse_user("builds"), ("alice@example.org",))
    steps = adoption.plan([wanted, wanted], {"alice@example.org"})
    assert [step.do for step in steps] == ["adopt", "left out"]
    adoption.adopt(steps, notify=False)
    assert owners_by_pulse_user() == {wanted.username: ["alice@example.org"]}


@pytest.mark.parametrize("lacks", ["users", "pulse_users", "admin", "email", "unbounded", "pulse_user_owners"])
def test_another_database_is_refused_with_what_it_lacks(empty_source, lacks):
    tables = [table for table in TABLES[:4] if f"TABLE {lacks} " not in table]
    plain = [re.sub(r" REFERENCES \w+ \(id\)", "", table) for table in tables]
    empty_source.make([table.replace(f" {lacks} ", f" former_{lacks} ") for table in plain])
    text = refusal(empty_source.url)
    assert "can't be read" in text
    assert lacks in text


@pytest.mark.parametrize("column", ["users.admin", "queues.unbounded"])
def test_an_invalid_boolean_is_refused(empty_source, column):
    empty_source.make([table.replace("BOOLEAN", "VARCHAR(9)") for table in TABLES])
    empty_source.person(1, "alice@example.org", admin="perhaps" if column == "users.admin" else None)
    empty_source.run("INSERT INTO queues (name, unbounded, durable) VALUES ('q', 'perhaps', 't')")
    assert f"The column {column} contains 'perhaps'" in refusal(empty_source.url)


# The source


def test_the_source_is_read_in_one_snapshot_and_never_written(source, monkeypatch):
    if connection.vendor == "sqlite":
        source.run("PRAGMA journal_mode = WAL")
    source.person(1, "alice@example.org")
    with calling_first(pulseguardian, "_flag", lambda: source.queue("queue/builds/late", flag=True)):
        assert pulseguardian.read(source.url).unbounded == []
    assert pulseguardian.read(source.url).unbounded == ["queue/builds/late"]
    writing = {
        "sqlite": "INSERT INTO users (id, email) VALUES (3, 'x') RETURNING email, 1",
        "postgresql": "SELECT 'x', nextval('numbers')",
    }
    if connection.vendor == "postgresql":
        source.run("CREATE SEQUENCE numbers")
    monkeypatch.setattr(pulseguardian, "_PEOPLE", writing[connection.vendor])
    with pytest.raises(InvalidSource, match=r"read.?only"):
        pulseguardian.read(source.url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mysql://root:S3cret@host/pulse", "MySQL is not supported"),
        ("postgres://u:S3cret@127.0.0.1:1/pulse", "can't be read: connection to server at"),
        ("postgresql+psycopg2://u:S3cret@127.0.0.1:1/pulse", "can't be read: connection to server at"),
        ("postgres://u:x@S3cret@127.0.0.1/pulse", "not the URL of a database"),
        ("postgres://u:S3cret/x@127.0.0.1/pulse", "not the URL of a database"),
        ("postgres://u:%S3cret@127.0.0.1/pulse", "not the URL of a database"),
        ("postgres://u:x@127.0.0.1/pulse?S3cret=1", "not the URL of a database"),
        ("postgres://u:x@127.0.0.1:S3cret/pulse", "not the URL of a database"),
        ("S3cret", "not the URL of a supported database"),
        ("sqlite://", "not the URL of a supported database"),
        ("sqlite:///nowhere.db", "There is no file 'nowhere.db'"),
    ],
)
def test_an_invalid_source_url_is_refused_without_showing_the_password(url, expected):
    text = refusal(url)
    assert expected in text
    assert "S3cret" not in text


def test_the_command_takes_a_source_url_from_the_environment_or_says_so(source, monkeypatch):
    monkeypatch.delenv("PULSEGUARDIAN_DATABASE_URL", raising=False)
    with pytest.raises(CommandError, match="PULSEGUARDIAN_DATABASE_URL"):
        call_command("import_pulseguardian")
    monkeypatch.setenv("PULSEGUARDIAN_DATABASE_URL", source.url)
    call_command("import_pulseguardian", stdout=io.StringIO())


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("no database " * 100)
    assert "file is not a database" in refusal(f"sqlite:///{tmp_path}/text.db")


def test_an_sqlite_source_is_unchanged_and_its_invalid_bytes_are_no_error(tmp_path, create_pulse_user):
    path: Path = tmp_path / "old.db"
    opened = sqlite3.connect(path)
    for table in TABLES:
        opened.execute(table)
    opened.execute("INSERT INTO users (id, email) VALUES (1, CAST(x'ff41' AS TEXT)), (2, 'a@example.org')")
    opened.execute("INSERT INTO users (id, email) VALUES (3, ?)", ["x" * 100_000])
    opened.execute("INSERT INTO pulse_users (id, username) VALUES (1, ?)", ["n" * 100_000])
    opened.execute("INSERT INTO pulse_user_owners VALUES (2, 1), (2, 1), (99, 1), (NULL, 1), (2, NULL)")
    opened.execute("INSERT INTO queues (name, unbounded, durable) VALUES ('null', NULL, 1), (?, 1, 1)", ["n" * 256])
    opened.commit()
    opened.close()
    before = hashlib.sha256(path.read_bytes()).digest()
    report = run_import(f"sqlite:///{path}", "--apply")
    assert [step["do"] for step in report["steps"]] == ["create", "left out", "left out", "left out", "left out"]
    assert list(Owner.objects.values_list("email", flat=True)) == ["a@example.org"]
    assert not Queue.objects.exists()
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert [file.name for file in tmp_path.iterdir()] == ["old.db"]


# Failures


@pytest.mark.parametrize(
    ("place", "name"), [(pulseguardian, "plan"), (Management, "all_permissions"), (unbounded, "plan")]
)
def test_a_broker_that_fails_midway_leaves_everything_unchanged(usernames, source, broker_proxy, place, name):
    before = all_rows()
    with calling_first(place, name, lambda: broker_proxy.close_next(100)):
        assert refusal(source.url, "--apply").startswith(
            "Nothing was done. The request to the broker failed: GET /api/"
        )
    assert all_rows() == before
    broker_proxy.close_next(0)
    assert run_import(source.url, "--apply")["applied"] is True


@pytest.mark.parametrize(
    ("where", "times"),
    [
        ("queues.actions.unbounded._set", 0),
        ("accounts.importing.pulseguardian._create_owners", 1),
        ("accounts.importing.pulseguardian._change_owner", 0),
        ("accounts.importing.adoption._adopt", 1),
        ("accounts.audit.record", 0),
        ("accounts.audit.record", 2),
        ("accounts.audit.record", 4),
    ],
)
def test_an_import_killed_anywhere_is_completed_by_the_next(usernames, source, monkeypatch, where, times):
    Owner.objects.create_user("carol@example.org", last_login=timezone.now())
    monkeypatch.setattr(adoption, "BATCH_SIZE", 1)
    module, _, name = where.rpartition(".")
    left = [times]

    def killed(original):
        def call(*arguments, **options):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(where, killed(getattr(import_module(module), name)))
        with pytest.raises(Killed):
            run_import(source.url, "--apply")
    whole = {usernames[0]: ["alice@example.org", "o'brien@example.org"], usernames[1]: ["alice@example.org"]}
    assert owners_by_pulse_user().items() <= whole.items()
    for owner in Owner.objects.exclude(email="carol@example.org"):
        assert owner.vouched
        assert owner.emailaddress_set.get().verified
    assert run_import(source.url, "--apply")["applied"] is True
    assert owners_by_pulse_user() == whole
    assert set(Owner.objects.values_list("email", "vouched")) == {
        (f"{name}@example.org", True) for name in ("alice", "o'brien", "carol")
    }
    assert Vouching.objects.count() == 3
    assert QueueEvent.objects.filter(kind="adjusted").count() == Queue.objects.filter(unbounded=True).count() == 2
    assert run_import(source.url, "--apply")["applied"] is False


def test_a_concurrent_change_stops_the_import_and_it_can_be_repeated(usernames, source):
    for meanwhile, expected in [
        (lambda: Owner.objects.create_user("carol@example.org", vouched=True), "signed in for the first time"),
        (lambda: PulseUser.objects.create(username=usernames[0], ready=True), "was created or adopted just now"),
        (
            lambda: Owner.objects.filter(email="alice@example.org").update(vouched=False),
            "has no access to the broker yet",
        ),
        (lambda: Owner.objects.filter(email="alice@example.org").delete(), "no longer exists"),
    ]:
        found = pulseguardian.read(source.url)
        steps = pulseguardian.plan(found, operators=False)
        meanwhile()
        with pytest.raises(Refusal, match=expected):
            pulseguardian.apply(steps)
        PulseUser.objects.all().delete()
        Owner.objects.update(vouched=True)
        Vouching.objects.all().delete()
    run_import(source.url, "--apply")
    assert owners_by_pulse_user() == {
        usernames[0]: ["alice@example.org", "o'brien@example.org"],
        usernames[1]: ["alice@example.org"],
    }


def test_a_locked_pulse_user_is_not_adopted(usernames, source):
    with locks.lock(usernames[1]):
        assert f"Another request is changing '{usernames[1]}' right now." in refusal(source.url, "--apply")
    assert owners_by_pulse_user() == {}
    run_import(source.url, "--apply")
    assert set(owners_by_pulse_user()) == set(usernames)


def test_an_import_waits_for_a_running_pass(usernames, source, monkeypatch):
    monkeypatch.setattr(unbounded, "LEASE_TIMEOUT_SECONDS", 0.0)
    before = all_rows()
    with lease(LEASE):
        assert refusal(source.url, "--apply").startswith("Nothing was done: a pass has been running")
        assert all_rows() == before
        assert run_import(source.url)["applied"] is False
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        running.__exit__(None, None, None)

    running = lease(LEASE)
    running.__enter__()
    monkeypatch.setattr(unbounded, "LEASE_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr("time.sleep", sleep)
    run_import(source.url, "--apply")
    assert waited == [unbounded.POLL_SECONDS]
    assert Queue.objects.filter(unbounded=True).count() == 2
