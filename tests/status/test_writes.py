"""Servers that answer and refuse what Guardian needs: /readyz is 503, and log and doctor have the server's reason."""

import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import redis
from celery import current_app
from django.db import connection, connections

from status.doctor import addresses, database, services
from status.doctor import settings as doctor_settings
from status.doctor.findings import Status
from tests.support.toolbox import login_without_configure, wait_until
from tools.processes import StartError, free_port
from tools.redis import PrivateRedis
from tools.stack import Stack, isolated

WORKING = {"database": True, "task_queue": True, "broker": True}


@pytest.fixture(scope="module")
def server():
    with PrivateRedis() as started:
        yield started


@pytest.fixture
def redis_client(server, settings, monkeypatch):
    """Have Guardian use a Redis as task queue, and give a client that changes its configuration."""
    settings.CELERY_BROKER_URL, settings.CELERY_BROKER_TRANSPORT_OPTIONS = server.url, {"socket_timeout": 2}
    settings.CELERY_BROKER_TRANSPORT = None
    monkeypatch.setenv("CELERY_BROKER_URL", server.url)  # Celery prefers it to its settings
    current_app.set_default()  # for the threads of /readyz
    for name in ("broker_url", "broker_transport", "broker_transport_options"):  # Celery has read its settings
        monkeypatch.setitem(current_app.conf, name, getattr(settings, f"CELERY_{name.upper()}"))
    with redis.Redis.from_url(server.url) as client:
        yield client
        client.replicaof("NO", "ONE")
        client.config_set("maxmemory", 0)
        client.config_set("min-replicas-to-write", 0)


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [
        (lambda client: client.replicaof("127.0.0.1", free_port()), "read only replica"),
        (lambda client: client.config_set("maxmemory", 1), "'maxmemory'"),
        (lambda client: client.config_set("min-replicas-to-write", 1), "Not enough good replicas"),
    ],
    ids=["a replica", "full", "without replicas"],
)
def test_a_redis_that_refuses_writes(guarded, client, caplog, redis_client, refuse, reason):
    assert client.get("/readyz").json() == WORKING
    assert {one.status for one in database.check_task_queue()} == {Status.OK}
    refuse(redis_client)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, WORKING | {"task_queue": False})
    assert reason in caplog.text
    (finding,) = database.check_task_queue()
    assert (finding.name, finding.status, reason in finding.found) == ("task queue", Status.PROBLEM, True)


@pytest.mark.skipif("connection.vendor == 'sqlite'")
def test_a_database_that_is_read_only(guarded, client, caplog, monkeypatch):
    connection.close()
    options = connections.settings["default"].get("OPTIONS", {})
    with monkeypatch.context() as patched:
        read_only = {**options, "options": "-c default_transaction_read_only=on"}
        patched.setitem(connections.settings["default"], "OPTIONS", read_only)
        answer = client.get("/readyz")
        (finding,) = [one for one in database.check_database() if one.name == "database writes"]
        connection.close()
    assert (answer.status_code, answer.json()) == (503, WORKING | {"database": False})
    assert "read-only transaction" in caplog.text
    assert (finding.status, "read-only transaction" in finding.found) == (Status.PROBLEM, True)


def test_a_broker_that_refuses_to_declare(guarded, client, settings, caplog, management, broker):
    vhost = settings.GUARDIAN_PULSE_VHOST
    assert client.get("/readyz").json() == WORKING
    with login_without_configure(management, vhost, broker) as settings.RABBIT_URL:
        answer = client.get("/readyz")
        (finding,) = addresses.check_amqp()
    assert (answer.status_code, answer.json()) == (503, WORKING | {"broker": False})
    assert "ACCESS_REFUSED" in caplog.text
    assert (finding.status, "ACCESS_REFUSED" in finding.found) == (Status.PROBLEM, True)


def test_a_vhost_that_is_at_its_limit_of_queues(guarded, client, settings, caplog, broker):
    limit = f"{broker.management_url}/api/vhost-limits/{quote(settings.GUARDIAN_PULSE_VHOST, safe='')}/max-queues"
    httpx.put(limit, json={"value": 0}).raise_for_status()
    try:
        answer = client.get("/readyz")
        (finding,) = addresses.check_amqp()
    finally:
        httpx.delete(limit).raise_for_status()
    assert answer.json() == WORKING | {"broker": False}
    assert "queue limit" in caplog.text
    assert (finding.status, "set_vhost_limits" in finding.advice) == (Status.PROBLEM, True)


@pytest.mark.parametrize("judged", ["the sender", "the recipient"])
def test_a_mail_server_that_refuses_guardians_mails(mailbox, settings, judged):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
    (finding,) = services.check_mail_server()
    assert finding.status is Status.OK
    if judged == "the sender":
        mailbox.refuse(True)
    else:
        mailbox.rejected.add("ops@example.org")
    (finding,) = services.check_mail_server()
    assert finding.status is Status.PROBLEM
    assert ("451 Try again later" if judged == "the sender" else "550") in finding.found
    assert mailbox.mails == []


def test_a_folder_that_cannot_be_written(settings, tmp_path):
    settings.VAR_DIR, settings.CELERY_BROKER_TRANSPORT_OPTIONS = tmp_path, {"control_folder": Path("/proc/self")}
    (finding,) = doctor_settings._folders()
    assert (finding.status, "/proc/self" in finding.found) == (Status.PROBLEM, True)


@pytest.mark.slow
def test_make_run_guards_again_when_its_redis_is_no_longer_a_replica(server, tmp_path):
    environment = isolated(
        {
            "DATABASE_URL": f"sqlite:///{tmp_path}/guardian.sqlite3",
            "CELERY_BROKER_URL": server.url,
            "GUARDIAN_POLL_SECONDS": "1",
        }
    )
    said = []
    with Stack(environment, var=tmp_path / "var", say=said.append) as stack, redis.Redis.from_url(server.url) as client:
        stack.prepare()
        stack.start()

        def supervise():
            with suppress(OSError, StartError):  # the test stops the stack
                stack.wait()

        def passes():
            from_shell = "from queues.models import Pass; print(Pass.objects.count())"
            return int(stack.manage("shell", "--no-imports", "-c", from_shell))

        def is_ready():
            return httpx.get(f"{stack.base_url}/readyz", trust_env=False, timeout=10).json()["task_queue"]

        supervisor = threading.Thread(target=supervise, daemon=True)
        supervisor.start()
        wait_until(passes, 60)
        supervisor.join(11)  # processes that end at first are not started again
        client.replicaof("127.0.0.1", free_port())
        wait_until(lambda: any("'guard' starts again" in line for line in said), 60)
        assert not is_ready()
        client.replicaof("NO", "ONE")
        before = passes()
        wait_until(lambda: passes() > before + 3, 60)
        assert is_ready()
        assert supervisor.is_alive()
