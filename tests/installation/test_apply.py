"""Files that are applied to a real broker and database, and exported again."""

import itertools
import re
import stat
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import AuditEntry, NotificationAddress, Owner, PulseUser, Vouching
from accounts.pulse_users.creation import create_pulse_user
from agents.models import Offering
from core.leases import HeldLease, LeaseLost, lease
from core.models import Removal
from installation import applying, consequences, present, reading
from installation.applying import Applier
from installation.management.commands import apply as command
from installation.models import Created
from installation.planning import make_plan
from installation.revision import revision
from message_store.models import Application
from notifications.models import Notification
from queues.guard import once
from queues.models import Queue
from rabbit.permissions import Permissions
from tests.support.faults import killed_after, let_time_pass
from tests.support.toolbox import can_log_in, finish_removals, queue_names, stored_queue

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def apply(tmp_path, capsys, name, guarded):
    """Return a function that applies a text as a file, and returns the exit code and the output."""

    def run(text, *options):
        path = tmp_path / "installation.yaml"
        path.write_text(f"version: 1\n{text}".replace("NAME", name).replace("VHOST", guarded))
        try:
            call_command("apply", str(path), *options)
        except SystemExit as ended:
            return ended.code, "".join(capsys.readouterr())
        except CommandError as error:
            return 1, f"{''.join(capsys.readouterr())}{error}"
        return 0, "".join(capsys.readouterr())

    return run


@pytest.fixture
def export(capsys):
    def run():
        capsys.readouterr()
        call_command("export")
        return capsys.readouterr().out

    return run


def digest_in(output):
    return re.search(r"Digest of this plan: (\w+)", output)[1]


OWNERS = "owners: {alice@example.org: {access: true}, bob@example.org: {access: true}}\n"

EVERYTHING = """\
owners:
  alice@example.org: {access: true}
  bob@example.org: {}
  ops@example.org: {operator: true}
pulse_users:
  NAME:
    owners: [alice@example.org, ops@example.org]
    warn_length: 3
    max_length: 7
    keeps_archives: false
    hold_off_minutes: 2
    notification_emails: [team@example.org]
queues:
- {name: "queue/NAME/'\\"\\0\\n\\u2028é", vhost: VHOST, max_length: 6, warn_length: null}
- {name: "yes", vhost: VHOST, unbounded: true}
offerings:
- {name: hpc, uuid: 6f1ed0021b7a43edbaeb5d9c33a1d1a0, members: [alice@example.org], publishers: [ops@example.org]}
applications: [pelican]
"""


def empty_installation(management):
    """Delete everything that a file can describe, here and on the broker."""
    for username in PulseUser.objects.values_list("username", flat=True):
        management.delete_user(username)
    for model in (Queue, PulseUser, Offering, Application, Owner, Created):
        model.objects.all().delete()


def test_an_exported_installation_is_the_same_after_it_is_applied_to_an_empty_one(apply, export, management):
    assert apply(EVERYTHING)[0] == 0
    exported = export()
    data = yaml.safe_load(exported)
    assert [len(data[section]) for section in ("owners", "pulse_users", "queues", "offerings")] == [3, 1, 2, 1]
    empty_installation(management)
    assert yaml.safe_load(export()) == {"version": 1}
    assert apply(exported.removeprefix("version: 1\n"))[0] == 0
    assert export() == exported
    code, output = apply(exported.removeprefix("version: 1\n"))
    assert (code, output) == (0, "0 to create, 0 to adopt, 0 to change, 0 to remove, 8 unchanged.\n")


