"""The unchanged mozillapulse package from PyPI, with Pulse users created by Guardian."""

import contextlib
import threading
from urllib.parse import urlsplit

import pytest
from mozillapulse.config import PulseConfiguration
from mozillapulse.consumers import GenericConsumer
from mozillapulse.messages.base import GenericMessage
from mozillapulse.publishers import GenericPublisher

from accounts.models import Owner
from accounts.pulse_users.creation import create_pulse_user
from accounts.pulse_users.passwords import rotate_password
from tests.support.toolbox import wait_until


class Received(Exception):
    """End the consumer, which listens forever."""


class Build(GenericMessage):
    def __init__(self, number):
        super().__init__()
        self.routing_parts = ["build", str(number)]
        self.set_data("number", number)


@pytest.fixture
def names(name):
    return [f"{name}-{role}" for role in ("builder", "watcher")]


@pytest.fixture
def configuration(broker, guarded):
    """Return a function that configures the package for a Pulse user."""
    address = urlsplit(broker.amqp_url)

    def configure(name, password):
        return PulseConfiguration(
            user=name, password=password, host=address.hostname, port=address.port, vhost=guarded, ssl=False
        )

    return configure


@pytest.mark.parametrize("durable", [False, True], ids=["transient", "durable"])
def test_a_consumer_receives_what_a_publisher_sends(guarded, names, configuration, management, durable):
    alice = Owner.objects.create_user("alice@example.org", vouched=True)
    (_, publishing), (watcher, _) = (create_pulse_user(name, [alice]) for name in names)
    watching = rotate_password(watcher)
    exchange = f"exchange/{names[0]}/builds"
    publisher = GenericPublisher(configuration(names[0], publishing), exchange)
    publisher.publish(Build(1))  # publishing creates the exchange
    received = []

    def callback(body, message):
        received.append(body)
        message.ack()
        raise Received

    consumer = GenericConsumer(
        configuration(names[1], watching),
        exchange,
        topic="build.#",
        applabel="watch",
        durable=durable,
        callback=callback,
        timeout=10,
    )

    def listen():
        with contextlib.suppress(Received):
            consumer.listen()

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    queue = f"queue/{names[1]}/watch"
    wait_until(lambda: exchange in {bound.source for bound in management.queue_bindings(guarded, queue)})
    publisher.publish(Build(2))
    listening.join(10)
    assert [body["payload"] for body in received] == [{"number": 2}]
    assert received[0]["_meta"]["routing_key"] == "build.2"
    consumer.disconnect()
    publisher.disconnect()
