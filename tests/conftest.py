"""Shared fixtures and hooks. The far end is real: RabbitMQ, the database, the mail server."""

import base64
import json
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import hypothesis
import pika
import pytest
from django.conf import settings as django_settings
from django.core.servers.basehttp import WSGIRequestHandler
from django.db import close_old_connections, connection, transaction
from django.test import TransactionTestCase

from core.mails import AUTOMATIC_HEADERS
from queues.guard import deleter_threads
from rabbit.amqp import Session
from rabbit.management import Management
from status import probes
from tests.support.agents import agent, agents, reader  # noqa: F401
from tests.support.cassandra_node import (  # noqa: F401
    cassandra_hosts,
    cassandra_settings,
    cassandra_store,
    pytest_configure_node,
    pytest_unconfigure,
    pytest_xdist_node_collection_finished,
)
from tests.support.chromium import browser, other_hosts, page  # noqa: F401
from tests.support.fixtures import (  # noqa: F401
    QUICK_STATISTICS,
    admin,
    alice,
    as_alice,
    away,
    bob,
    broker_proxy,
    certificate,
    create_pulse_user,
    guarded_node,
    middle_of_an_interval,
    operator,
    own_node,
    private_channels,
    pulse_user,
    unused_name,
    webhook,
)  # fmt: skip
from tests.support.plugin import VAR
from tests.support.proxy import Proxy
from tests.support.served import database_url, served  # noqa: F401
from tests.support.toolbox import store_strictest_settings
from tools.mail import MailCatcher
from tools.rabbitmq import SERIES, PrivateNode, stomp_url_of

KEPT_TABLES = {"django_content_type", "auth_permission"}
"""Tables that migrations fill and no test changes."""

CACHE_TABLE = django_settings.CACHES["default"]["LOCATION"]
"""The table of the cache, which has the counts of rate limits. No model has it."""

SLOW_FIXTURES = {"browser", "own_node", "private_zookeeper"}
SLOW_STORES = ("cassandra", "zookeeper")
WHOLLY_SLOW = tuple(f"\npytestmark = pytest.mark.{marker}\n" for marker in ("slow", "containers"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test to run: importing all files takes 20 s in each process."""
    if not collection_path.name.startswith("test_"):
        return None
    markers, text = config.option.markexpr, collection_path.read_text()
    if markers.startswith("not slow"):
        return True if any(line in text for line in WHOLLY_SLOW) else None
    marker = markers.partition(" ")[0]
    return True if marker in ("sqlite", "rabbitmq", "containers") and f"mark.{marker}" not in text else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests as slow that need a browser, a RabbitMQ of their own, Cassandra, ZooKeeper or Docker."""
    is_slow = item.get_closest_marker("containers") or any(name in item.nodeid for name in SLOW_STORES)
    if is_slow or SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix: None) -> None:
    """Store SQLite's test database in a file, so that threads and other processes share it."""
    database = django_settings.DATABASES["default"]
    if "sqlite" in database["ENGINE"]:
        database["TEST"]["NAME"] = f"{VAR.name}/test.sqlite3"


def empty_database(self: TransactionTestCase) -> None:
    """Empty only tables with rows: Django empties all and recreates every permission after each test."""
    tables = {*connection.introspection.django_table_names(), CACHE_TABLE} - KEPT_TABLES
    filled = " UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM {name})" for name in tables)
    with connection.constraint_checks_disabled(), transaction.atomic(), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL session_replication_role = replica")  # so that no foreign key is checked
        cursor.execute(filled)
        for (name,) in cursor.fetchall():
            cursor.execute(f"DELETE FROM {name}")


TransactionTestCase._fixture_teardown = empty_database  # type: ignore[attr-defined]


def closes_connections(self: TransactionTestCase) -> bool:
    """Keep usable connections to PostgreSQL, as between requests: a new one takes 40 ms, since its caches are empty."""
    close_old_connections()
    return connection.vendor == "sqlite"


TransactionTestCase._should_reload_connections = closes_connections  # type: ignore[attr-defined]

# Otherwise each test client scans all static files when it is created: a fifth of a run.
django_settings.WHITENOISE_AUTOREFRESH = True

# The live server answers in two packets. The second would wait 40 ms for the ACK of the first.
WSGIRequestHandler.disable_nagle_algorithm = True


# An example may take long on a busy machine.
hypothesis.settings.register_profile("guardian", deadline=None)
hypothesis.settings.load_profile("guardian")


@pytest.fixture(autouse=True)
def restore_signals() -> Iterator[None]:
    """Restore the handlers that a command replaces: otherwise signals do not end processes forked later."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def fresh_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have /readyz check anew in each test and for each request."""
    monkeypatch.setattr(probes, "readiness", probes.Readiness(probes.PARTS))
    monkeypatch.setattr(probes, "MAX_AGE_SECONDS", 0)


