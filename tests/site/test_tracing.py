"""A request id is passed from a request through its tasks to the calls to the broker."""

import json
import os
import re
import sys

import pytest
from celery import shared_task, signals
from django.test import Client
from kombu import Connection

from core import broker
from guardian_site import tracing
from rabbit.threads import ContextThreadPool
from tests.support.plugin import ROOT
from tests.support.recorder import Recorder
from tests.support.served import database_url, run_python
from tests.support.toolbox import wait_until
from tools.processes import end, spawn

NEW = re.compile(r"[0-9a-f]{16}")
LISTED = json.dumps({"name": "guardian", "tags": ["administrator"]}).encode()


@pytest.fixture
def behind_a_proxy(settings):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 1


def test_a_request_id_is_accepted_only_from_a_proxy(settings):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 0
    assert NEW.fullmatch(Client(headers={"X-Request-ID": "somebody-elses"}).get("/healthz")["X-Request-ID"])


@pytest.mark.usefixtures("behind_a_proxy")
@pytest.mark.parametrize("given", ["a", "Proxy-1.2_3", "x" * 64])
def test_a_request_keeps_the_id_of_a_proxy(given):
    assert Client(headers={"X-Request-ID": given}).get("/healthz")["X-Request-ID"] == given


@pytest.mark.usefixtures("behind_a_proxy")
@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a\nb", "a:b", "ä", "<script>", "a\n", "\u0661"])
def test_an_invalid_request_id_is_replaced(given):
    assert NEW.fullmatch(Client(headers={"X-Request-ID": given}).get("/healthz")["X-Request-ID"])


def test_each_request_without_an_id_gets_a_new_one():
    ids = {Client().get(page)["X-Request-ID"] for page in ("/healthz", "/healthz", "/no-such-page", "/static/no.css")}
    assert len(ids) == 4
    assert tracing.current() == ""


def test_requests_to_the_broker_have_the_id(settings):
    with Recorder(LISTED) as recorder:
        settings.RABBITMQ_MANAGEMENT_URL = f"http://guardian:secret@127.0.0.1:{recorder.port}"
        with tracing.use_id("from-a-request"):
            broker.management().whoami()
        broker.management().whoami()
    first, second = recorder.received
    assert first.headers["X-Request-ID"] == "from-a-request"
    assert "X-Request-ID" not in second.headers


def test_threads_inherit_the_id():
    with tracing.use_id("ours"), ContextThreadPool(2) as threads:
        assert list(threads.map(lambda _: tracing.current(), range(4))) == ["ours"] * 4
        with tracing.use_id("another"):
            assert threads.submit(tracing.current).result() == "another"
        assert threads.submit(lambda given, more: (given, more), 1, more=2).result() == (1, 2)


@shared_task(name="tests.say_id")
def say_id():
    return tracing.current()


@pytest.fixture
def published():
    seen = []

    def keep(headers, **_):
        seen.append(headers)

    signals.after_task_publish.connect(keep)
    yield seen
    signals.after_task_publish.disconnect(keep)


def test_a_published_task_has_the_id_of_its_request(published):
    with Connection("memory://") as memory:
        with tracing.use_id("from-a-request"):
            say_id.apply_async(connection=memory)
        say_id.apply_async(connection=memory)  # like beat
    first, second = (headers[tracing.TASK_HEADER] for headers in published)
    assert first == "from-a-request"
    assert NEW.fullmatch(second)


def test_a_task_called_directly_has_the_id_of_its_caller():
    with tracing.use_id("ours"):
        assert say_id.apply().get() == "ours"
        assert tracing.current() == "ours"
    assert NEW.fullmatch(say_id.apply().get())
    assert tracing.current() == ""


@shared_task(name="tests.fail")
def fail():
    raise RuntimeError("broken")


def test_a_failed_task_leaves_no_id_behind():
    assert fail.apply().failed()
    assert tracing.current() == ""
    assert tracing._running == {}


def test_a_task_message_with_an_invalid_id_gets_a_new_one():
    class Task:
        request = {}

    for given in (None, "", "a b", 7, ["x"]):
        Task.request = {} if given is None else {tracing.TASK_HEADER: given}
        tracing.adopt_id(task_id="1", task=Task)
        assert NEW.fullmatch(tracing.current())
        tracing.forget_id(task_id="1")
    assert tracing.current() == ""


START_TASK = (
    "from guardian_site import tracing; from queues.tasks import monitor_queues;"
    "monitor_queues.delay(); print('published under', tracing.current())"
)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_an_id_is_passed_from_a_command_through_a_worker_to_the_broker(tmp_path):
    with Recorder(b"[]") as broker:
        environment = {
            **os.environ,
            "DATABASE_URL": database_url(),
            "GUARDIAN_VAR_DIR": str(tmp_path),
            "RABBITMQ_MANAGEMENT_URL": f"http://guardian:secret@127.0.0.1:{broker.port}",
            "LOG_FORMAT": "json",
            "LOG_LEVEL": "DEBUG",
            "PYTHONWARNINGS": "ignore",  # Celery's warning about running as root
        }
        log = tmp_path / "worker.log"
        command = [sys.executable, "-m", "celery", "--quiet", "-A", "guardian_site", "worker", "--concurrency", "1"]
        with log.open("wb") as output:
            worker = spawn(command, environment=environment, directory=ROOT, output=output)
        try:
            started = run_python(environment, "manage.py", "shell", "-c", START_TASK)
            request_id = started.stdout.split()[-1]
            wait_until(lambda: "succeeded" in log.read_text(), seconds=60)
            log_text = log.read_text()
        finally:
            end(worker, timeout=20)
    assert NEW.fullmatch(request_id)
    assert {asked.headers["X-Request-ID"] for asked in broker.received} == {request_id}
    lines = [json.loads(line) for line in log_text.splitlines()]
    of_task = [line for line in lines if line.get("request_id") == request_id]
    assert {"guardian.broker", "celery.app.trace", "queues.guard.monitor"} <= {line["logger"] for line in of_task}
    calls = [line for line in of_task if line["logger"] == "guardian.broker"]
    assert len(calls) == len(broker.received)
    assert {call["level"] for call in calls} == {"DEBUG"}
    received = [line for line in lines if line["message"].startswith("Task queues.tasks.monitor_queues")]
    assert len(received) == len({line["message"] for line in received}) == 2  # received, and succeeded
    assert "secret" not in log_text


def test_no_package_uses_a_plain_thread_pool():
    packages = ("guardian_site", "queues", "accounts", "rabbit")
    files = [file for room in packages for file in (ROOT / room).rglob("*.py")]
    assert [file.name for file in files if "ThreadPoolExecutor(" in file.read_text()] == []
