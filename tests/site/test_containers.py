"""docker-compose.yml in a real Docker, installed and operated by the commands of docs/operators.md."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pika
import pytest

from tests.site.test_docs import shell_lines
from tests.support.containers import HOST, DockerMachine, Unsupported
from tests.support.toolbox import wait_until
from tools.mail import MailCatcher

pytestmark = pytest.mark.containers

PROJECT = Path(__file__).resolve().parents[2]
SITE = "http://127.0.0.1:8000"
OPERATOR = "you@example.org"
SETTINGS = {
    "GUARDIAN_WARN_QUEUE_LENGTH": "10",
    "GUARDIAN_MAX_QUEUE_LENGTH": "20",
    "GUARDIAN_POLL_SECONDS": "1",
    "DEFAULT_FROM_EMAIL": "guardian@example.org",
    "GUARDIAN_OPERATOR_EMAILS": "ops@example.org",
}

INSTALLING = shell_lines("operators.md", "### Docker compose", "If `up` says")
LOGS, RESTART, SCALE, CLUSTER_UP, CLUSTER_DOWN = shell_lines("operators.md", "If `up` says", "### Kubernetes")
UPGRADING = shell_lines("operators.md", "With Docker compose, fetch the new code", "To roll back")
[BACKUP, *RESTORING] = shell_lines("operators.md", "**With Docker compose**, back up", "If you skip step 4")

SLOW_SECONDS = 3
"""A request that takes longer counts as slow: the proxy waits 2 s for the web process that was stopped."""

DENIED = re.compile(r"Permission denied|Read-only file system|Operation not permitted|EACCES|eacces")


@pytest.fixture(scope="session")
def machine():
    """Give a machine with Docker, with RabbitMQ 4.3 as the stand-in for its image."""
    try:
        machine = DockerMachine()
    except Unsupported as error:
        pytest.skip(str(error))
    with machine:
        machine.use_rabbitmq("4.3")
        yield machine


@pytest.fixture(autouse=True)
def network(machine):
    with machine.network():
        yield


def shell(machine, *lines, **environment):
    """Run these lines in one shell, as an operator types them, and return what they print."""
    return machine.run("sh", "-ec", "\n".join(lines), environment=environment)


def set_lines(path, **values):
    """Set these variables in a file, and replace the file, as editors do."""
    lines = [line for line in path.read_text().splitlines() if line.partition("=")[0] not in values]
    changed = path.with_name("changed")
    changed.write_text("\n".join([*lines, *(f"{name}={value}" for name, value in values.items())]) + "\n")
    changed.chmod(0o644)
    changed.replace(path)


class Installation:
    """Guardian, installed by compose."""

    def __init__(self, machine, mailbox):
        self.machine = machine
        self.mailbox = mailbox
        self.settings = machine.directory / "secrets" / "guardian.env"

    def manage(self, *arguments):
        """Run a command of manage.py in the web container, and return its output."""
        return self.machine.run("docker", "compose", "exec", "-T", "web", "python", "manage.py", *arguments).strip()

    def migrate(self):
        """Run the service that reports mistakes in the settings, and return its outcome."""
        return self.machine.attempt("docker", "compose", "run", "--rm", "migrate")

    def containers(self):
        """Return the state of each service's containers."""
        listed = self.machine.run("docker", "compose", "ps", "--all", "--format", "json")
        rows = [json.loads(line) for line in listed.splitlines()]
        return sorted((row["Service"], row["State"], row["Health"] or row["ExitCode"]) for row in rows)

    def api(self):
        """Return a client of the REST API with the rights of the operator."""
        token = self.manage("create_token", OPERATOR, "--scope", "all")
        return httpx.Client(
            base_url=f"{SITE}/api/", headers={"Authorization": f"Token {token}"}, trust_env=False, timeout=30
        )

    def log(self):
        """Return what our containers have logged."""
        return self.machine.run("docker", "compose", "logs", "web", "guard", "deleter", "worker", "beat", "migrate")


@pytest.fixture(scope="module")
def mailbox(machine):
    with machine.network(), MailCatcher(host=HOST, port=2525) as mailbox:
        yield mailbox


