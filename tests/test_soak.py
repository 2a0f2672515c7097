"""Everything fails in turn while owners and agents go on, and all holds that has to: what `make soak` shows."""

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from accounts import hold
from local.load import Request
from local.soak import Fault, is_excused, plan_of
from local.trial import give_free_what_nobody_holds

PROJECT = Path(__file__).resolve().parent.parent
MISTREATED = (
    "web: killed", "guard: killed", "worker: killed", "beat: killed", "Redis: killed", "Redis: emptied",
    "RabbitMQ: stopped", "RabbitMQ: frozen", "PostgreSQL: stopped", "the mail server: puts everybody off",
    "the mail server: stopped",
)  # fmt: skip


@pytest.mark.slow
def test_everything_fails_in_turn_and_all_holds_that_has_to(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "local.soak", "--seconds", "60", "--directory", tmp_path],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything that has to hold does." in done.stdout
    assert re.match(r" *\d+\.\d s  The seed is \d+", done.stdout)
    assert [what for what in MISTREATED if what not in done.stdout] == []


def away(part, *, began=10.0, gone=11.0, ended=20.0):
    return Fault(part, "killed", began, gone, ended, datetime.now(UTC))


@pytest.mark.parametrize(
    ("request_", "is_so"),
    [
        (Request("web-1", 9.0, 10.5, "reset", "look at pages", 0), True),
        (Request("web-1", 11.5, 12.0, "reset", "look at pages", 0), False),
        (Request("web-2", 9.0, 10.5, "reset", "look at pages", 0), False),
        (Request("web-1", 9.0, 10.5, "500", "look at pages", 500), False),
    ],
)
def test_only_a_request_to_the_process_that_was_killed_may_have_no_answer(request_, is_so):
    assert is_excused(request_, [away("web-1")]) == is_so


@pytest.mark.parametrize(
    ("part", "what", "status", "is_so"),
    [
        ("RabbitMQ", "make accounts", 503, True),
        ("RabbitMQ", "make accounts", 500, False),
        ("PostgreSQL", "make accounts", 503, True),
        ("PostgreSQL", "make accounts", 500, False),
        ("web-2", "make accounts", 503, True),
        ("Redis", "make accounts", 503, False),
        ("the mail server", "sign in", 503, True),
        ("the mail server", "make accounts", 503, False),
        ("guard-1", "make accounts", 503, False),
    ],
)
def test_a_request_may_fail_for_what_it_needs_and_was_away(part, what, status, is_so):
    assert is_excused(Request("web-1", 15.0, 16.0, "failed", what, status), [away(part)]) == is_so


def test_a_request_long_after_something_was_away_has_to_be_answered():
    late = Request("web-1", 41.0, 42.0, "failed", "make accounts", 503)
    assert not is_excused(late, [away("RabbitMQ")])
    assert is_excused(late, [away("RabbitMQ"), away("RabbitMQ", ended=30.0)])


def test_whoever_asks_too_often_is_told_so_and_that_is_all_right():
    assert is_excused(Request("web-1", 1.0, 2.0, "429", "sign in", 429), [])


def test_only_the_long_run_waits_for_what_runs_out_by_itself():
    assert not plan_of(60).patience
    assert plan_of(600).patience
    assert plan_of(600).owners == 100


def test_what_a_killed_process_held_is_given_free(db):
    hold.Hold("ana").take()
    give_free_what_nobody_holds(seconds=0)
    with hold.held("ana") as again:
        again.renew()


def test_what_somebody_goes_on_with_stays_held(db, time_machine, monkeypatch):
    began = datetime(2026, 1, 1, tzinfo=UTC)
    time_machine.move_to(began, tick=False)
    with hold.held("ana") as held:

        def go_on(seconds):
            time_machine.move_to(began + timedelta(seconds=seconds), tick=False)
            held.renew()

        monkeypatch.setattr("local.trial.time.sleep", go_on)
        give_free_what_nobody_holds(seconds=hold.TOUCHED_EVERY.total_seconds())
        held.renew()
