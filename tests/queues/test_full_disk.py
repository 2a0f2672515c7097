"""A full disk: nothing ends or hangs for it, /readyz says so, and all goes on when there is room again."""

import contextlib
import os
import signal
import smtplib
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from celery import current_app

from guardian_site.beat import Scheduler
from status import facts
from tests.support.toolbox import wait_until
from tools.mail import MailCatcher
from tools.processes import ProcessGroup, StartError
from tools.stack import MIN_FREE_BYTES, Stack, free_bytes, isolated

pytestmark = pytest.mark.slow


class Disk:
    """A small disk that can be filled and emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Write until not a byte fits."""
        for size in (65536, 1):
            with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as filler:
                while filler.write(b"x" * size):
                    pass

    def free(self) -> None:
        """Delete what filled the disk."""
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path, request):
    """Return an empty disk in memory, of 1 MB by default."""
    size = getattr(request, "param", "1m")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False)
    if mounted.returncode != 0:
        pytest.skip("only root can mount a disk")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", path], check=True)


def test_a_child_does_not_wait_for_its_log(disk, tmp_path):
    shown = []

    def show(name, line):
        shown.append(line)

    group = ProcessGroup(dict(os.environ), directory=tmp_path, logs=disk.path, show=show)
    disk.fill()
    group.start("one", [sys.executable, "-c", "for number in range(3000): print('x' * 50, number)"])
    wait_until(lambda: len(shown) == 3000)  # more than fits into a pipe
    wait_until(group.ended)
    disk.free()
    group.start("one", [sys.executable, "-c", "print('room')"])
    wait_until(lambda: "room" in group.log("one").read_text())
    group.stop()


def test_a_log_notes_the_lines_that_are_missing(disk, tmp_path):
    group = ProcessGroup(dict(os.environ), directory=tmp_path, logs=disk.path)
    go_on = tmp_path / "go-on"
    script = f"while [ ! -e {go_on} ]; do echo {'x' * 1000}; sleep 0.01; done; echo found"
    group.start("one", ["/bin/sh", "-c", f"echo first; {script}"])
    wait_until(lambda: group.log("one").exists() and "first" in group.log("one").read_text())
    disk.fill()
    time.sleep(0.3)
    disk.free()
    go_on.touch()
    wait_until(lambda: "found" in group.log("one").read_text())
    assert "lines are missing here, because they could not be written]" in group.log("one").read_text()
    group.stop()


def test_beat_goes_on_if_it_cannot_write_its_schedule(disk, caplog):
    scheduler = Scheduler(current_app, schedule_filename=str(disk.path / "schedule"), lazy=True)
    scheduler.setup_schedule()
    disk.fill()
    for entry in scheduler.schedule.values():
        entry.kwargs = {"filler": "x" * 100_000}
    scheduler.sync()
    assert "The schedule could not be written" in caplog.text
    disk.free()
    caplog.clear()
    scheduler.sync()
    assert not caplog.text
    scheduler.close()


def test_the_task_queue_does_not_answer_if_its_folder_is_full(disk, settings):
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = {"data_folder_out": str(disk.path)}
    facts.write_to_task_queue()
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        facts.write_to_task_queue()
    disk.free()
    facts.write_to_task_queue()
    assert not list(disk.path.iterdir())


def test_a_mail_that_cannot_be_kept_is_refused_temporarily():
    def fail(mail):
        raise OSError

    with MailCatcher(on_mail=fail) as catcher, smtplib.SMTP("127.0.0.1", catcher.port) as client:
        with pytest.raises(smtplib.SMTPDataError) as refused:
            client.sendmail("a@example.org", ["b@example.org"], "Subject: x\n\nx")
        assert refused.value.smtp_code == 452
        assert catcher.mails == []


@pytest.mark.soak
@pytest.mark.parametrize("disk", ["300m"], indirect=True)
def test_make_run_guards_again_when_there_is_room(disk):
    environment = isolated({"DATABASE_URL": f"sqlite:///{disk.path}/guardian.sqlite3", "GUARDIAN_POLL_SECONDS": "1"})
    said = []
    with Stack(environment, var=disk.path / "var", say=said.append) as stack:
        stack.prepare()
        stack.start()

        def status(path):
            return httpx.get(f"{stack.base_url}{path}", trust_env=False, timeout=10).status_code

        def passes():
            from_shell = "from queues.models import Pass; print(Pass.objects.count())"
            return int(stack.manage("shell", "--no-imports", "-c", from_shell))

        wait_until(lambda: status("/readyz") == 200)

        def supervise():
            with contextlib.suppress(OSError, StartError):  # the test stops the stack and unmounts the disk
                stack.wait()

        supervisor = threading.Thread(target=supervise, daemon=True)
        supervisor.start()
        before = wait_until(passes, 60)
        disk.fill()
        assert free_bytes(disk.path) < MIN_FREE_BYTES
        wait_until(lambda: status("/readyz") == 503)
        assert status("/healthz") == 200
        os.kill(stack._processes.pid("beat"), signal.SIGKILL)  # as a full disk may end any process
        stack.node.kill()  # RabbitMQ breaks after three minutes
        disk.free()
        wait_until(lambda: status("/readyz") == 200, 60)
        wait_until(lambda: passes() > before + 5, 60)
        assert supervisor.is_alive()
    assert [line for line in said if "is full" in line or "There is room" in line or "starts again" in line] == [
        f"The disk of {disk.path}/var is full, so no queue is guarded. Guardian continues when there is room.",
        "There is room on the disk again.",
        "RabbitMQ starts again, because it does not answer since the disk was full.",
        "The process 'beat' starts again, because it ended on the full disk.",
    ]
