"""A filled database is backed up and restored as documented, and Guardian continues with the broker."""

import os
import shutil
import sqlite3
from collections import Counter
from datetime import timedelta

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection, connections
from django.utils import timezone

from accounts.models import AuthToken, Owner, PulseUser
from accounts.pulse_users.creation import create_pulse_user
from agents.models import EventSubscription, SubscriptionQueue
from agents.registration import queues
from agents.sweeps.stale import clean_up_stale
from agents.sweeps.sweep import sweep_orphans
from core import sealing
from notifications import channels, sending
from notifications.models import Channel
from queues.guard import once
from queues.models import Queue
from tests.conftest import Amqp
from tests.site.test_docs import BACKUP_OF_POSTGRESQL, BACKUP_OF_SQLITE, MANAGE, run, shell, shell_lines
from tests.site.test_migrations import FIRST, contents, empty_database, guardian_models, migrate  # noqa: F401
from tests.support.agents import RegisteredAgent, backdate_registrations
from tests.support.rows import create_row
from tests.support.served import database_url
from tests.support.toolbox import wait_until
from tools import invariants
from tools.postgresql import binaries

pytestmark = pytest.mark.sqlite


def commands(begin, end):
    """Return the commands of manage.py between these two texts."""
    return [line.removeprefix(MANAGE).split() for line in shell_lines("operators.md", begin, end)]


LOOKS = commands("4. **Before workers and beat start**", "5. Start the rest")
BRING_UP_TO_DATE = commands("3. Bring it up to date", "4. **Before workers and beat start**")


class Backup:
    """The documented commands, with a database of this session in place of Guardian's."""

    def __init__(self, directory, alias="default"):
        self.options = {"cwd": directory}
        if connection.vendor == "postgresql":
            self.options["env"] = {
                "DATABASE_URL": f"{database_url(alias)}?sslmode=prefer&connect_timeout=5",
                "PATH": f"{binaries()}:{os.environ['PATH']}",
            }
            self._make, *self.restoring = BACKUP_OF_POSTGRESQL
        else:
            path = str(connections.settings[alias]["NAME"])
            self._make, *self.restoring = [line.replace("var/guardian.sqlite3", path) for line in BACKUP_OF_SQLITE]

    def make(self):
        """Back up while Guardian runs: its connections stay open."""
        shell(self._make, **self.options)

    def restore(self):
        """Restore once everything is stopped."""
        connections.close_all()
        for line in self.restoring:
            shell(line, **self.options)


@pytest.fixture
def backup(transactional_db, tmp_path):
    return Backup(tmp_path)


@pytest.fixture
def consume_as(broker):
    """Return a function that logs in to a vhost and consumes from a queue there."""
    opened = []

    def consume(vhost, name, username, password):
        host = broker.amqp_url.rpartition("@")[2].rstrip("/")
        reader = Amqp(f"amqp://{username}:{password}@{host}", vhost)
        reader.channel.basic_consume(name, lambda *_: None)
        opened.append(reader.connection)
        return reader.connection

    yield consume
    for one in opened:
        if one.is_open:
            one.close()


def test_a_restore_brings_back_exactly_the_rows_of_the_backup(backup):
    created = []
    for model in guardian_models(apps):
        create_row(model, "default", created)
    before = contents(apps, "default")
    assert all(before.values())
    backup.make()
    for model in guardian_models(apps):
        create_row(model, "default", created)
    AuthToken.objects.all()._raw_delete("default")
    assert contents(apps, "default") != before
    backup.restore()
    assert contents(apps, "default") == before
    for model in guardian_models(apps):  # new rows can be written as before
        create_row(model, "default", created)


