"""Processes are killed and restarted under load, and nothing is lost or done twice: what `make restarts` shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from local.restarts import SHORT, Deed, Logs, Request, Restarts, TwoBeats, _is_cut

PROJECT = Path(__file__).resolve().parent.parent
TASK = "2026-11-21 19:15:19,011 INFO celery: Task queues.tasks.send_notifications[{}] {}"
FIRST, SECOND = "819f10c5-2195-4014-bc91-92ab2f49bbd0", "7ef0b780-6d87-4163-99ab-b0b106d24e72"


@pytest.mark.slow
def test_one_of_each_kind_is_killed_and_one_asked_to_end_and_nothing_is_lost_or_done_twice(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "local.restarts", "--short", "--directory", tmp_path],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was lost, and nothing done twice." in done.stdout
    for word in ("SIGKILL", "SIGTERM", "Redis was killed", "Two beats"):
        assert word in done.stdout


def test_a_worker_has_in_hand_what_it_took_and_neither_ended_nor_gave_back():
    logs = Logs()
    logs.read("worker-1", TASK.format(FIRST, "received"))
    logs.read("worker-1", TASK.format(SECOND, "received"))
    assert logs.in_hand("worker-1") == {FIRST, SECOND}
    assert logs.in_hand("worker-2") == set()
    logs.read("worker-1", TASK.format(FIRST, "succeeded in 1.1s: None"))
    assert logs.in_hand("worker-1") == {SECOND}
    logs.read("worker-1", "INFO kombu.transport.virtual.base: Restoring 1 unacknowledged message(s)")
    assert logs.in_hand("worker-1") == set()


def test_only_a_request_that_was_under_way_at_the_kill_may_be_cut():
    assert _is_cut(Request("web-1", 10.0, 11.0, "reset"), [10.5])
    assert not _is_cut(Request("web-1", 10.6, 11.0, "reset"), [10.5])
    assert not _is_cut(Request("web-1", 10.0, 10.4, "reset"), [10.5])


def test_a_process_that_left_something_undone_is_told(tmp_path):
    restarts = Restarts(SHORT, 1, tmp_path, say=lambda text: None)
    restarts._deeds = [
        Deed("guard-1", "SIGTERM", 0, 1, code=0, in_hand=1, finished=1),
        Deed("guard-2", "SIGTERM", 0, 1, code=0, in_hand=1, finished=0),
        Deed("worker-1", "SIGTERM", 0, 1, code=-9, in_hand=0, finished=0),
        Deed("worker-2", "SIGKILL", 0, 1, code=-9, in_hand=1, finished=0),
    ]
    assert [finding.wrong for finding in restarts._ended()] == [
        [], ["what it had in hand was not finished"], ["it ended with -9"], [],
    ]  # fmt: skip


def test_passes_that_stop_for_too_long_are_told(tmp_path):
    restarts = Restarts(SHORT, 1, tmp_path, say=lambda text: None)
    assert restarts._waited_too_long(SHORT.gap - 1) == []
    assert restarts._waited_too_long(SHORT.gap + 1) == ["there was no pass for 61.0 s, and 60 s are all right"]
    restarts._redis_away = [(10.0, 13.0, 14.0)]
    assert restarts._waited_too_long(SHORT.gap + 1) == []


def test_two_beats_of_which_one_did_nothing_are_told(tmp_path):
    restarts = Restarts(SHORT, 1, tmp_path, say=lambda text: None)
    assert restarts._beats().wrong == ["there never were two"]
    restarts._two_beats = [TwoBeats(3, 4, 5, 8)]
    assert restarts._beats().wrong == []
    assert restarts._beats().figures == "for 3.0 s, asking for 4 and 5 tasks; 8 passes meanwhile"
    restarts._two_beats.append(TwoBeats(63, 4, 0, 4))
    assert restarts._beats().wrong == ["one of them asked for nothing in 63.0 s"]


def test_a_beat_has_asked_as_often_as_it_says():
    logs = Logs()
    for _ in range(2):
        logs.read("beat", "INFO celery.beat: Scheduler: Sending due task monitor (queues.tasks.monitor_queues)")
    assert (logs.asked("beat"), logs.asked("beat-2")) == (2, 0)