def test_an_export_leaves_out_what_an_empty_installation_would_refuse(apply, export, management, name, guarded):
    """Its comments say so."""
    long = f"queue/{name}/long"
    assert apply(EVERYTHING)[0] == 0
    of_pulse_user = "pulse_users: {NAME: {warn_length: null, max_length: 90000}}"
    assert apply(f"{of_pulse_user}\nqueues: [{{name: {long}, warn_length: 20000}}]")[0] == 0
    stored_queue("temporary", vhost=guarded, limits_until=timezone.now(), limits_before={"max_length": 9})
    stored_queue("queue/owned/long", vhost=guarded, warn_length=20_000, max_length=30_000)
    Owner.objects.create_user("old@straße.de", vouched=True)
    owned = PulseUser.objects.create(username="owned", ready=True)
    owned.owners.add(Owner.objects.get(email="bob@example.org"))
    PulseUser.objects.create(username="of-nobody", ready=True)
    pulse_user = PulseUser.objects.get(username=name)
    NotificationAddress.objects.create(pulse_user=pulse_user, email="alice@example.org")
    Offering.objects.get().members.add(Owner.objects.get(email="bob@example.org"))
    exported = export()
    assert exported.startswith(
        "# Left out, because not all people have access: the Pulse user of-nobody and limits of its queues.\n"
        "# Left out, because not all people have access: the Pulse user owned and limits of its queues.\n"
        "# Left out, because not all people have access: the members of the offering 6f1ed"
    )
    assert {"name": "temporary", "vhost": guarded, "warn_length": None, "max_length": 9, "unbounded": False} in (
        yaml.safe_load(exported)["queues"]
    )
    code, output = apply(exported.replace("version: 1\n", ""))
    assert (code, "0 to create, 0 to adopt, 0 to change" in output) == (0, True)
    PulseUser.objects.exclude(username=name).delete()
    empty_installation(management)
    code, output = apply(exported.replace("version: 1\n", ""))
    assert code == 0, output
    assert Queue.objects.get(name=long).warn_length == 20_000


def test_what_apply_does_is_in_the_audit_trail_and_owners_are_notified(apply, tmp_path):
    path = f"{tmp_path}/installation.yaml"
    assert apply(EVERYTHING)[0] == 0
    source = f"apply, from {path} at {revision(Path(path), Path(path).read_bytes())}"
    assert set(AuditEntry.objects.values_list("additional_data__command", flat=True)) == {source}
    assert AuditEntry.objects.filter(event="created", object_repr__startswith="alice-").exists()
    assert Vouching.objects.get(owner__email="alice@example.org").reason == f"By {source}"
    assert sorted(Notification.objects.values_list("kind", "recipient")) == [
        ("confirm-address", "team@example.org"),
        ("owner-assigned", "alice@example.org"), ("owner-assigned", "ops@example.org"),
        ("vouched", "alice@example.org"), ("vouched", "ops@example.org"),
    ]  # fmt: skip


def test_the_revision_is_the_commit_of_a_file_or_a_digest(tmp_path):
    path = tmp_path / "a file.yaml"
    path.write_text("version: 1\n")
    assert revision(path, path.read_bytes()).startswith("sha256:")
    git = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True)
    git(["git", "init", "-q"])
    git(["git", "add", "."])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "a"])
    head = git(["git", "rev-parse", "HEAD"]).stdout[:12]
    assert revision(path, path.read_bytes()) == head
    assert revision(path, b"version: 2\n") == f"{head} with changes"


def test_passwords_are_written_once_to_files_for_their_reader_alone(apply, tmp_path, name, broker, guarded):
    folder = tmp_path / "passwords"
    pulse_user = OWNERS + "pulse_users: {NAME: {owners: [alice@example.org]}}"
    assert apply(pulse_user, "--passwords", str(folder)) == (1, f"{folder} is not a folder. Create it first.")
    folder.mkdir()
    (folder / "README.md").write_text("a name that a Pulse user can have")
    code, output = apply(pulse_user, "--passwords", str(folder))
    assert (code, output) == (1, f"{folder} is not empty. Name an empty folder, so that no file is replaced.")
    (folder / "README.md").unlink()
    assert apply(pulse_user, "--passwords", str(folder))[0] == 0
    [file] = folder.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == (name, 0o600)
    assert can_log_in(broker, guarded, name, file.read_text().strip())
    file.unlink()
    assert apply(pulse_user, "--passwords", str(folder))[0] == 0
    assert list(folder.iterdir()) == []


def test_a_dry_run_changes_nothing_and_exits_with_2(apply):
    code, output = apply(OWNERS, "--dry-run")
    assert code == 2
    assert "+ create owner alice@example.org: access yes" in output
    assert not Owner.objects.exists()
    apply(OWNERS)
    assert apply(OWNERS, "--dry-run")[0] == 0


