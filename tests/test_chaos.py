"""``make soak``: a short run, and which requests may fail during a fault."""

import subprocess
import sys
from datetime import UTC, datetime

import pytest

from tests.plugin import ROOT
from tools.faults import Fault, is_excused
from tools.load import Request


@pytest.mark.soak
def test_a_short_chaos_run_breaks_no_invariant(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos", "--seconds", "3", "--directory", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "guard: killed" in done.stdout
    assert "All invariants hold." in done.stdout


def fault(part, how="killed"):
    return Fault(part, how, began=10.0, gone=11.0, ended=20.0, back=datetime.now(UTC))


@pytest.mark.parametrize(
    ("fault_", "request_", "may_fail"),
    [
        (fault("web-1"), Request("web-1", 9.0, 10.5, "reset", "look at pages", 0), True),
        (fault("web-1", "ended"), Request("web-1", 9.0, 10.5, "reset", "look at pages", 0), False),
        (fault("web-1"), Request("web-1", 11.5, 12.0, "reset", "look at pages", 0), False),
        (fault("web-1"), Request("web-2", 9.0, 10.5, "reset", "look at pages", 0), False),
        (fault("web-1"), Request("web-1", 9.0, 10.5, "error", "look at pages", 500), False),
        (fault("web-2"), Request("web-1", 15.0, 16.0, "error", "create accounts", 503), True),
        (fault("RabbitMQ"), Request("web-1", 15.0, 16.0, "error", "create accounts", 503), True),
        (fault("RabbitMQ"), Request("web-1", 15.0, 16.0, "error", "create accounts", 500), False),
        (fault("RabbitMQ"), Request("web-1", 41.0, 42.0, "error", "create accounts", 503), False),
        (fault("PostgreSQL"), Request("web-1", 41.0, 42.0, "error", "create accounts", 503), True),
        (fault("the mail server"), Request("web-1", 15.0, 16.0, "error", "sign in", 503), True),
        (fault("the mail server"), Request("web-1", 15.0, 16.0, "error", "create accounts", 503), False),
        (fault("Redis"), Request("web-1", 15.0, 16.0, "error", "create accounts", 503), False),
        (fault("guard-1"), Request("web-1", 15.0, 16.0, "error", "create accounts", 503), False),
        (fault("Redis"), Request("web-1", 1.0, 2.0, "error", "sign in", 429), True),
    ],
)
def test_a_request_may_fail_only_if_a_fault_explains_it(fault_, request_, may_fail):
    assert is_excused(request_, [fault_]) == may_fail