@pytest.mark.slow
def test_a_backup_of_the_first_migrations_is_restored_after_an_upgrade(empty_database, tmp_path):  # noqa: F811
    alias = empty_database
    old = migrate(alias, FIRST).project_state(FIRST).apps
    created = []
    for model in guardian_models(old):
        create_row(model, alias, created)
    before = contents(old, alias)
    backup = Backup(tmp_path, alias)
    backup.make()
    call_command("migrate", database=alias, verbosity=0)
    for model in guardian_models(apps):
        create_row(model, alias, created)
    backup.restore()
    assert contents(old, alias) == before
    for command in BRING_UP_TO_DATE:
        call_command(*command, database=alias, verbosity=0)
    after = contents(apps, alias)
    assert {label: len(after[label]) for label in before} == {label: len(rows) for label, rows in before.items()}
    for model in guardian_models(apps):
        create_row(model, alias, created)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="a copy of a file")
def test_a_restore_that_fails_changes_nothing(backup, alice, tmp_path):
    backup.make()
    Owner.objects.create_user("since@example.org")
    connections.close_all()
    write_sql, run_sql = backup.restoring
    shell(write_sql, **backup.options)
    with (tmp_path / "guardian.sql").open("a") as statements:
        statements.write("SELECT 1 / 0;")
    with pytest.raises(AssertionError, match="division by zero"):
        shell(run_sql, **backup.options)
    assert Owner.objects.filter(email="since@example.org").exists()


def test_a_backup_of_sqlite_during_writes_can_be_restored(tmp_path):
    (tmp_path / "var").mkdir()
    database = tmp_path / "var" / "guardian.sqlite3"
    with sqlite3.connect(database) as guardian:
        guardian.executescript("PRAGMA journal_mode=WAL; CREATE TABLE told (number INTEGER);")
        guardian.execute("INSERT INTO told VALUES (1)")
    guardian.execute("INSERT INTO told VALUES (2)")  # not committed yet
    make, *restore = BACKUP_OF_SQLITE
    shell(make, cwd=tmp_path)
    guardian.commit()
    os.link(database, tmp_path / "open")  # keeps the log while the database is open
    for suffix in ("-wal", "-shm"):
        shutil.copy(f"{database}{suffix}", tmp_path / suffix)
    guardian.close()
    for suffix in ("-wal", "-shm"):  # as a killed process leaves them
        shutil.copy(tmp_path / suffix, f"{database}{suffix}")
    for line in restore:
        shell(line, cwd=tmp_path)
    with sqlite3.connect(database) as restored:
        assert restored.execute("SELECT number FROM told").fetchall() == [(1,)]
        assert restored.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    restored.close()


def test_a_channels_url_needs_the_same_secret_key_after_a_restore(backup, agents, settings):
    address = "https://1.1.1.1/hooks/3kd8fj2"
    channels.create_channel(agents.owner("alice"), "chat", address)
    backup.make()
    Channel.objects.all().delete()
    backup.restore()
    sealed = Channel.objects.get().sealed_url
    assert address not in sealed
    assert sealing.unseal(sealing.CHANNELS, sealed) == address
    settings.SECRET_KEY = "another"
    with pytest.raises(sealing.CannotUnseal):
        sealing.unseal(sealing.CHANNELS, sealed)


def test_after_a_restore_nothing_is_notified_twice_and_no_queue_deleted(
    backup, guarded, agent, amqp, mailbox, management, settings
):
    settings.GUARDIAN_VHOSTS = [guarded, agent.vhost]
    amqp.queue("long before", 7)
    amqp.queue("calm before", 1)
    once.run_once()
    sending.send_due()
    backup.make()
    amqp.queue("new since", 7)
    amqp.take("long before", 3)
    management.delete_queue(guarded, "calm before")
    once.run_once()
    sending.send_due()
    before = Counter(mail.message["Message-ID"] for mail in mailbox.mails)
    backup.restore()
    once.run_once()
    once.run_once()
    sending.send_due()
    sweep_orphans()
    assert set(Counter(mail.message["Message-ID"] for mail in mailbox.mails).values()) == {1}
    assert [mail.subject for mail in mailbox.mails if "long before" in mail.subject and "Warning" in mail.subject] == [
        "[Guardian] Warning: long before has 7 messages"
    ]
    assert before
    assert invariants.deleted_below_maximum() == []
    assert invariants.disagreements(management, [guarded, agent.vhost]) == []
    states = dict(Queue.objects.filter(vhost=guarded).values_list("name", "state"))
    assert states == {"long before": "ok", "calm before": "gone", "new since": "warned"}