def test_a_problem_exits_with_1_and_names_its_place(apply, tmp_path):
    code, output = apply("owner: {}")
    assert code == 1
    assert output.startswith(f"{tmp_path}/installation.yaml:2:1: There is no 'owner' here. Did you mean 'owners'?")
    assert output.endswith("\nNothing was done.")


def test_a_lower_limit_that_deletes_queues_needs_the_digest_of_the_plan(apply, pulse_user):
    stored_queue("queue/alice/short", pulse_user=pulse_user, ready=8, unacknowledged=0)
    text = "pulse_users: {alice: {max_length: 7}}"
    code, output = apply(text)
    assert code == 2
    assert "This deletes 1 queue with 8 messages.\n  deletes queue/alice/short in " in output
    digest = digest_in(output)
    stored_queue("queue/alice/another", pulse_user=pulse_user, ready=9, unacknowledged=0)
    code, output = apply(text, "--yes", digest)
    assert (code, PulseUser.objects.get().max_length) == (2, None)
    assert apply(text, "--yes", digest_in(output))[0] == 0
    assert PulseUser.objects.get().max_length == 7


def test_a_queue_that_the_operator_did_not_confirm_stays(apply, guarded, tmp_path):
    row = stored_queue("a", vhost=guarded, ready=8, unacknowledged=0)
    wanted = reading.read(f"version: 1\nqueues: [{{name: a, vhost: {guarded}, max_length: 7}}]".encode())
    plan = make_plan(wanted, present.read(wanted))
    with lease("apply") as held:
        [failure] = Applier("a file", consequences.Effect([])).carry_out(plan, held)
    row.refresh_from_db()
    assert (row.max_length, failure.why) == (None, "This deletes 1 queue with 8 messages.")


def test_a_pattern_sets_limits_of_queues_that_exist(apply, guarded):
    for name in ("a-1", "a-2", "b"):
        stored_queue(name, vhost=guarded, ready=0, unacknowledged=0)
    stored_queue("a-gone", vhost=guarded, state="gone")
    text = "queues: [{pattern: 'a-.*', max_length: 9}, {name: a-2, unbounded: true}]"
    assert apply(text)[0] == 0
    assert set(Queue.objects.values_list("name", "max_length", "unbounded")) == {
        ("a-1", 9, False), ("a-2", None, True), ("b", None, False), ("a-gone", None, False),
    }  # fmt: skip
    assert apply(text)[0] == 0
    assert Queue.objects.get(name="a-1").events.get().details["command"].startswith("apply, from ")


def test_limits_of_a_queue_that_no_pass_has_listed_apply_from_the_first_pass_on(apply, amqp):
    assert apply("queues: [{name: long, unbounded: true}]")[0] == 0
    amqp.queue("long", 11)
    once.run_once()
    assert Queue.objects.get().state == "warned"


def test_users_of_the_broker_are_adopted_and_keep_their_passwords(apply, name, management, broker, guarded):
    management.put_user(name, "a password")
    management.set_permissions(guarded, name, Permissions("", "", ".*"))
    code, output = apply(OWNERS + "pulse_users: {NAME: {owners: [bob@example.org], max_length: 9}}")
    assert (code, f"+ adopt Pulse user {name}" in output) == (0, True)
    adopted = PulseUser.objects.get()
    assert (adopted.max_length, [one.email for one in adopted.owners.all()]) == (9, ["bob@example.org"])
    assert can_log_in(broker, guarded, name, "a password")
    assert apply(OWNERS, "--prune")[0] == 0
    assert PulseUser.objects.exists()  # apply did not create it


def test_an_adoption_with_a_lower_limit_shows_the_queues_that_it_deletes(apply, name, management, guarded):
    management.put_user(name, "a password")
    management.set_permissions(guarded, name, Permissions("", "", ".*"))
    stored_queue(f"queue/{name}/a", vhost=guarded, ready=8, unacknowledged=0)
    text = OWNERS + "pulse_users: {NAME: {owners: [bob@example.org], max_length: 7}}"
    code, output = apply(text)
    assert (code, f"deletes queue/{name}/a in {guarded} with 8 messages" in output) == (2, True)
    assert apply(text, "--yes", digest_in(output))[0] == 0
    assert PulseUser.objects.get().max_length == 7


