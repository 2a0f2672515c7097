"""The documents: commands work, names exist, and generated pages are up to date."""

import json
import os
import queue
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
import tomllib
from io import StringIO
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

import httpx
import pytest
from django.core.management import call_command, get_commands

from accounts.models import Owner
from accounts.pulse_users.creation import create_pulse_user
from agents.events import publishing
from agents.models import Consumer, Offering
from agents.registration import queues
from guardian_site import environment
from guardian_site.checks import check_settings
from notifications import channels
from queues.guard import once
from queues.models import Queue
from queues.rules import thresholds
from status.doctor.broker import OLDEST_RABBITMQ
from tools import pages, pictures

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
TESTED_ELSEWHERE = {
    "consumers.md": "tests/packages/test_consumer_docs.py",
    "message-store.md": "tests/message_store/test_message_store_api.py",
    "message-store-workers.md": "tests/message_store/test_work_store.py",
}
"""Documents with a test file of their own."""
DOCUMENTS = [
    *sorted(PROJECT.glob("*.md")),
    *sorted(path for path in DOCS.glob("*.md") if path.name not in TESTED_ELSEWHERE),
]
TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
PACKAGES_PAGES = [*PROJECT.glob("packages/*/*.md"), *PROJECT.glob("packages/*/docs/*.md")]
PICTURES = sorted((DOCS / "pictures").iterdir())

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINES = sorted(set(re.findall(r"^ {4,}(\S.*)$", FENCED.sub("", TEXT), re.MULTILINE)))
"""The lines that readers are to type."""

SETTINGS = {setting.name for setting in pages.declared_settings()}

MANAGE = ".venv/bin/python manage.py "
REQUESTS = [line.removeprefix("curl ") for line in LINES if line.startswith("curl ")]
ON_THE_BROKER = [line.removeprefix("rabbitmqctl ") for line in LINES if line.startswith("rabbitmqctl ")]
FOR_GUARDIANS_USER = ("add_user", "set_user_tags", "set_permissions")
ENDLESS = ("monitor_queues", "send_notifications")
MAY_END_WITH = {"doctor": (0, 1), "apply": (0, 2)}
SAYS_NOTHING = ("migrate",)

COMMANDS = [line.removeprefix(MANAGE) for line in LINES if line.startswith(MANAGE) and "--deploy" not in line]

NOT_RUN = {
    "git clone ": "the address of the repository isn't known here",
    "(useradd|cp -r|systemctl|systemd-run) ": "no systemd runs here; test_production.py checks the units",
    r"(GUARDIAN_TEST_DATABASE=sqlite )?\.venv/bin/python -m pytest ": "it is what runs this",
    "(heroku|git push heroku) ": "there is no Heroku here; test_production.py runs the Procfile on an empty disk",
    "openapi-python-client ": "test_generated_client.py runs it",
    r"(\(umask 077 && )?docker (compose|stop|rm) |old=\$\(docker ": "test_containers.py runs them, but for Cassandra's",
    "kubectl |cp deploy/kubernetes/": "there is no Kubernetes here; test_kubernetes.py checks the manifests",
    "export PULSEGUARDIAN_DATABASE_URL=": "a test of a command names a database of its own in this variable",
    "STORE_WORKER=": "test_production.py checks the files that read it",
    r"python3 -m venv |\.venv/bin/python -m pip install ": "the Makefile does it in var/production",
    r"\.venv/bin/(gunicorn|celery) |\.venv/bin/python manage\.py check --deploy$": "test_production.py runs them",
}
"""The lines that no test runs here, and why."""

NO_SETTINGS = {
    "GUARDIAN_FUZZ_CASES", "GUARDIAN_FUZZ_SEED", "GUARDIAN_TEST_DATABASE", "GUARDIAN_TEST_RABBITMQ_MANAGEMENT_URL",
    "GUARDIAN_TEST_RABBIT_URL", "GUARDIAN_TEST_STOMP_URL", "GUARDIAN_WEB_PORTS", "RABBITMQ_SCHEDULER_BIND_TYPE",
    "STORE_WORKER",
}  # fmt: skip
"""Environment variables of the tests, of RabbitMQ, and of the files that start Guardian's processes."""


