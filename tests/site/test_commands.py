"""The commands as separate processes, including killed ones."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from django.core.management import call_command
from django.utils import timezone

from accounts.models import Owner, PulseUser
from core.models import Lease
from notifications.models import Notification
from queues.guard.pass_run import Report
from queues.management.commands.monitor_queues import as_text
from queues.models import Pass, Queue
from tests.support.faults import run_scheduled_work
from tests.support.served import run_python
from tests.support.toolbox import queue_names, wait_until
from tools.invariants import breaches
from tools.redis import PrivateRedis

ROOT = Path(__file__).resolve().parents[2]


def start(environment, *arguments, **changes):
    return subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env={**environment, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(environment, *arguments, **changes):
    ended = run_python({**environment, **changes}, "manage.py", *arguments)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.slow
def test_monitor_queues_prints_its_report_as_json(amqp, environment):
    amqp.queue("short", 1)
    amqp.queue("warned", 6)
    amqp.queue("long", 11)
    code, out, err = run(environment, "monitor_queues", "--once", "--json")
    report = json.loads(out)
    assert code == 0, err
    assert {name: report[name] for name in ("queues", "new", "warned", "deleted", "kept", "gone", "unknown")} == {
        "queues": 3, "new": 3, "warned": 1, "deleted": 1, "kept": 0, "gone": 0, "unknown": 0,
    }  # fmt: skip
    assert (report["errors"], report["brake_held"]) == ([], False)
    assert report["seconds"] > report["listing_seconds"] > 0


@pytest.mark.slow
def test_without_the_broker_monitor_queues_exits_with_1(environment):
    code, out, _ = run(
        environment, "monitor_queues", "--once", RABBITMQ_MANAGEMENT_URL="http://guest:secret-word@127.0.0.1:1"
    )
    assert code == 1
    assert "Error" in out
    assert "secret-word" not in out


def exit_code(*options):
    """Run monitor_queues in this process, as a process takes 2 s CPU time, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        call_command("monitor_queues", *options)
    return ended.value.code


def test_monitor_queues_past_the_brake_exits_with_3_and_with_0_if_forced(amqp, guarded, settings):
    settings.GUARDIAN_DELETE_BRAKE = 1
    for number in range(2):
        amqp.queue(f"long-{number}", 11)
    assert exit_code("--once") == 3
    assert exit_code("--once", "--dry-run") == 3
    assert exit_code("--once", "--force") == 0


def test_monitor_queues_beside_another_pass_exits_with_0(guarded, capsys):
    Lease.objects.create(
        name="pass", holder="00000000-0000-0000-0000-000000000001", expires_at=timezone.now() + timedelta(seconds=60)
    )
    assert exit_code("--once") == 0
    assert "Another pass is running" in capsys.readouterr().out


def test_a_dry_run_lists_the_queues_it_would_delete(amqp, guarded, capsys):
    amqp.queue("long", 11)
    assert exit_code("--once", "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(r"delete +long +\S+ +nobody +11 +10 +unknown +0\n +1 in all", out), out
    assert not Queue.objects.exists()


def test_control_characters_in_an_error_are_escaped():
    report = Report(at=timezone.now(), away=True, errors=["a\x1b[2Jb in /: refused"])
    assert as_text(report) == "Error: a\\x1b[2Jb in /: refused"


@pytest.mark.slow
def test_two_concurrent_monitors_send_each_notification_once(amqp, environment):
    owner = Owner.objects.create_user("alice@example.org")
    PulseUser.objects.create(username="alice", ready=True).owners.add(owner)
    monitors = [start(environment, "monitor_queues") for _ in range(2)]
    try:
        wait_until(lambda: Pass.objects.count() > 2)
        amqp.queue("queue/alice/builds", 6)
        wait_until(lambda: Notification.objects.filter(kind="warning").exists())
        amqp.publish("queue/alice/builds", 5)
        wait_until(lambda: Notification.objects.filter(kind="deletion").exists())
        passes = Pass.objects.count()
        wait_until(lambda: Pass.objects.count() > passes + 3)
    finally:
        for process in monitors:
            process.terminate()
        codes = [process.wait(timeout=20) for process in monitors]
    assert codes == [0, 0]
    notified = Notification.objects.filter(recipient="alice@example.org").order_by("id")
    assert list(notified.values_list("kind", flat=True)) == ["warning", "deletion"]


@pytest.mark.slow
def test_sigterm_ends_the_current_pass_and_releases_the_lease(amqp, environment):
    process = start(environment, "monitor_queues")
    wait_until(lambda: Pass.objects.exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert Lease.objects.get(name="pass").holder is None


@pytest.mark.slow
def test_monitor_queues_ends_when_its_output_is_closed(guarded, environment):
    process = start(environment, "monitor_queues", GUARDIAN_POLL_SECONDS="1")
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.soak)])
def test_a_monitor_killed_repeatedly_loses_and_repeats_nothing(amqp, environment, management, kills):
    owner = Owner.objects.create_user("alice@example.org")
    PulseUser.objects.create(username="alice", ready=True).owners.add(owner)
    kinds = ("warned", "long", "short")
    warned, long, short = ([f"queue/alice/{kind}-{number}" for number in range(2 * kills)] for kind in kinds)
    for name in warned:
        amqp.queue(name, 6)
    for kill in range(kills):
        holder, passes = Lease.objects.values_list("holder", flat=True).first(), Pass.objects.count()
        process = start(environment, "monitor_queues")
        for name in long[2 * kill : 2 * kill + 2]:
            amqp.queue(name, 11)
        if kill % 2:
            wait_until(lambda passes=passes: Pass.objects.count() > passes)
        else:  # in the middle of a pass
            wait_until(lambda holder=holder: Lease.objects.exclude(holder=None).exclude(holder=holder).exists())
        process.kill()
        process.communicate()
        # As if the lease of the killed process had expired.
        Lease.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    for name in short:
        amqp.queue(name, 1)
    run(environment, "monitor_queues", "--once")
    assert run(environment, "monitor_queues", "--once")[0] == 0
    notified = Notification.objects.filter(recipient="alice@example.org").values_list("kind", "facts__queue")
    assert sorted(notified) == sorted([("warning", name) for name in warned] + [("deletion", name) for name in long])
    on_broker = queue_names(management, environment["GUARDIAN_VHOSTS"])
    assert on_broker == {*warned, *short}
    assert set(Queue.objects.exclude(state="gone").values_list("name", flat=True)) == on_broker


