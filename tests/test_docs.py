"""The documents: what they tell people to run works."""

import json
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import httpx
import pytest
from django.core.management import call_command

from accounts.models import Owner
from queues import events, subscriptions
from queues.models import Consumer, Offering

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
MAKE = re.search(r"^\.PHONY: (.+)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)[1].split()

COMMANDS = sorted(set(re.findall(r"^    \.venv/bin/python manage\.py (.+)$", TEXT, re.MULTILINE)))
ENDLESS = ("monitor_queues", "send_notifications")


def run(*command: str) -> str:
    """Run a command of manage.py, and give its output; a code other than 0 is raised as SystemExit."""
    output = StringIO()
    try:
        call_command(*command, stdout=output, stderr=output)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    return output.getvalue()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|^    )make ([a-z]+)", TEXT, re.MULTILINE))))
def test_every_make_target_that_is_named_is_there(target):
    assert target in MAKE


@pytest.fixture
def offering(guarded):
    """Give what the commands name: an operator, and an offering that she may subscribe and publish to."""
    operator = Owner.objects.create_superuser("you@example.org")
    made = Offering.objects.create(name="Compute in Tartu")
    made.members.add(operator)
    made.publishers.add(operator)
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_shown_runs(offering, mailbox, command):
    name, *arguments = shlex.split(command)
    if name in ENDLESS and "--once" not in arguments:
        arguments.append("--once")
    if name == "create_offering":
        offering.delete()
    assert run(name, *arguments)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\| `manage\.py (.+?)` \|", TEXT, re.MULTILINE))))
def test_every_command_of_the_tables_runs(offering, mailbox, command):
    for placeholder, value in (
        ("EMAIL", "you@example.org"), ("OFFERING", offering.uuid.hex), ("TYPE", "order"), ("JSON", "{}"),
    ):  # fmt: skip
        command = command.replace(placeholder, value)
    assert run(*shlex.split(command))


@pytest.mark.parametrize("request_", sorted(set(re.findall(r"^    curl (.+)$", TEXT, re.MULTILINE))))
def test_every_request_that_is_shown_is_answered(agents, live_server, request_):
    owner = agents.owner("you")
    presented = agents.token(owner)
    offering = agents.offering(owner, publishers=(owner,))
    identity = agents.identity(owner, offering)
    subscription, _ = subscriptions.register_subscription(identity, "order", presented)
    told = {
        "TOKEN": presented.key, "GUARDIAN": live_server.url, "OFFERING": offering.uuid.hex,
        "AGENT": identity.uuid.hex, "SUBSCRIPTION": subscription.uuid.hex,
    }  # fmt: skip
    words = shlex.split(re.sub(r"\$([A-Z]+)", lambda match: told[match[1]], request_))
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


@pytest.fixture
def example(tmp_path):
    """Give a function that starts the agent of the documents as a program of its own, and the lines that it prints."""
    code = re.search(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "agent.py").write_text(code)
    started = []

    def start(**environment):
        program = subprocess.Popen(
            [sys.executable, tmp_path / "agent.py"],
            env={"PATH": os.environ["PATH"], "NO_PROXY": "*", **environment},
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
        return lines

    yield start
    for program in started:
        program.kill()
        program.wait()


@pytest.mark.slow
def test_the_agent_of_the_documents_registers_receives_each_event_once_and_recovers(
    agents, live_server, stomp_url, example, management
):
    owner = agents.owner("you")
    offering = agents.offering(owner)
    presented = agents.token(owner)
    lines = example(GUARDIAN=live_server.url, BROKER=stomp_url, OFFERING=offering.uuid.hex, TOKEN=presented.key)
    consumer_queue = lines.get(timeout=30).removeprefix("reading ")
    consumer = Consumer.objects.get()
    assert (consumer.queue_name, consumer.object_types) == (consumer_queue, ["order", "resource"])
    published = events.publish(offering, "order", {"order_uuid": "17"})
    assert published.delivered == 1
    events.publish(offering, "order", {"order_uuid": "17"}, message_id=published.message_id)
    events.publish(offering, "user_role", {"of": "nobody"})
    events.publish(offering, "resource", {"resource_uuid": "18"})
    first, second = lines.get(timeout=30), lines.get(timeout=30)
    assert first.startswith("event order {")
    assert json.loads(first.removeprefix("event order ")) == {
        "order_uuid": "17", "object_type": "order", "offering_uuid": offering.uuid.hex, "schema_version": 1,
    }  # fmt: skip
    assert second.startswith("event resource {")
    # Its connection and its queue are taken away: it registers again, and goes on.
    management.delete_user(consumer.rmq_username)
    management.delete_queue(consumer.vhost, consumer.queue_name)
    Consumer.objects.update(password_set=False, state="creating")
    while not (line := lines.get(timeout=30)).startswith("reading "):
        assert line.startswith(("error", "trying again")), line
    events.publish(offering, "order", {"order_uuid": "19"})
    assert '"order_uuid":"19"' in lines.get(timeout=30)
