"""The commands ``cleanup_orphan_queues`` and ``cleanup_stale_subscriptions``."""

import io
import json
import uuid
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import OperationalError
from django.utils import timezone

from accounts.models import AuthToken
from agents.sweeps import stale, sweep
from core.models import Lease
from tests.support.agents import lose_registrations
from tests.support.toolbox import AWAY

COMMANDS = ["cleanup_orphan_queues", "cleanup_stale_subscriptions"]


def run_command(*arguments):
    """Run a command in this process and return its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as end:
        call_command(*arguments, stdout=out, stderr=err)
    return end.value.code, out.getvalue() + err.getvalue()


def test_the_json_of_a_dry_run_lists_the_orphans(agent):
    orphan = agent.orphan()
    code, out = run_command("cleanup_orphan_queues", "--dry-run", "--json")
    report = json.loads(out)
    assert (code, report["would_delete"], report["found"], report["deleted"]) == (0, [orphan], 1, 0)
    assert (report["dry_run"], report["away"], report["another_sweep"]) == (True, False, False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_clean_up_beside_another_exits_with_0(agent, command):
    name = {"cleanup_orphan_queues": "orphans", "cleanup_stale_subscriptions": "stale"}[command]
    Lease.objects.create(name=name, holder=uuid.uuid4(), expires_at=timezone.now() + timedelta(seconds=60))
    assert run_command(command) == (0, "Another clean-up is running; nothing was done.\n")
    code, out = run_command(command, "--json")
    assert (code, json.loads(out)["another_sweep"]) == (0, True)


def test_without_the_broker_a_clean_up_exits_with_1(agent, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY.replace("guest@", "secret-word@")
    code, out = run_command("cleanup_orphan_queues")
    assert (code, "Error: " in out, "secret-word" in out, "registration" in out) == (1, True, False, False)
    code, out = run_command("cleanup_orphan_queues", "--json", "--dry-run")
    assert (code, json.loads(out)["away"]) == (1, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_database_a_clean_up_exits_with_1(agent, monkeypatch, command):
    def away(**_):
        raise OperationalError("no such table")

    monkeypatch.setattr(sweep, "sweep_orphans", away)
    monkeypatch.setattr(stale, "clean_up_stale", away)
    code, out = run_command(command)
    assert (code, "The database can't be used" in out) == (1, True)


def test_a_sweep_past_the_brake_exits_with_3_and_with_0_if_forced(agent, settings):
    settings.GUARDIAN_DELETE_BRAKE = 1
    newer = lose_registrations(agent, 3)
    for options in ((), ("--dry-run",)):
        code, out = run_command("cleanup_orphan_queues", *options)
        assert (code, "the brake blocks" in out) == (3, True)
        assert all(f"Would delete {name}" in out for name in newer)
    code, out = run_command("cleanup_orphan_queues", "--force")
    assert (code, "3 deleted" in out) == (0, True)
    assert agent.names == agent.registered


def test_a_stale_clean_up_past_the_brake_exits_with_3_and_with_0_if_forced(agent, settings):
    settings.GUARDIAN_DELETE_BRAKE = 1
    AuthToken.objects.all().delete()
    for options in ((), ("--dry-run",)):
        code, out = run_command("cleanup_stale_subscriptions", *options)
        assert (code, "alice@example.org has no valid token" in out) == (3, True)
    code, out = run_command("cleanup_stale_subscriptions", "--force")
    assert (code, "removed with 2 queues" in out) == (0, True)
    assert agent.names == {"guardian.dlq"}


def test_control_characters_of_a_queue_name_are_escaped(agent):
    agent.orphan("subscription_\x1b[2J\u202eabc")
    code, out = run_command("cleanup_orphan_queues", "--dry-run")
    assert code == 0
    assert r"Would delete subscription_\x1b[2J\u202eabc in" in out