@pytest.fixture(scope="module")
def installation(machine, mailbox):
    """Install Guardian as documented."""
    [secrets, *up] = INSTALLING
    asked = shell(machine, secrets)
    assert re.findall("Fill in ([A-Z_]+) in (.+)", asked) == [
        ("GUARDIAN_BASE_URL", ".env"),
        ("EMAIL_URL", "secrets/guardian.env"),
        ("DEFAULT_FROM_EMAIL", "secrets/guardian.env"),
        ("GUARDIAN_OPERATOR_EMAILS", "secrets/guardian.env"),
    ]
    set_lines(machine.directory / ".env", GUARDIAN_BASE_URL=SITE)
    set_lines(machine.directory / "secrets" / "guardian.env", EMAIL_URL=mailbox.url, **SETTINGS)
    before = {path: path.read_bytes() for path in (machine.directory / "secrets").iterdir()}
    assert shell(machine, secrets) == ""
    assert {path: path.read_bytes() for path in before} == before
    printed = shell(machine, *up)
    assert f"{SITE}/signin/link/" in printed
    assert "0 problems" in printed
    installation = Installation(machine, mailbox)
    yield installation
    assert not DENIED.findall(installation.log())


STATES = [
    *((name, "running", "healthy") for name in ("beat", "deleter", "guard")),
    ("migrate", "exited", 0),
    *((name, "running", "healthy") for name in ("postgres", "proxy", "rabbitmq", "redis", "web", "worker")),
]


# Mistakes


def test_without_the_secrets_up_names_the_command_at_once(machine):
    for environment in ({}, {"GUARDIAN_BASE_URL": SITE}):
        up = machine.attempt("docker", "compose", "--env-file", "/dev/null", "up", "--detach", environment=environment)
        assert up.returncode != 0
        [line] = up.stderr.splitlines()
        assert 'run "make compose-secrets"' in line


@pytest.fixture
def settings_file(installation):
    """Give the file with Guardian's settings, and restore it afterwards."""
    right = installation.settings.read_text()
    yield installation.settings
    installation.settings.write_text(right)
    shell(installation.machine, "make compose-secrets")


def test_settings_that_cannot_be_read_are_reported_with_the_command_that_helps(installation, settings_file):
    settings_file.chmod(0o600)
    refused = installation.migrate()
    assert refused.returncode == 1
    assert ".env can't be read: Permission denied" in refused.stderr
    assert "run: make compose-secrets" in refused.stderr
    assert "Traceback" not in refused.stderr
    shell(installation.machine, "make compose-secrets")
    assert settings_file.stat().st_mode & 0o777 == 0o644


def test_a_wrong_password_of_the_database_is_reported_in_a_line(installation, settings_file):
    set_lines(settings_file, DATABASE_URL="postgres://guardian:wrong@postgres:5432/guardian")
    refused = installation.migrate()
    assert refused.returncode == 1
    line = refused.stderr.splitlines()[-1]
    assert line.startswith("Check the host, the user and the password in DATABASE_URL: ")
    assert 'password authentication failed for user "guardian"' in line
    assert "Traceback" not in refused.stderr


def test_a_worker_of_the_store_that_is_not_configured_says_so_and_does_not_restart(installation):
    machine = installation.machine
    store = ("docker", "compose", "--profile", "store")
    machine.run(*store, "up", "--detach", "--no-deps", "store")
    wait_until(lambda: "set STORE_WORKER in .env" in machine.run(*store, "logs", "store"))
    container = machine.run(*store, "ps", "--quiet", "store").strip()
    assert (
        machine.run("docker", "inspect", "--format", "{{.State.Status}} {{.RestartCount}}", container) == "running 0\n"
    )
    machine.run(*store, "rm", "--stop", "--force", "store")


# Use


def test_every_service_is_healthy(installation):
    assert installation.containers() == STATES


def test_a_person_signs_in_by_a_mailed_code_through_the_proxy(installation):
    with httpx.Client(base_url=SITE, trust_env=False, timeout=30, follow_redirects=True) as browser:

        def submit(path, **fields):
            form = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get(path).text)
            return browser.post(path, data={"csrfmiddlewaretoken": form[1], **fields})

        submit("/signin/", email="alice@example.org")
        mail = installation.mailbox.wait_for(lambda mail: "alice@example.org" in mail.recipients, 60)
        code = re.search(r"^[B-Z]{4}-[B-Z]{4}$", mail.text, re.MULTILINE)
        assert "alice@example.org" in submit("/signin/code/", code=code[0]).text


