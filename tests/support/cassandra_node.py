"""One Cassandra node for all processes of a run, started only if a selected test needs it.

With pytest-xdist the controller starts it as soon as a worker has collected such a test: one whose id has "cassandra".
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from message_store.cassandra import setup
from message_store.cassandra.store import CassandraStore
from tools.cassandra import DATACENTER, PASSWORD, USER, PrivateCassandra

START_SECONDS = 240


class SharedNode:
    """The node of the controller. Its address, or why it didn't start, is in a file."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="guardian-shared-cassandra-")
        self.file = Path(self._directory.name, "hosts")
        self._node: PrivateCassandra | None = None
        self._starting: threading.Thread | None = None

    def start(self) -> None:
        """Start the node in a thread, once."""
        if self._starting is None:
            self._starting = threading.Thread(target=self._start, name="start of Cassandra")
            self._starting.start()

    def _start(self) -> None:
        try:
            self._node = PrivateCassandra()
            text = self._node.start(START_SECONDS).hosts
        except Exception as error:
            text = f"error: {error}"
        part = self.file.with_suffix(".part")
        part.write_text(text)
        part.rename(self.file)

    def stop(self) -> None:
        if self._starting is not None:
            self._starting.join()
        if self._node is not None:
            self._node.stop()
        self._directory.cleanup()


_shared: SharedNode | None = None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker in which file it finds the node's address."""
    global _shared
    if _shared is None:
        _shared = SharedNode()
    node.workerinput["cassandra"] = str(_shared.file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: Sequence[str]) -> None:
    """Start the node if a test needs it."""
    if _shared is not None and any("cassandra" in name for name in ids):
        _shared.start()


def pytest_unconfigure() -> None:
    if _shared is not None:
        _shared.stop()


@pytest.fixture(scope="session")
def cassandra_hosts(request: pytest.FixtureRequest) -> Iterator[str]:
    if not hasattr(request.config, "workerinput"):
        with PrivateCassandra() as node:
            yield node.hosts
        return
    file = Path(request.config.workerinput["cassandra"])
    until = time.monotonic() + START_SECONDS
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.05)
    hosts = file.read_text()
    assert not hosts.startswith("error"), hosts
    yield hosts


@pytest.fixture(scope="session")
def cassandra_settings(cassandra_hosts: str) -> dict[str, Any]:
    """Return settings of a store with a keyspace of this process, which has its tables."""
    found: dict[str, Any] = {
        "MESSAGE_STORE": "cassandra",
        "MESSAGE_STORE_DELAY_SECONDS": 0.0,
        "CASSANDRA_HOSTS": [cassandra_hosts],
        "CASSANDRA_KEYSPACE": f"test_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}",
        "CASSANDRA_DATACENTER": DATACENTER,
        "CASSANDRA_REPLICATION": "1",
        "CASSANDRA_USER": USER,
        "CASSANDRA_PASSWORD": PASSWORD,
        "CASSANDRA_TLS": False,
    }
    with override_settings(**found):
        list(setup.set_up())
    return found


@pytest.fixture
def cassandra_store(cassandra_settings: dict[str, Any], settings: Any) -> Iterator[CassandraStore]:
    """Return an empty store on Cassandra, which is that of the settings."""
    for name, value in cassandra_settings.items():
        setattr(settings, name, value)
    store = CassandraStore()
    yield store
    with override_settings(**cassandra_settings):
        session, keyspace = store._connection.session, cassandra_settings["CASSANDRA_KEYSPACE"]
        for application, name in session.execute(f"SELECT application, name FROM {keyspace}.queues"):
            store.remove(application, name)