@pytest.mark.slow
def test_without_the_task_queue_a_pass_completes_and_mails_go_out_later(amqp, environment, mailbox):
    amqp.queue("long", 11)
    code, out, err = run(environment, "monitor_queues", "--once", "--json", CELERY_BROKER_URL="redis://127.0.0.1:1/0")
    assert code == 0, err
    assert json.loads(out)["deleted"] == 1
    assert "the periodic task will send" in err
    code, out, _ = run(environment, "send_notifications", "--once", EMAIL_URL=mailbox.url)
    assert (code, out.split(",")[0]) == (0, "1 sent")
    assert [mail.subject for mail in mailbox.mails] == ["[Guardian] Deleted: long had 11 messages"]


@contextlib.contextmanager
def celery(environment, *parts):
    """Run these workers and beat in the meantime."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "guardian_site", *part],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )
        for part in parts
    ]  # fmt: skip
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=20)


WORKER = ["worker", "--concurrency", "1", "--without-mingle", "--without-gossip"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param([["guarding"], ["deleting"], ["celery"]], id="one for each"),
        pytest.param([[]], id="one for all", marks=pytest.mark.soak),
    ],
)
def test_workers_and_beat_on_the_file_system_guard_and_notify(amqp, environment, mailbox, tmp_path, workers):
    owner = Owner.objects.create_user("alice@example.org")
    PulseUser.objects.create(username="alice", ready=True).owners.add(owner)
    environment |= {"EMAIL_URL": mailbox.url, "GUARDIAN_VAR_DIR": str(tmp_path), "GUARDIAN_POLL_SECONDS": "1"}
    parts = [
        [*WORKER, *(["--queues", *queues, "--hostname", f"{queues[0]}@%h"] if queues else [])] for queues in workers
    ]
    with celery(environment, *parts, ["beat"]):
        amqp.queue("queue/alice/builds", 6)
        mailbox.wait_for(lambda mail: "Warning" in mail.subject and "alice@example.org" in mail.recipients, timeout=40)
        amqp.publish("queue/alice/builds", 5)
        mailbox.wait_for(lambda mail: "Deleted" in mail.subject and "alice@example.org" in mail.recipients, timeout=40)
    assert len(mailbox.to("alice@example.org")) == 2


@pytest.mark.soak
def test_flushing_redis_loses_only_its_queued_tasks(amqp, environment, guarded, management, mailbox, tmp_path):
    environment |= {"EMAIL_URL": mailbox.url, "GUARDIAN_VAR_DIR": str(tmp_path), "GUARDIAN_POLL_SECONDS": "1"}
    with PrivateRedis() as server, celery({**environment, "CELERY_BROKER_URL": server.url}, WORKER, ["beat"]):
        amqp.queue("builds", 6)
        mailbox.wait_for(lambda mail: "Warning" in mail.subject, timeout=60)
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        amqp.publish("builds", 5)
        mailbox.wait_for(lambda mail: "Deleted" in mail.subject, timeout=60)
    run_scheduled_work()
    assert breaches(management, [guarded], mailbox.mails) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["worker", pytest.param("beat", marks=pytest.mark.soak)])
def test_a_worker_or_beat_with_an_invalid_setting_does_not_start(environment, part, tmp_path):
    environment |= {"GUARDIAN_MAX_QUEUE_LENGTH": "80k", "GUARDIAN_VAR_DIR": str(tmp_path)}
    answer = run_python(environment, "-m", "celery", "-A", "guardian_site", part)
    assert answer.returncode != 0
    assert "GUARDIAN_MAX_QUEUE_LENGTH can't be read" in answer.stderr


@pytest.mark.slow
def test_apply_exits_with_2_while_changes_are_pending_and_with_1_after_an_error(environment, tmp_path):
    path = tmp_path / "installation.yaml"
    path.write_text("version: 1\nowners: {alice@example.org: {access: true}}\n")
    assert run(environment, "apply", str(path), "--dry-run")[0] == 2
    assert run(environment, "apply", str(path))[0] == 0
    code, out, _ = run(environment, "export")
    assert (code, out) == (0, "version: 1\nowners:\n  alice@example.org:\n    access: true\n    operator: false\n")
    path.write_text("owners: {}")
    code, _, err = run(environment, "apply", str(path))
    assert (code, err.splitlines()[-2:]) == (
        1, [f"{path}:1:1: 'version' is missing here: write version: 1.", "CommandError: Nothing was done."],
    )  # fmt: skip


@pytest.mark.django_db
def test_create_owner_updates_an_existing_owner_and_revokes_nothing():
    call_command("create_owner", " Alice@Example.org ", "--vouched")
    call_command("create_owner", "ALICE@example.org", "--operator")
    call_command("create_owner", "alice@example.org")
    owner = Owner.objects.get()
    assert (owner.email, owner.vouched, owner.is_staff) == ("alice@example.org", True, True)
    assert not owner.has_usable_password()