def test_owners_are_replaced_and_those_who_left_are_notified(apply, alice, bob, pulse_user, mailbox):
    retired = Owner.objects.create_user("retired@example.org", is_active=False)
    pulse_user.owners.add(retired)
    assert apply("pulse_users: {alice: {owners: [bob@example.org]}}")[0] == 0
    assert set(pulse_user.owners.all()) == {bob, retired}
    call_command("send_notifications", "--once")
    [mail] = mailbox.to("alice@example.org")
    assert "An operator removed you from the owners of" in " ".join(mail.text.split())


def test_prune_removes_what_apply_created_with_its_queues(apply, name, management, guarded):
    pulse_users = "pulse_users: {NAME: {owners: [alice@example.org]}, NAME-2: {owners: [bob@example.org]}}"
    everything = f"{OWNERS}{pulse_users}\nqueues: [{{name: a, unbounded: true}}]\napplications: [pelican]"
    assert apply(everything)[0] == 0
    by_hand, _ = create_pulse_user(f"{name}-3", [Owner.objects.get(email="alice@example.org")])
    management.declare_queue(guarded, f"queue/{name}/builds")
    once.run_once()
    text = OWNERS.replace("bob@example.org", "carol@example.org")
    code, output = apply(text, "--prune")
    assert (code, "deletes queue/" in output) == (2, True)
    assert apply(text, "--prune", "--yes", digest_in(output))[0] == 0
    finish_removals()
    assert list(PulseUser.objects.all()) == [by_hand]
    assert set(Owner.objects.values_list("email", flat=True)) == {"alice@example.org", "carol@example.org"}
    assert (queue_names(management, guarded), Application.objects.count()) == (set(), 0)
    assert Queue.objects.filter(unbounded=True).count() == 0
    assert apply(text, "--prune")[0] == 0


def test_prune_removes_nothing_that_a_person_changed(apply, guarded):
    stored_queue("a", vhost=guarded, ready=0, unacknowledged=0)
    text = OWNERS + "queues: [{name: a, vhost: VHOST, max_length: 9}]"
    assert apply(text)[0] == 0
    assert apply(text.replace("9}", "8}"))[0] == 0  # also of apply
    Owner.objects.filter(email="bob@example.org").update(email="bobby@example.org")
    without_both = "owners: {alice@example.org: {}}"
    assert "2 to remove" not in apply(without_both, "--prune", "--dry-run")[1]
    assert "- remove limits of the queue a" in apply(without_both, "--prune", "--dry-run")[1]
    Queue.objects.update(max_length=7)
    code, output = apply(without_both, "--prune")
    assert (code, output.count("Not removed: ")) == (0, 2)
    assert apply(text.replace("9}", "null}"))[0] == 0
    assert not Created.objects.filter(kind="queue").exists()


def test_a_plan_shows_queues_that_no_pass_has_listed(apply, name, management, guarded):
    assert apply(OWNERS + "pulse_users: {NAME: {owners: [alice@example.org]}}")[0] == 0
    management.declare_queue(guarded, f"queue/{name}/live")
    code, output = apply(OWNERS, "--prune")
    assert (code, f"deletes queue/{name}/live in {guarded} with an unknown number of messages" in output) == (2, True)
    assert apply(OWNERS, "--prune", "--yes", digest_in(output))[0] == 0
    assert queue_names(management, guarded) == set()


def test_the_queues_that_a_plan_deletes_are_those_of_all_its_changes(apply, pulse_user, guarded):
    row = partial(stored_queue, vhost=guarded, pulse_user=pulse_user, ready=8, unacknowledged=0)
    row("queue/alice/long", unbounded=True)
    row("queue/alice/kept")
    kept = "{name: queue/alice/kept, max_length: 50}"
    text = f"pulse_users: {{alice: {{max_length: 7}}}}\nqueues: [{{name: queue/alice/long, unbounded: false}}, {kept}]"
    assert "This deletes 1 queue with 8 messages.\n  deletes queue/alice/long" in apply(text)[1]