@dataclass(frozen=True)
class Broker:
    """A running RabbitMQ. ``node`` is None for an external broker, which tests cannot stop.

    ``stomp_url`` is the URL for STOMP over WebSocket, or None without that plugin.
    """

    management_url: str
    amqp_url: str
    node: PrivateNode | None = None
    stomp_url: str | None = None


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """Return the broker named in the environment, or a private one."""
    outside = os.environ.get("GUARDIAN_TEST_RABBITMQ_MANAGEMENT_URL")
    if outside:
        stomp_url = os.environ.get("GUARDIAN_TEST_STOMP_URL") or _stomp_url(outside)
        yield Broker(outside, os.environ["GUARDIAN_TEST_RABBIT_URL"], stomp_url=stomp_url)
        return
    with PrivateNode(
        plugins=["rabbitmq_management", "rabbitmq_prometheus", "rabbitmq_stream", "rabbitmq_web_stomp"],
        quorum_tick_seconds=1,
        config=QUICK_STATISTICS,
    ) as node:
        yield Broker(node.management_url, node.amqp_url, node, node.stomp_url)


def _stomp_url(management_url: str) -> str | None:
    client = Management(management_url)
    try:
        return stomp_url_of(client.overview(), urlsplit(management_url).hostname or "")
    finally:
        client.close()


@pytest.fixture(scope="session")
def stomp_url(broker: Broker) -> str:
    """Return the URL at which agents connect to the broker."""
    if broker.stomp_url is None:
        pytest.skip("the external broker does not serve STOMP over WebSocket (rabbitmq_web_stomp)")
    return broker.stomp_url


class TestManagement(Management):
    """A management client for tests, which can do more, mostly over AMQP."""

    __test__ = False

    def __init__(self, broker: Broker) -> None:
        # Beside other tests, deleting a vhost with a thousand queues takes longer than Guardian's timeout.
        super().__init__(broker.management_url, read_timeout=60)
        self._amqp_url = broker.amqp_url

    def delete_queue(self, vhost: str, name: str) -> None:
        with Session(self._amqp_url, vhost, 60) as session:
            session.delete_queue(name)

    def purge_queue(self, vhost: str, name: str) -> None:
        """Purge the ready messages of a queue."""
        with Session(self._amqp_url, vhost, 60) as session:
            session.purge_queue(name)

    def delete_exchange(self, vhost: str, name: str) -> None:
        with Session(self._amqp_url, vhost, 60) as session:
            session.delete_exchange(name)

    def declare_exchange(self, vhost: str, name: str, kind: str = "topic") -> None:
        self._put("exchanges", vhost, name, json={"type": kind, "durable": True})

    def bind_queue(
        self, vhost: str, exchange: str, queue: str, key: str, arguments: dict[str, Any] | None = None
    ) -> None:
        with Session(self._amqp_url, vhost, 60) as session:
            session.bind_queue(queue, exchange, key, arguments or {})

    def delete_permissions(self, vhost: str, user: str) -> None:
        self._delete("permissions", vhost, user)


@pytest.fixture(scope="session")
def management(broker: Broker) -> Iterator[TestManagement]:
    client = TestManagement(broker)
    version = client.overview()["rabbitmq_version"]
    assert not SERIES or version.startswith(f"{SERIES}."), f"the tests run on RabbitMQ {version}, not on {SERIES}"
    yield client
    client.close()


class Vhosts:
    """Empty vhosts for tests. One left empty is reused by the next test: creating one takes 35 ms."""

    def __init__(self, broker: Broker, management: Management) -> None:
        self._management = management
        url = urlsplit(broker.management_url)
        self._user = unquote(url.username or "")
        self._host = f"{url.hostname}:{url.port}"
        credentials = base64.b64encode(f"{self._user}:{unquote(url.password or '')}".encode()).decode()
        self._headers = {"Authorization": f"Basic {credentials}"}
        self._empty: str | None = None

    def lend(self) -> str:
        name, self._empty = self._empty, None
        if name is None:
            name = f"test-{uuid.uuid4().hex[:12]}"
            self._management.create_vhost(name)
        return name

    def take_back(self, name: str) -> None:
        """Keep a vhost for the next test if it is empty; delete it otherwise."""
        if self._is_empty(name):
            self._empty = name
        else:
            self._management.delete_vhost(name)

    def _is_empty(self, name: str) -> bool:
        # httpx takes five times the CPU time, and this runs after a third of all tests.
        with closing(HTTPConnection(self._host)) as http:

            def names(path: str, key: str = "name") -> set[str]:
                http.request("GET", f"/api{path}?disable_stats=true&columns={key}", headers=self._headers)
                answer = http.getresponse()
                rows = json.load(answer)
                return {row[key] for row in rows} if answer.status == 200 else {"an error"}

            return (
                not names(f"/queues/{name}")
                and all(exchange == "" or exchange.startswith("amq.") for exchange in names(f"/exchanges/{name}"))
                and names(f"/vhosts/{name}/permissions", "user") == {self._user}
                and not names(f"/policies/{name}")
                and not names(f"/operator-policies/{name}")
            )

    def close(self) -> None:
        """Delete the vhost that is kept."""
        if self._empty is not None:
            self._management.delete_vhost(self._empty)


