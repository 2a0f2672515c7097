"""Reports of errors to a real server in Sentry's place: with the request's id and without secrets."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.support.plugin import ROOT
from tests.support.recorder import Recorder
from tests.support.served import run_python
from tests.support.toolbox import wait_until
from tools.processes import end, free_port, port_answers, spawn

SECRET = "open-sesame-4711"
TOKEN = "0123456789abcdef" * 4


@contextmanager
def running(environment, *command):
    command = [sys.executable, "-m", *command]
    process = spawn(command, environment=environment, directory=ROOT, output=subprocess.DEVNULL)
    try:
        yield
    finally:
        end(process, timeout=20)


@contextmanager
def failing_site(environment):
    port = free_port()
    address = f"127.0.0.1:{port}"
    with running(environment, "gunicorn", "tests.support.failing", "--bind", address, "--no-control-socket"):
        wait_until(lambda: port_answers(port))
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def environment(tmp_path):
    return {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{tmp_path}/no-tables.sqlite3",
        "GUARDIAN_VAR_DIR": str(tmp_path),
        "PLANTED_SECRET": SECRET,
        "GUARDIAN_PROXIES": "1",  # Guardian trusts the request id of a proxy
    }


def post(site, **options):
    return httpx.post(
        f"{site}/fail/?token={SECRET}&code={SECRET}",
        data={"password": SECRET},
        headers={"X-Request-ID": "the-request", "Authorization": f"Token {TOKEN}", "Cookie": f"sessionid={SECRET}"},
        trust_env=False,
        timeout=30,
        **options,
    )


def events_in(asked):
    """Return the events of an envelope: a header line, then two lines for each item, header and payload."""
    lines = asked.body.splitlines()
    items = zip(lines[1::2], lines[2::2], strict=True)
    return [json.loads(what) for header, what in items if json.loads(header)["type"] == "event"]


@pytest.mark.slow
def test_errors_of_a_view_and_its_task_have_one_id_and_no_secret(environment):
    with Recorder() as sentry:
        environment["SENTRY_DSN"] = f"http://publickey@127.0.0.1:{sentry.port}/1"
        worker = ["celery", "-A", "guardian_site", "worker", "--include", "tests.support.failing", "--concurrency", "1"]
        with running(environment, *worker, "--without-mingle"), failing_site(environment) as site:
            answer = post(site)
            link = httpx.get(f"{site}/signin/link/{SECRET}/", trust_env=False)  # fails: the database has no tables
            sentry.wait_for(3)
    assert (answer.status_code, link.status_code) == (500, 500)
    events = [event for asked in sentry.received for event in events_in(asked)]
    by_text = {event["exception"]["values"][-1]["value"]: event for event in events}
    of_view, of_task = (
        by_text[f"The {who} can't reach amqp://guardian:…@rabbit.example.org:5672/"] for who in ("view", "task")
    )
    assert of_view["tags"]["request_id"] == of_task["tags"]["request_id"] == "the-request"
    assert of_view["request"]["method"] == "POST"
    assert of_view["request"]["url"].endswith("/fail/")
    assert not {"data", "cookies", "query_string"} & set(of_view["request"])
    assert "user" not in of_view
    (of_link,) = [event for event in events if event not in (of_view, of_task)]
    assert of_link["request"]["url"].endswith("/signin/link/…/")
    assert of_link["tags"]["request_id"] == link.headers["X-Request-ID"]
    for asked in sentry.received:
        assert SECRET not in asked.body.decode()
        assert TOKEN not in asked.body.decode()
        assert b'"vars"' not in asked.body
    assert len(events) == 3  # no duplicates


@pytest.mark.slow
def test_a_hanging_sentry_does_not_delay_requests(environment):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment["SENTRY_DSN"] = f"http://publickey@127.0.0.1:{silent.getsockname()[1]}/1"
        with failing_site(environment) as site:
            assert post(site).status_code == 500
            began = time.monotonic()
            assert post(site).status_code == 500
            assert time.monotonic() - began < 3
            began = time.monotonic()
        assert time.monotonic() - began < 8  # it sends the remaining events before it exits


@pytest.mark.slow
def test_a_failed_command_is_reported_with_an_id(environment):
    with Recorder() as sentry:
        environment["SENTRY_DSN"] = f"http://publickey@127.0.0.1:{sentry.port}/1"
        done = run_python(environment, "manage.py", "send_notifications", "--once")
    assert done.returncode == 1
    (event,) = [event for asked in sentry.received for event in events_in(asked)]
    assert "no such table" in event["exception"]["values"][-1]["value"]
    assert len(event["tags"]["request_id"]) == 16