def test_a_removal_needs_the_digest_of_the_plan_and_the_brake_limits_it(apply, settings):
    apply(OWNERS + "applications: [a, b]")
    code, output = apply(OWNERS, "--prune")
    assert (code, Application.objects.count()) == (2, 2)
    settings.GUARDIAN_DELETE_BRAKE = 1
    code, output = apply(OWNERS, "--prune", "--yes", digest_in(output))
    assert (code, Application.objects.count()) == (3, 2)
    assert "The brake blocks the removal of 2 of 2 applications; at most 1 are allowed." in output
    assert apply(OWNERS, "--prune", "--dry-run")[0] == 3


def test_the_brake_counts_the_queues_with_limits_of_a_file_with_patterns(apply, settings, guarded):
    limited = OWNERS + "queues: [{name: a, unbounded: true}, {name: b, unbounded: true}]"
    assert apply(limited)[0] == 0
    for number in range(8):
        stored_queue(f"without-{number}", vhost=guarded)
    settings.GUARDIAN_DELETE_BRAKE = 1
    output = apply(OWNERS + "queues: [{pattern: none, unbounded: true}]", "--prune", "--dry-run")[1]
    assert "The brake blocks the removal of 2 of 2 limits" in output


def test_a_change_that_fails_leaves_the_others(apply, name, management, guarded, monkeypatch):
    monkeypatch.setattr(command, "PROGRESS_SECONDS", 0)
    management.declare_queue(guarded, f"queue/{name}/of-nobody")
    code, output = apply(
        OWNERS + "pulse_users: {NAME: {owners: [bob@example.org]}, NAME-2: {owners: [bob@example.org]}}"
    )
    assert code == 1
    assert "The broker already has queues or exchanges of this name" in output
    assert "4 of 4 changes are done." in output
    assert list(PulseUser.objects.values_list("username", flat=True)) == [f"{name}-2"]


def test_while_the_broker_is_unreachable_nothing_is_done(apply, away):
    code, output = apply(OWNERS + "pulse_users: {NAME: {owners: [bob@example.org]}}")
    assert (code, Owner.objects.count()) == (1, 0)
    assert "Nothing was done. The request to the broker failed" in output


def test_only_one_process_applies_a_file_at_a_time(apply):
    with lease("apply"):
        code, output = apply(OWNERS)
    assert (code, Owner.objects.count()) == (1, 0)
    assert "Another apply is running" in output


def test_after_the_lease_expired_nothing_more_is_done(db):
    wanted = reading.read(f"version: 1\n{OWNERS}".encode())
    plan = make_plan(wanted, present.read(wanted))
    with lease("apply") as held:
        held.release()
        with pytest.raises(LeaseLost):
            next(Applier("a file", consequences.Effect([])).carry_out(plan, held))
    assert not Owner.objects.exists()


def test_a_change_that_takes_longer_than_the_lease_does_not_lose_it(transactional_db, monkeypatch):
    monkeypatch.setattr(applying, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(Applier, "_carry_out", lambda *_: time.sleep(1.5))
    wanted = reading.read(b"version: 1\napplications: [a]")
    held = HeldLease("apply", 0.9)
    assert held.take()
    assert list(
        Applier("a file", consequences.Effect([])).carry_out(make_plan(wanted, present.read(wanted)), held)
    ) == [None]
    held.renew()


def test_a_file_of_an_import_does_what_the_import_would_do(apply, name, alice, management, tmp_path):
    management.put_user(name, "a password")
    (tmp_path / "owners.csv").write_text(f"username,owners\n{name},alice@example.org\n")
    written = tmp_path / "adopt.yaml"
    call_command("adopt_broker", str(tmp_path / "owners.csv"), "--write", str(written))
    assert not PulseUser.objects.exists()
    assert apply(written.read_text().removeprefix("version: 1\n"))[0] == 0
    assert PulseUser.objects.get().owners.get() == alice
    with pytest.raises(CommandError, match="can't be written: File exists"):
        call_command("adopt_broker", str(tmp_path / "owners.csv"), "--write", str(written))


def test_the_documented_example_can_be_applied(apply, management):
    [example] = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "installation-file.md").read_text(), re.M | re.S)
    try:
        code, output = apply(example.removeprefix("version: 1\n"))
        assert (code, output.splitlines()[-1]) == (0, "Done.")
        assert apply(example.removeprefix("version: 1\n"))[0] == 0
    finally:
        for username in PulseUser.objects.values_list("username", flat=True):
            management.delete_user(username)