@pytest.fixture(scope="session")
def all_vhosts(broker: Broker, management: Management) -> Iterator[Vhosts]:
    """Return the vhosts of this process."""
    vhosts = Vhosts(broker, management)
    yield vhosts
    vhosts.close()


@pytest.fixture
def vhost(all_vhosts: Vhosts) -> Iterator[str]:
    """Return an empty vhost for this test alone."""
    name = all_vhosts.lend()
    yield name
    all_vhosts.take_back(name)


@pytest.fixture
def vhosts(management: Management) -> Iterator[list[str]]:
    """Return six vhosts with a queue "a" in each. Delete them afterwards."""
    names = [f"test-{uuid.uuid4().hex[:12]}" for _ in range(6)]
    for name in names:
        management.create_vhost(name)
        management.declare_queue(name, "a")
    yield names
    for name in names:
        management.delete_vhost(name)


@pytest.fixture
def proxy(broker: Broker) -> Iterator[Proxy]:
    """Return a proxy in front of the management API that forwards everything at first."""
    with Proxy.before(broker.management_url) as proxy:
        yield proxy


class Amqp:
    """A connection to one vhost, with helpers to declare, publish and consume."""

    def __init__(self, amqp_url: str, vhost: str) -> None:
        parameters = pika.URLParameters(f"{amqp_url.rstrip('/')}/{quote(vhost, safe='')}")
        # Nothing answers heartbeats while a long test does something else. RabbitMQ would close the connection.
        parameters.heartbeat = 0
        self.connection = pika.BlockingConnection(parameters)
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()

    def queue(self, name: str, messages: int = 0, **arguments: Any) -> None:
        """Declare a queue, durable by default, and publish this number of messages to it."""
        self.channel.queue_declare(name, **{"durable": True, **arguments})
        self.publish(name, messages)

    def publish(self, name: str, messages: int) -> None:
        """Publish this number of messages to a queue and wait for the confirms."""
        for number in range(messages):
            self.channel.basic_publish("", name, str(number).encode())

    def take(self, name: str, messages: int) -> None:
        """Take this number of messages from a queue."""
        for _ in range(messages):
            method, _, _ = self.channel.basic_get(name, auto_ack=True)
            assert method is not None, f"{name} has fewer messages than expected"

    def ready(self, name: str) -> int:
        """Return the number of ready messages of a queue."""
        return self.channel.queue_declare(name, passive=True).method.message_count

    def taken(self, name: str) -> list[tuple[Any, Any, bytes]]:
        """Take all messages of a queue, and return each with its delivery and its properties."""
        return list(iter(lambda: self.channel.basic_get(name, auto_ack=True), (None, None, None)))

    def numbers(self, name: str) -> list[int]:
        """Take all messages of a queue, and return their bodies as numbers."""
        return [int(body) for _, _, body in self.taken(name)]


@pytest.fixture
def amqp(broker: Broker, vhost: str) -> Iterator[Amqp]:
    opened = Amqp(broker.amqp_url, vhost)
    yield opened
    if opened.connection.is_open:
        opened.connection.close()


@pytest.fixture
def guarded(transactional_db: None, settings: Any, broker: Broker, vhost: str) -> Iterator[str]:
    """Guard the test's vhost, not for the first time, with small thresholds: warned at 5 messages, deleted over 10."""
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    settings.RABBIT_URL = broker.amqp_url
    settings.GUARDIAN_VHOSTS = [vhost]
    settings.GUARDIAN_PULSE_VHOST = vhost
    settings.GUARDIAN_WARN_QUEUE_LENGTH = 5
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
    store_strictest_settings()
    yield vhost
    # Another test may get this vhost. It must not find the deleter's connection there.
    deleter_threads._sessions(os.getpid(), broker.amqp_url, vhost).close()
    deleter_threads._sessions.cache_clear()


@pytest.fixture
def environment(guarded: str, broker: Broker) -> dict[str, str]:
    """Return an environment with the settings, database and broker of this test, for another process."""
    return {
        **os.environ,
        "DATABASE_URL": database_url(),
        "RABBITMQ_MANAGEMENT_URL": broker.management_url,
        "RABBIT_URL": broker.amqp_url,
        "GUARDIAN_VHOSTS": guarded,
        "GUARDIAN_PULSE_VHOST": guarded,
        "GUARDIAN_WARN_QUEUE_LENGTH": "5",
        "GUARDIAN_MAX_QUEUE_LENGTH": "10",
        "GUARDIAN_POLL_SECONDS": "0.2",
        "GUARDIAN_DELETERS": "4",
        "GUARDIAN_OPERATOR_EMAILS": "ops@example.org",
    }


@pytest.fixture
def mailbox(settings: Any) -> Iterator[MailCatcher]:
    """Return a real SMTP server to which Django sends. Each mail must have the headers against automatic answers."""
    with MailCatcher() as catcher:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, _, port = catcher.url.removeprefix("smtp://").partition(":")
        settings.EMAIL_PORT = int(port)
        yield catcher
        for mail in catcher.mails:
            assert [mail.message[name] for name in AUTOMATIC_HEADERS] == list(AUTOMATIC_HEADERS.values()), mail.subject