def run(*command: str) -> str:
    """Run a command of manage.py and return its output. Raise SystemExit for an unexpected exit code."""
    output = StringIO()
    try:
        call_command(*command, stdout=output, stderr=output)
    except SystemExit as ended:
        if (ended.code or 0) not in MAY_END_WITH.get(command[0], (0,)):
            raise
    return output.getvalue()


# Links, pictures, names


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*DOCUMENTS, *PACKAGES_PAGES], ids=lambda path: str(path.relative_to(PROJECT)))
def test_every_link_has_a_target(path):
    """Those of a package's pages are in the package: a distribution has no others."""
    parts = path.relative_to(PROJECT).parts
    root = PROJECT.joinpath(*parts[:2]) if path in PACKAGES_PAGES else PROJECT
    text = FENCED.sub("", path.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        leads_to = path.parent / name if name else path
        assert leads_to.exists(), target
        assert leads_to.resolve().is_relative_to(root), target
        assert not anchor or anchor in anchors(leads_to), target


def test_every_document_is_linked_from_the_readme():
    reached, to_read = set(), [PROJECT / "README.md"]
    while to_read:
        path = to_read.pop()
        if path not in reached:
            reached.add(path)
            found = re.findall(r"\]\(([^)#\s]+\.md)[^)\s]*\)", path.read_text())
            to_read += [(path.parent / name).resolve() for name in found]
    assert set(DOCUMENTS) <= reached


def test_every_picture_is_used_generated_by_the_script_and_small():
    script = Path(pictures.__file__).read_text()
    shown = set(re.findall(r"!\[[^\]]{20,}\]\((?:docs/)?pictures/([^)]+)\)", TEXT))
    assert {path.name for path in PICTURES} == shown
    for path in PICTURES:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size <= pictures.MAX_BYTES
        assert f'"{path.stem}"' in script or f'"{path.name}"' in script


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_setting_that_is_named_exists(path):
    text = path.read_text()
    for name in set(re.findall(r"(?<![\w$])(?:GUARDIAN|OIDC|RABBIT|RABBITMQ|CELERY|LOG|SENTRY)_[A-Z_]+\b", text)):
        assert name in SETTINGS or name in NO_SETTINGS, name


def test_every_setting_has_a_meaning():
    assert [setting.name for setting in pages.declared_settings() if len(setting.meaning) <= 10] == []
    assert environment.declared.keys() == SETTINGS


@pytest.mark.parametrize("path", pages.GENERATED, ids=lambda path: str(path.relative_to(PROJECT)))
def test_the_generated_files_are_up_to_date(path):
    assert path.read_text() == pages.GENERATED[path](), f"run make docs: {path.name} is stale"


def test_every_path_in_the_map_of_the_code_exists():
    paths = set(re.findall(r"`([a-z_]+/[a-z_./-]*)`", (DOCS / "code.md").read_text()))
    assert len(paths) > 30
    assert [path for path in paths if not (PROJECT / path).exists()] == []


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+\.py)::(\w+)`", TEXT))
    assert len(named) > 100
    texts = {path.name: path.read_text() for path in (PROJECT / "tests").rglob("test_*.py")}
    assert [one for one in named if f"def {one[1]}(" not in texts.get(one[0], "")] == []


def test_the_supported_versions_are_those_of_packages_images_and_tools():
    rows = re.findall(r"^\| \[?(\w+)[^|]*\| (\d[\d., ]*) \|$", (DOCS / "operators.md").read_text(), re.MULTILINE)
    supported = {name.lower(): versions.split(", ") for name, versions in rows}
    pythons = supported["python"]
    texts = TEXT
    for path in [PROJECT / "pyproject.toml", *PROJECT.glob("packages/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text())["project"]
        assert project["requires-python"] == f">={pythons[0]}"
        assert re.findall(r"Python :: (3\.\d+)", str(project["classifiers"])) == pythons
        texts += path.with_name("README.md").read_text()
    assert set(re.findall(r"Python (3\.\d+) or later", texts)) == {pythons[0]}
    assert f'python: ["{pythons[0]}", "3"]' in (PROJECT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r"FROM python:(\S+)-slim", (PROJECT / "Dockerfile").read_text())) <= {*pythons}
    images = re.findall(r"image: (\w+):(\d[\d.]*)", (PROJECT / "docker-compose.yml").read_text())
    services = {name: f"{tag}." for image, tag in images for name in supported if name.startswith(image)}
    assert services.keys() == supported.keys() - {"python", "sqlite"}
    for name, tag in services.items():
        assert any(f"{version}.".startswith(tag) for version in supported[name])
    newer = re.findall(r"^ +(\d\S+)\) suite=", (PROJECT / "tools" / "make-rabbitmq").read_text(), re.MULTILINE)
    assert supported["rabbitmq"] == [".".join(map(str, OLDEST_RABBITMQ)), *newer]


# Commands


@pytest.mark.parametrize("line", LINES)
def test_every_line_to_type_is_run_or_has_a_reason_why_not(line):
    is_setting = re.match(r"([A-Z_]+)=", line)
    assert (
        line.startswith(("curl ", "rabbitmqctl ", "make "))
        or line.removeprefix(MANAGE) in COMMANDS
        or (is_setting and is_setting[1] in SETTINGS)
        or line in BACKUP + FROM_BEFORE_VERSION_1
        or any(re.match(pattern, line) for pattern in NOT_RUN)
    )


def test_the_documented_processes_match_the_procfile():
    shown = {line.removeprefix(".venv/bin/") for line in LINES if re.match(r"\.venv/bin/(gunicorn|celery) ", line)}
    procfile = (PROJECT / "Procfile").read_text().replace("0.0.0.0:${PORT:-8000}", "127.0.0.1:8000")
    assert shown == set(re.findall(r"^(?!release|store)\w+: (.+)$", procfile, re.MULTILINE))


def test_every_make_target_that_is_named_exists():
    named = set(re.findall(r"(?:`|^ {4,})make ([a-z][a-z-]*)", TEXT, re.MULTILINE))
    done = subprocess.run(["make", "--dry-run", *named], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_that_is_named_exists():
    named = set(re.findall(r"manage\.py ([a-z_]+)", TEXT)) | set(re.findall(r"`([a-z]+_[a-z_]+)(?: --[a-z-]+)+`", TEXT))
    assert len(named) > 10
    assert named <= get_commands().keys()


@pytest.fixture
def offering(guarded):
    """Return an offering of an operator who may subscribe and publish to it, as the commands name it."""
    operator = Owner.objects.create_superuser("you@example.org")
    created = Offering.objects.create(name="Compute in Tartu")
    created.members.add(operator)
    created.publishers.add(operator)
    return created


@pytest.fixture
def import_sources(tmp_path, monkeypatch):
    """Prepare what the commands import: an empty PulseGuardian database and an empty list of owners."""
    source = sqlite3.connect(tmp_path / "pulseguardian.db")
    source.executescript(
        "CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT, admin BOOLEAN);"
        "CREATE TABLE pulse_users (id INTEGER PRIMARY KEY, username TEXT);"
        "CREATE TABLE pulse_user_owners (users_id INTEGER, pulse_users_id INTEGER);"
        "CREATE TABLE queues (name TEXT PRIMARY KEY, owner_id INTEGER, unbounded BOOLEAN);"
    )
    source.close()
    (tmp_path / "owners.csv").write_text("username,owners\n")
    (tmp_path / "installation.yaml").write_text("version: 1\nowners: {you@example.org: {}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PULSEGUARDIAN_DATABASE_URL", f"sqlite:///{tmp_path}/pulseguardian.db")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_documented_command_runs(offering, import_sources, mailbox, command):
    name, *arguments = shlex.split(command.partition(" > ")[0])
    if name in ENDLESS and "--once" not in arguments:
        arguments.append("--once")
    if name == "create_offering":
        offering.delete()
    assert run(name, *arguments) or name in SAYS_NOTHING


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\| `manage\.py (.+?)` \|", TEXT, re.MULTILINE))))
def test_every_command_of_the_tables_runs(offering, import_sources, mailbox, command):
    for placeholder, value in (
        ("EMAIL", "you@example.org"), ("FILE", "installation.yaml"), ("OFFERING", offering.uuid.hex), ("TYPE", "order"),
        ("JSON", "{}"),
    ):  # fmt: skip
        command = command.replace(placeholder, value)
    assert run(*shlex.split(command))


@pytest.mark.parametrize("request_", REQUESTS)
def test_every_documented_request_is_answered(agents, guarded, live_server, settings, management, request_):
    settings.GUARDIAN_METRICS_TOKEN = "a-word"
    owner = agents.owner("you")
    is_agents = re.search("/(agent-identities|event-)", request_)
    presented = agents.token(owner, "agent" if is_agents else "all")
    offering = agents.offering(owner, publishers=(owner,))
    identity = agents.identity(owner, offering)
    subscription, _ = queues.register_subscription(identity, "order", presented)
    values = {
        "TOKEN": presented.key, "GUARDIAN": live_server.url, "OFFERING": offering.uuid.hex,
        "AGENT": identity.uuid.hex, "SUBSCRIPTION": subscription.uuid.hex, "METRICS_TOKEN": "a-word",
    }  # fmt: skip
    words = shlex.split(re.sub(r"\$([A-Z_]+)", lambda match: values[match[1]], request_))
    given = {word: words[words.index(word) + 1] for word in ("-H", "-X", "--json") if word in words}
    header = given["-H"].partition(": ")
    body = given.get("--json")
    [url] = [word for word in words if word.startswith(live_server.url)]
    answer = httpx.request(
        given.get("-X") or ("GET" if body is None else "POST"),
        url,
        headers={header[0]: header[2], "Content-Type": "application/json"},
        content=body,
        trust_env=False,
    )
    assert answer.is_success, answer.text
    if url.endswith("/pulse-users/"):
        management.delete_user(answer.json()["username"])


def run_on_the_brokers_machine(broker, lines):
    if broker.node is None:
        pytest.skip("nobody can run rabbitmqctl on a broker that was named")
    for line in lines:
        broker.node.ctl(*("shown" if word == "guardian" else word for word in shlex.split(line)))


@pytest.mark.soak
def test_documented_rabbitmqctl_commands_work(broker):
    run_on_the_brokers_machine(broker, [line for line in ON_THE_BROKER if line.split()[0] not in FOR_GUARDIANS_USER])


def test_the_documented_commands_create_guardians_rabbitmq_user(broker, management):
    try:
        run_on_the_brokers_machine(
            broker, sorted(line for line in ON_THE_BROKER if line.split()[0] in FOR_GUARDIANS_USER)
        )
        assert "administrator" in management.user("shown").tags
        assert management.permissions_of("shown")["/"]
    finally:
        management.delete_user("shown")


# Backup and restore: test_backup.py


def shell_lines(document: str, begin: str, end: str) -> list[str]:
    """Return the lines to type between these two texts of a document."""
    text = (DOCS / document).read_text()
    return re.findall(r"^ {4,}(\S.*)$", text[text.index(begin) : text.index(end)], re.MULTILINE)


BACKUP = shell_lines("operators.md", "SQLite, while Guardian runs", "3. Bring it up to date")
BACKUP_OF_POSTGRESQL = [line for line in BACKUP if line.startswith(("pg_", "psql "))]
BACKUP_OF_SQLITE = [line for line in BACKUP if line not in BACKUP_OF_POSTGRESQL]
FROM_BEFORE_VERSION_1 = [
    line for line in shell_lines("operators.md", "### From before", "## Several") if line.startswith(("psql ", "pg_"))
]
"""Tested in test_migrations.py."""


def shell(line: str, **options: object) -> str:
    done = subprocess.run(
        line.replace(".venv/bin/python", sys.executable),
        shell=True, capture_output=True, text=True, timeout=60, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# Programs


def programs(document: str) -> list[str]:
    """Return the Python programs of a document."""
    return [code for kind, code in FENCED.findall((DOCS / document).read_text()) if kind == "python"]


def test_the_documented_first_queue_belongs_to_its_creator_within_a_pass(guarded, broker, tmp_path, management):
    code, _ = programs("owners.md")  # the second is in test_generated_client.py
    (tmp_path / "first.py").write_text(code)
    owner = Owner.objects.create_user("you@example.org", vouched=True)
    _, password = create_pulse_user("first-steps", owners=[owner])
    try:
        host = broker.amqp_url.rpartition("@")[2].rstrip("/")
        url = f"amqp://first-steps:{quote(password, safe='')}@{host}/{quote(guarded, safe='')}"
        done = subprocess.run(
            [sys.executable, tmp_path / "first.py"],
            env={"NAME": "first-steps", "RABBIT": url},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "It works.\n"), done.stderr
        once.run_once()
        created = Queue.objects.get(name="queue/first-steps/first")
        assert list(created.pulse_user.owners.all()) == [owner]
    finally:
        management.delete_user("first-steps")


def test_the_documented_threshold_policy_works(guarded, amqp, settings, monkeypatch):
    [code] = [code for code in programs("code.md") if "Thresholds" in code]
    settings.GUARDIAN_THRESHOLD_POLICY = "roomy"
    assert "guardian.E008" in {message.id for message in check_settings(None)}
    monkeypatch.setattr(thresholds, "POLICIES", dict(thresholds.POLICIES))
    exec(code, vars(thresholds) | {"POLICIES": thresholds.POLICIES, "__name__": "queues.rules.thresholds"})
    monkeypatch.setattr("guardian_site.checks.POLICIES", thresholds.POLICIES)
    assert "guardian.E008" not in {message.id for message in check_settings(None)}
    amqp.queue("long", 15)  # over the limit of 10, but not over twice that
    amqp.queue("longer", 25)
    once.run_once()
    assert dict(Queue.objects.values_list("name", "state")) == {"long": "warned", "longer": "gone"}


def test_the_documented_channel_service_works(db, monkeypatch):
    [code] = [code for code in programs("code.md") if "SERVICES" in code]
    monkeypatch.setattr(channels, "SERVICES", dict(channels.SERVICES))
    owner = Owner.objects.create_user("you@example.org", vouched=True)
    with pytest.raises(channels.BadChannel):
        channels.create_channel(owner, "The lamp", "ifttt://abcdefghijklmnop@queue_is_long")
    exec(code, {"SERVICES": channels.SERVICES})
    created = channels.create_channel(owner, "The lamp", "ifttt://abcdefghijklmnop@queue_is_long")
    assert created.service == "IFTTT at maker.ifttt.com"


@pytest.fixture
def example():
    """Return a function that starts the documented agent as a process and returns it and the lines it logs."""
    started = []

    def start(*arguments, **environment):
        program = subprocess.Popen(
            [sys.executable, *(arguments or [DOCS / "examples" / "agent.py"])],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": DOCS / "examples", "NO_PROXY": "*", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(program)
        lines = queue.SimpleQueue()

        def read():
            for line in program.stdout:
                lines.put(line.strip())

        threading.Thread(target=read, daemon=True).start()
        return program, lines

    yield start
    for program in started:
        program.kill()
        program.wait()


def wait_for_line(lines, text):
    """Return the next line that contains the text."""
    while text not in (line := lines.get(timeout=30)):
        pass
    return line


def test_the_documented_agent_registers_receives_events_once_and_recovers(
    agents, live_server, stomp_url, example, management
):
    owner = agents.owner("you")
    offering = agents.offering(owner)
    presented = agents.token(owner)
    program, lines = example(
        GUARDIAN=live_server.url, BROKER=stomp_url, OFFERING=str(offering.uuid), TOKEN=presented.key
    )
    consumer_queue = wait_for_line(lines, "reading ").rpartition(" ")[2]
    consumer = Consumer.objects.get()
    assert (consumer.queue_name, consumer.object_types) == (consumer_queue, ["order", "resource"])
    published = publishing.publish(offering, "order", {"order_uuid": "17"})
    assert published.delivered == 1
    publishing.publish(offering, "order", {"order_uuid": "17"}, message_id=UUID(published.message_id))
    publishing.publish(offering, "user_role", {"of": "nobody"})
    publishing.publish(offering, "resource", {"resource_uuid": "18"})
    first, second = lines.get(timeout=30), lines.get(timeout=30)
    assert json.loads(first.partition("event order ")[2]) == {
        "order_uuid": "17", "object_type": "order", "offering_uuid": offering.uuid.hex, "schema_version": 1,
    }  # fmt: skip
    assert "event resource {" in second
    # Without its queue it gets an ERROR on the open connection, registers again and continues.
    management.delete_queue(consumer.vhost, consumer.queue_name)
    wait_for_line(lines, "Server cancelled subscription")
    wait_for_line(lines, "reading ")
    # So it does without its login.
    management.delete_user(consumer.rmq_username)
    Consumer.objects.update(password_set=False)
    wait_for_line(lines, "reading ")
    publishing.publish(offering, "order", {"order_uuid": "19"})
    assert '"order_uuid": "19"' in lines.get(timeout=30)
    program.terminate()
    assert program.wait(timeout=10) == 0


SLOW_AGENT = """
import sys, time, agent

def handle(event):
    print("handling", event["order_uuid"], flush=True)
    sys.stdin.readline()
    time.sleep(0.5)  # until the library has noticed that the connection is closed

agent.handle = handle
sys.exit(agent.main())
"""


def test_the_documented_agent_handles_an_event_once_though_the_connection_closes_meanwhile(
    agents, live_server, stomp_url, example, management
):
    owner = agents.owner("you")
    offering = agents.offering(owner)
    settings = {"GUARDIAN": live_server.url, "BROKER": stomp_url, "OFFERING": offering.uuid.hex}
    program, lines = example("-c", SLOW_AGENT, TOKEN=agents.token(owner).key, **settings)
    wait_for_line(lines, "reading ")
    publishing.publish(offering, "order", {"order_uuid": "1"})
    wait_for_line(lines, "handling 1")
    publishing.publish(offering, "order", {"order_uuid": "2"})
    management.close_connections_of(Consumer.objects.get().rmq_username, "test")
    program.stdin.write("\n\n")
    program.stdin.flush()
    wait_for_line(lines, "trying again")
    assert "handling 2" in wait_for_line(lines, "handling ")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"OFFERING": "52c1a0de-7b3f-4c6d-8e9f-a0b1c2d3e4f5"}, "400 offering: There is no such offering"),
        ({"TOKEN": "0" * 64}, "401 Invalid token"),
        ({"OFFERING": "52c1a0de"}, "OFFERING must be a UUID"),
        ({"BROKER": "rabbit.example.org/ws"}, "BROKER must be an address that begins with ws:// or wss://"),
        ({"TOKEN": ""}, "TOKEN is not set"),
    ],
)
def test_the_documented_agent_gives_up_with_the_reason_where_trying_again_is_useless(
    agents, live_server, example, wrong, reason
):
    owner = agents.owner("you")
    right = {"BROKER": "ws://127.0.0.1:1/ws", "OFFERING": agents.offering(owner).uuid.hex}
    program, lines = example(**{"GUARDIAN": live_server.url, "TOKEN": agents.token(owner).key, **right, **wrong})
    assert reason in lines.get(timeout=30)
    assert program.wait(timeout=10) == 2