def plan_for(number, vhost):
    """Store this number of each resource, and return the statements of a plan that changes all of them."""
    lines = {section: [] for section in ("owners", "pulse_users", "queues", "offerings")}
    for index in range(number):
        owner = Owner.objects.create_user(f"owner-{index}@example.org", vouched=True)
        row = PulseUser.objects.create(username=f"user-{index}", ready=True)
        row.owners.add(owner)
        stored_queue(f"queue/user-{index}/a", vhost=vhost, pulse_user=row, ready=9, unacknowledged=0)
        lines["owners"].append(f"  {owner}: {{access: false}}")
        lines["pulse_users"].append(f"  user-{index}: {{max_length: 7}}")
        lines["queues"].append(f"- {{name: queue/user-{index}/a, max_length: 6}}")
        lines["offerings"].append(f"- {{name: offering-{index}}}")
    text = "version: 1\n" + "".join("\n".join([f"{section}:", *entries, ""]) for section, entries in lines.items())
    wanted = reading.read(text.encode())
    with CaptureQueriesContext(
        connection,
    ) as statements:
        state = present.read(wanted)
        plan = make_plan(wanted, state)
        assert len(plan.changes) == 4 * number
        consequences.of_plan(plan)
        consequences.why_braked(plan, state)
    return len(statements)


def test_the_statements_of_a_plan_do_not_grow_with_the_file(guarded):
    few = plan_for(2, guarded)
    for model in (Queue, PulseUser, Owner):
        model.objects.all().delete()
    assert plan_for(7, guarded) == few


def killed_at_each_effect(prepare, do):
    """Prepare, and have ``do`` killed after one more effect each time, until it ends. Yield after each, and resume."""
    for number in itertools.count(1):
        prepare()
        death = killed_after(number, do)
        let_time_pass()
        code, output = do()
        assert code == 0, (death.effects, output)
        yield death.effects
        if not death.killed:
            assert number > 10
            return


@pytest.mark.slow
def test_apply_is_resumed_after_a_kill_at_each_of_its_effects(apply, export, management):
    def prepare():
        empty_installation(management)
        Notification.objects.all().delete()

    assert apply(EVERYTHING)[0] == 0
    expected = export()
    for effects in killed_at_each_effect(prepare, partial(apply, EVERYTHING)):
        assert export() == expected, effects
        assert Created.objects.count() == 8, effects
    assert not Removal.objects.exists()


@pytest.mark.slow
def test_a_prune_is_resumed_after_a_kill_at_each_of_its_effects(apply, export, management):
    def prepare():
        empty_installation(management)
        assert apply(EVERYTHING)[0] == 0

    def prune():
        finish_removals()  # as Guardian does within minutes
        code, output = apply(ops, "--prune")
        return apply(ops, "--prune", "--yes", digest_in(output)) if code == 2 else (code, output)

    ops = "owners: {ops@example.org: {operator: true}}"
    for effects in killed_at_each_effect(prepare, prune):
        finish_removals()
        left = yaml.safe_load(export())
        assert left == {"version": 1, "owners": {"ops@example.org": {"access": True, "operator": True}}}, effects
        assert not Removal.objects.exists(), effects


@pytest.mark.slow
def test_two_hundred_pulse_users_are_applied_and_their_owner_is_told_in_a_few_mails(apply, management):
    names = [f"bulk-{number}" for number in range(200)]
    lines = [f"  {name}: {{owners: [alice@example.org], max_length: 9000, warn_length: 50}}" for name in names]
    try:
        code, output = apply("\n".join([f"{OWNERS}pulse_users:", *lines]))
        assert code == 0, output
        assert PulseUser.objects.filter(ready=True, max_length=9000).count() == 200
        assert Notification.objects.filter(kind="owner-assigned").count() < 20
    finally:
        for user in management.users():
            if user.name.startswith("bulk-"):
                management.delete_user(user.name)
