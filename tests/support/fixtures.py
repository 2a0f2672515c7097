"""Fixtures that several test modules use; conftest.py imports them. Functions are in toolbox.py."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import time_machine
from django.test import Client
from django.utils import timezone

from accounts.models import Owner, PulseUser
from rabbit.errors import NotOnBroker
from rabbit.management import Management
from tests.support.proxy import Proxy
from tests.support.toolbox import AWAY, store_strictest_settings
from tests.support.webhooks import Webhook, make_certificate
from tools.rabbitmq import PrivateNode

QUICK_STATISTICS = {"collect_statistics_interval": "1000"}
"""A broker's configuration: it counts consumers and lists connections after a second, not after five."""


@pytest.fixture
def alice(db: None) -> Owner:
    """Return an owner who has signed in and may use the broker."""
    return Owner.objects.create_user("alice@example.org", vouched=True, last_login=timezone.now())


@pytest.fixture
def bob(db: None) -> Owner:
    """Return another owner who has signed in and may use the broker."""
    return Owner.objects.create_user("bob@example.org", vouched=True, last_login=timezone.now())


@pytest.fixture
def operator(db: None) -> Owner:
    return Owner.objects.create_superuser("ops@example.org")


@pytest.fixture
def admin(client: Client, operator: Owner) -> Client:
    client.force_login(operator)
    return client


@pytest.fixture
def as_alice(client: Client, alice: Owner) -> Client:
    client.force_login(alice)
    return client


@pytest.fixture
def pulse_user(alice: Owner) -> PulseUser:
    """Return Alice's Pulse user "alice"."""
    pulse_user = PulseUser.objects.create(username="alice", ready=True)
    pulse_user.owners.add(alice)
    return pulse_user


@pytest.fixture(name="name")
def unused_name(management: Management) -> Iterator[str]:
    """Return a name that no Pulse user has. Delete the RabbitMQ users whose names start with it afterwards."""
    name = f"alice-{uuid.uuid4().hex[:8]}"
    yield name
    for user in management.users():
        if user.name.startswith(name):
            management.delete_user(user.name)


@pytest.fixture
def create_pulse_user(management: Management) -> Iterator[Callable[..., str]]:
    """Return a function that creates a RabbitMQ user with a unique name, or exactly this one."""
    created = []

    def create(stem: str, tags: Sequence[str] = (), *, exactly: bool = False) -> str:
        name = stem if exactly else f"{stem}-{uuid.uuid4().hex[:8]}"
        management.put_user(name, "secret", tags)
        created.append(name)
        return name

    yield create
    for name in created:
        with contextlib.suppress(NotOnBroker):
            management.delete_user(name)


@pytest.fixture
def middle_of_an_interval() -> Iterator[Any]:
    """Let no interval of a rate limit end within a test. Give the traveller, which can shift the time."""
    with time_machine.travel(timezone.now().replace(minute=30, second=20)) as traveller:
        yield traveller


@pytest.fixture
def away(settings: Any) -> None:
    """Configure URLs of a broker at which nothing listens."""
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    settings.RABBIT_URL = AWAY.replace("http:", "amqp:")


@pytest.fixture
def broker_proxy(guarded: str, proxy: Proxy, settings: Any) -> Proxy:
    """Return a proxy between Guardian and the management API."""
    settings.RABBITMQ_MANAGEMENT_URL = proxy.url(settings.RABBITMQ_MANAGEMENT_URL)
    return proxy


@pytest.fixture(scope="module")
def own_node() -> Iterator[PrivateNode]:
    """Return a node for one module, whose tests may stop it but must start it again: that takes seconds."""
    with PrivateNode(plugins=["rabbitmq_management"], quorum_tick_seconds=1, config=QUICK_STATISTICS) as node:
        yield node


def guard(node: PrivateNode, settings: Any) -> None:
    """Guard this node, not for the first time, with small thresholds."""
    settings.RABBITMQ_MANAGEMENT_URL = node.management_url
    settings.RABBIT_URL = node.amqp_url
    settings.GUARDIAN_VHOSTS = ["/"]
    settings.GUARDIAN_PULSE_VHOST = "/"
    settings.GUARDIAN_WARN_QUEUE_LENGTH = 5
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
    store_strictest_settings()


@pytest.fixture
def guarded_node(own_node: PrivateNode, transactional_db: None, settings: Any) -> Iterator[PrivateNode]:
    """Guard an empty node that the test may stop or suspend. It runs again afterwards."""
    guard(own_node, settings)
    yield own_node
    if not own_node.running:
        own_node.start()
    own_node.resume()
    management = Management(own_node.management_url)
    management.delete_vhost("/")
    management.create_vhost("/")
    management.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a certificate for this machine's names, with its key."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def webhook(certificate: Path) -> Iterator[Webhook]:
    with Webhook(certificate) as hook:
        yield hook


@pytest.fixture
def private_channels(settings: Any, monkeypatch: pytest.MonkeyPatch, certificate: Path) -> None:
    """Allow channels at this machine's own addresses, and trust the certificate."""
    settings.GUARDIAN_CHANNELS_MAY_BE_PRIVATE = True
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
