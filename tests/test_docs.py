"""The documents: what they tell people to run works."""

import re
import shlex
from io import StringIO
from pathlib import Path

import httpx
import pytest
from django.core.management import call_command

from accounts.models import Owner
from accounts.tokens import make_token

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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_shown_runs(guarded, mailbox, command):
    Owner.objects.create_superuser("you@example.org")
    name, *arguments = shlex.split(command)
    if name in ENDLESS and "--once" not in arguments:
        arguments.append("--once")
    assert run(name, *arguments)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\| `manage\.py (.+?)` \|", TEXT, re.MULTILINE))))
def test_every_command_of_the_tables_runs(guarded, mailbox, command):
    Owner.objects.create_superuser("you@example.org")
    assert run(*shlex.split(command.replace("EMAIL", "you@example.org")))


@pytest.mark.parametrize("request_", sorted(set(re.findall(r"^    curl (.+)$", TEXT, re.MULTILINE))))
def test_every_request_that_is_shown_is_answered(transactional_db, live_server, request_):
    owner = Owner.objects.create_user("you@example.org", vouched=True)
    _, token = make_token(owner, "for the test")
    words = shlex.split(request_.replace("$TOKEN", token).replace("$GUARDIAN", live_server.url))
    header = words[words.index("-H") + 1].partition(": ")
    answer = httpx.get(words[-1], headers={header[0]: header[2]}, trust_env=False)
    assert answer.status_code == 200, answer.text
