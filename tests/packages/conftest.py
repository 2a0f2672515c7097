"""Settings of consumers on the tests' broker."""

import uuid
from urllib.parse import urlsplit

import pytest

from guardian_consumers import Consumer, Publisher
from rabbit.permissions import for_pulse_user
from tests.support.consumers import InLoop, InTasks, PublisherInLoops, settings_at


@pytest.fixture(params=[Consumer, InTasks], ids=["threads", "asyncio"])
def each_consumer(request, monkeypatch):
    """Run a test with both kinds of consumers. Return the kind."""
    monkeypatch.setattr(request.module, "Consumer", request.param)
    return request.param


@pytest.fixture(params=[Consumer, InLoop], ids=["threads", "asyncio"])
def each_hanging_consumer(request, monkeypatch):
    """Run a test with callbacks that hang in a thread, and in an event loop."""
    monkeypatch.setattr(request.module, "Consumer", request.param)
    monkeypatch.setattr("guardian_consumers._asynchronous.CANCEL_SECONDS", 0)


@pytest.fixture(params=[Publisher, PublisherInLoops], ids=["threads", "asyncio"])
def each_publisher(request, monkeypatch):
    """Run a test with both kinds of publishers."""
    monkeypatch.setattr(request.module, "Publisher", request.param)


@pytest.fixture
def consumer_settings(broker, vhost):
    """Return a function that returns the settings of a consumer in the test's vhost."""
    return lambda **changes: settings_at(broker.amqp_url, vhost, **changes)


@pytest.fixture
def pulse_settings(broker, management, vhost):
    """Return such a function for a new Pulse user with only the permissions of a Pulse user."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    management.put_user(name, "sekret-word")
    management.set_permissions(vhost, name, for_pulse_user(name))
    address = urlsplit(broker.amqp_url).netloc.rpartition("@")[2]
    given = {"pulse_user": name}
    yield lambda **changes: settings_at(f"amqp://{name}:sekret-word@{address}", vhost, **{**given, **changes})
    management.delete_user(name)
