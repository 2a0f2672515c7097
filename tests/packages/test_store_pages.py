"""The programs of the store package's own pages run, and do what the pages say."""

import os
import signal

import pytest

from guardian_store import Client
from message_store import applications
from tests.support.package_pages import programs_of
from tests.support.toolbox import wait_until

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
    environment = {**os.environ, "GUARDIAN": live_server.url, "KEY": key}
    with programs_of("guardian-store", tmp_path, environment) as start:
        yield start


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