@contextmanager
def connection(username, password):
    parameters = pika.ConnectionParameters("127.0.0.1", credentials=pika.PlainCredentials(username, password))
    opened = pika.BlockingConnection(parameters)
    yield opened.channel()
    opened.close()


@pytest.fixture(scope="module")
def builds(machine, installation):
    """Give a Pulse user of the operator, with its password."""
    with machine.network(), installation.api() as api:
        created = api.post("pulse-users/", json={"username": "builds"})
        assert created.is_success, created.text
        return "builds", created.json()["password"]


def declare(user, name, messages):
    """Declare a queue of this Pulse user, and publish messages to it, as the guide for owners says."""
    exchange = f"exchange/{user[0]}/main"
    with connection(*user) as channel:
        channel.confirm_delivery()
        channel.exchange_declare(exchange, "direct", durable=True)
        channel.queue_declare(name, durable=True)
        channel.queue_bind(name, exchange, name)
        for _ in range(messages):
            channel.basic_publish(exchange, name, b"a message", pika.BasicProperties(delivery_mode=2))


def test_a_queue_over_its_limit_is_archived_and_deleted_with_a_mail(installation, builds):
    declare(builds, "queue/builds/long", 25)
    installation.mailbox.wait_for(
        lambda mail: OPERATOR in mail.recipients and "Deleted: queue/builds/long had 25 messages" in mail.subject, 90
    )
    with installation.api() as api:
        [archive] = api.get("archives/", params={"queue": "queue/builds/long"}).json()
        assert len(api.get(f"archives/{archive['uuid']}/messages/", params={"count": 100}).json()) == 25


