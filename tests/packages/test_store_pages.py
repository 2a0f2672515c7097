"""The programs of the store package's own pages run, and do what the pages say."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from guardian_store import Client
from message_store import applications
from tests.support.toolbox import wait_until

PAGES = sorted((Path(__file__).resolve().parents[2] / "packages" / "guardian-store" / "docs").glob("*.md"))
PROGRAM = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.slow


@pytest.fixture
def key(live_server):
    return applications.create_key(applications.create_application("shop"))[1]


@pytest.fixture
def client(live_server, key):
    with Client(live_server.url, "shop", key=key) as opened:
        yield opened


@pytest.fixture
def start(live_server, key, tmp_path):
    """Write the pages' programs to files, and return a function that starts a command of the pages."""
    for page in PAGES:
        for text, name in PROGRAM.findall(page.read_text()):
            (tmp_path / name).write_text(text)
    environment = {**os.environ, "GUARDIAN": live_server.url, "KEY": key}
    started = []

    def start(command):
        assert any(f"\n    {command}\n" in page.read_text() for page in PAGES), command
        program = [sys.executable, *command.split()[1:]]
        started.append(subprocess.Popen(program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    """Wait for the end of a process, and return what it printed."""
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return printed


def test_the_first_worker_ships_and_keeps_what_failed_to_be_handled_again(start, client):
    worker = start("python worker.py")
    finish(start("python order.py Dune"))
    assert worker.stdout.readline() == "shipped Dune\n"
    finish(start("python order.py Atlantis"))
    wait_until(lambda: "errors" in [queue.name for queue in client.queues()] and any(client.messages("errors")))
    worker.send_signal(signal.SIGINT)
    assert finish(worker) == ""
    finish(start("python again.py"))
    assert list(client.messages("errors")) == []
    orders = [message.text for number in (1, 2) for message in client.messages("orders", partition=number)]
    assert sorted(orders) == ["Atlantis", "Atlantis", "Dune"]


def test_a_worker_runs_coroutines(start, client):
    client.create_queue("orders")
    client.post("orders", "Dune")
    worker = start("python coroutines.py")
    assert worker.stdout.readline() == "shipped Dune\n"
    worker.send_signal(signal.SIGINT)
    finish(worker)
    assert client.positions("orders", "coroutines").keys() == {1}


def test_a_worker_runs_in_an_asyncio_program(start, client):
    client.create_queue("orders")
    client.post("orders", "Dune")
    assert finish(start("python program.py")) == "shipped Dune\n"


def test_a_program_prints_only_new_messages(start, client):
    client.create_queue("orders", partitions=2)
    client.post("orders", "Dune", partition=2)
    assert finish(start("python new.py")) == "Dune\n"
    client.post("orders", "Emma", partition=1)
    assert finish(start("python new.py")) == "Emma\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files_and_headings(page):
    for path, heading in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert not heading or heading in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