def test_after_a_restore_a_sweep_keeps_queues_in_use_and_of_newer_owners(backup, agents, agent, consume_as):
    backup.make()
    identity = agents.identity(agent.owner, agent.offering)
    subscription, _ = queues.register_subscription(identity, "order", agent.presented)
    queue, _ = queues.create_queue(subscription, agent.offering, "order", agent.presented)
    reader = consume_as(agent.vhost, queue.queue_name, subscription.rmq_username, agent.presented.key)
    bob = RegisteredAgent(agents, "bob")
    users, of_bob = agents.users(), bob.names
    backup.restore()
    backdate_registrations()
    assert not EventSubscription.objects.filter(uuid=subscription.uuid).exists()
    for report in (sweep_orphans(dry_run=True), sweep_orphans(), sweep_orphans()):
        assert (report.kept, report.deleted, report.users, report.errors) == (1, 0, 0, [])
    assert agent.names == {*agent.registered, queue.queue_name}
    assert bob.names == of_bob
    assert agents.users() == users
    reader.process_data_events()
    assert reader.is_open

    reader.close()  # the restarted agent registers anew, and its former queue is removed
    identity = agents.identity(agent.owner, agent.offering)
    again, _ = queues.register_subscription(identity, "order", agent.presented)
    new, _ = queues.create_queue(again, agent.offering, "order", agent.presented)
    report = sweep_orphans()
    assert (report.deleted, report.users) == (1, 1)
    assert agent.names == {*agent.registered, new.queue_name}


def test_after_a_restore_missing_agents_queues_are_declared_again(backup, agent):
    backup.make()
    SubscriptionQueue.objects.filter(pk=agent.queue.pk).delete()
    assert agent.queue.queue_name not in agent.names
    backup.restore()
    assert sweep_orphans().repaired == 1
    assert agent.names == agent.registered


def test_after_a_restore_a_newer_rabbitmq_user_stays_without_an_owner(backup, guarded, agents, management, amqp):
    backup.make()
    username = "since-the-backup"
    create_pulse_user(username, [agents.owner("carol")])
    amqp.queue(f"queue/{username}/q", 3)
    try:
        backup.restore()
        assert not PulseUser.objects.exists()
        once.run_once()
        sweep_orphans()
        assert management.user(username)
        row = Queue.objects.get()
        assert (row.name, row.state, row.pulse_user) == (f"queue/{username}/q", "ok", None)
    finally:
        management.delete_user(username)


def test_documented_dry_runs_list_what_a_restore_costs(backup, guarded, agent, agents, amqp, settings):
    settings.GUARDIAN_VHOSTS = [guarded, agent.vhost]
    amqp.queue("unbounded since", 9)
    stale = RegisteredAgent(agents, "stale")
    AuthToken.objects.filter(user=stale.owner).update(expiry=timezone.now() + timedelta(seconds=1))
    once.run_once()
    backup.make()
    Queue.objects.filter(name="unbounded since").update(unbounded=True)
    amqp.publish("unbounded since", 9)
    newer, _ = queues.create_queue(agent.subscription, agent.offering, "call", agent.presented)
    agents.token(stale.owner)
    once.run_once()
    assert Queue.objects.get(name="unbounded since").state == "warned"
    backup.restore()
    wait_until(lambda: clean_up_stale(dry_run=True).tokens, seconds=60)
    expired = clean_up_stale(dry_run=True)
    assert not expired.errors
    there, rows = (agent.names, stale.names), contents(apps, "default")
    output = "\n".join(run(*look) for look in LOOKS)
    assert [look[0] for look in LOOKS] == ["monitor_queues", "cleanup_orphan_queues", "cleanup_stale_subscriptions"]
    for cost in ("unbounded since", newer.queue_name, stale.queue.queue_name, stale.owner.email):
        assert cost in output
    assert (agent.names, stale.names) == there
    assert contents(apps, "default") == rows