def test_an_agent_gets_an_event_by_stomp_over_websocket(installation):
    uuid = re.search("[0-9a-f]{32}", installation.manage(
        "create_offering", "Compute in Tartu", "--member", OPERATOR, "--publisher", OPERATOR
    ))[0]  # fmt: skip
    agent = subprocess.Popen(
        [sys.executable, PROJECT / "docs" / "examples" / "agent.py"],
        env={
            "PATH": os.environ["PATH"], "PYTHONPATH": PROJECT / "docs" / "examples", "NO_PROXY": "*",
            "GUARDIAN": SITE, "BROKER": "ws://127.0.0.1:15674/ws", "OFFERING": uuid,
            "TOKEN": installation.manage("create_token", OPERATOR),
        },
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while "reading " not in (line := agent.stderr.readline()):
            assert line, "the agent ended"
        installation.manage("publish_event", uuid, "order", '{"order_uuid": "17"}')
        while '"order_uuid": "17"' not in (line := agent.stderr.readline()):
            assert line, "the agent ended"
    finally:
        agent.kill()
        agent.wait()


# Operation


def test_a_changed_setting_takes_effect_with_the_documented_command(installation):
    set_lines(installation.settings, GUARDIAN_OPERATOR_EMAILS="ops@example.org,night@example.org")
    shell(installation.machine, RESTART)
    assert "night@example.org" in installation.manage(
        "shell", "--command", "from django.conf import settings; print(settings.GUARDIAN_OPERATOR_EMAILS)"
    )


def last_pass(installation):
    return installation.manage(
        "shell", "--command", "from queues.models import Pass; print(Pass.objects.latest('at').at.isoformat())"
    ).splitlines()[-1]


def test_each_service_restarts_and_two_of_each_kind_run(installation, builds):
    declare(builds, "queue/builds/kept", 3)
    before = last_pass(installation)
    for name in ("redis", "postgres", "rabbitmq", "proxy", "web", "guard", "deleter", "worker", "beat"):
        installation.machine.run("docker", "compose", "restart", name)
    shell(installation.machine, SCALE)
    states = installation.containers()
    assert states == sorted(
        [*STATES, *(state for state in STATES if state[0] in ("web", "guard", "deleter", "worker"))]
    )
    wait_until(lambda: last_pass(installation) > before, 90)
    shell(installation.machine, "docker compose up --detach --wait")
    assert installation.containers() == STATES


def owners(installation):
    command = "from accounts.models import Owner; print(*Owner.objects.values_list('email', flat=True))"
    return installation.manage("shell", "--command", command).splitlines()[-1].split()


def test_down_and_up_keep_the_data(installation, builds):
    declare(builds, "queue/builds/durable", 3)
    installation.manage("create_owner", "kept@example.org")
    shell(installation.machine, "docker compose down", "docker compose up --detach --wait")
    assert installation.containers() == STATES
    assert "kept@example.org" in owners(installation)
    with connection(*builds) as channel:
        assert channel.queue_declare("queue/builds/durable", passive=True).method.message_count == 3


class Visitor(threading.Thread):
    """Requests a page again and again, and remembers what failed and what was slow."""

    def __init__(self):
        super().__init__(daemon=True)
        self.failed, self.slow, self.ending = [], [], threading.Event()

    def run(self):
        with httpx.Client(trust_env=False, timeout=30) as browser:
            while not self.ending.wait(0.05):
                began = time.monotonic()
                try:
                    browser.get(f"{SITE}/signin/").raise_for_status()
                except httpx.HTTPError as error:
                    self.failed.append(error)
                if (seconds := time.monotonic() - began) > SLOW_SECONDS:
                    self.slow.append(seconds)


def test_an_upgrade_fails_no_request(installation):
    machine = installation.machine
    style = machine.directory / "static" / "guardian.css"
    style.write_text(f"{style.read_text()}/* of the next version */\n")
    visitor = Visitor()
    visitor.start()
    shell(machine, *UPGRADING)
    visitor.ending.set()
    visitor.join()
    assert visitor.failed == []
    assert len(visitor.slow) <= 1, visitor.slow
    page = httpx.get(f"{SITE}/static/guardian.css", trust_env=False)
    assert page.text.endswith("/* of the next version */\n")
    assert installation.containers() == STATES


def test_a_backup_is_restored(installation):
    installation.manage("create_owner", "before@example.org")
    shell(installation.machine, BACKUP)
    installation.manage("create_owner", "after@example.org")
    shell(installation.machine, *RESTORING)
    assert installation.containers() == STATES
    assert "before@example.org" in owners(installation)
    assert "after@example.org" not in owners(installation)


# A cluster of RabbitMQ, as a project of its own beside the other


@pytest.fixture(params=["4.0", "4.3"])
def cluster(machine, installation, request):
    """Give the environment of a compose project on RabbitMQ of this series."""
    machine.use_rabbitmq(request.param)
    yield {"COMPOSE_PROJECT_NAME": "cluster", "BROKER_ADDRESS": "127.0.0.2"}
    compose = "docker", "compose", "--project-name", "cluster", "--profile", "cluster"
    sys.stdout.write(machine.run(*compose, "logs", "--tail", "60"))  # shown when the test fails
    machine.run(*compose, "down", "--volumes", "--timeout", "0")
    machine.use_rabbitmq("4.3")


def test_a_cluster_comes_back_after_all_its_nodes_were_stopped(machine, cluster, request):
    nodes = " rabbitmq rabbitmq-2 rabbitmq-3"

    def running():
        status = "docker compose exec -T rabbitmq rabbitmqctl --silent cluster_status --formatter json"
        found = json.loads(shell(machine, status, **cluster))
        assert {version["rabbitmq_version"][:3] for version in found["versions"].values()} == {
            request.node.callspec.params["cluster"]
        }
        return found["running_nodes"]

    shell(machine, CLUSTER_UP + nodes, **cluster)
    assert len(running()) == 3
    # One that stops with an error starts again, in its container.
    machine.attempt("docker", "exec", "cluster-rabbitmq-2-1", "rabbitmqctl", "eval", "erlang:halt(1).")
    wait_until(lambda: len(running()) == 2)
    wait_until(lambda: len(running()) == 3, seconds=120)
    inspect = "docker inspect --format '{{.RestartCount}} {{.State.Health.Status}}' cluster-rabbitmq-2-1"
    wait_until(lambda: shell(machine, inspect) == "0 healthy\n")
    shell(machine, "docker compose stop rabbitmq", CLUSTER_DOWN, CLUSTER_UP + nodes, **cluster)
    assert len(running()) == 3
