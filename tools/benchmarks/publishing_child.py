"""Events to agents' queues, alternating with the same messages by bare pika. Runs in ``tools.benchmarks.child``."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pika
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accounts.models import Owner
from agents.events import publishing
from agents.models import EventSubscription, Offering, Registration, SubscriptionQueue
from core import broker
from rabbit import arguments
from rabbit.names import QueueName
from tools.benchmarks.passes import timed

OBJECT_TYPE = "order"
PAYLOAD = {"order_uuid": "0" * 32, "state": "executing", "comment": "x" * 200}
WARM_UPS = 3
VHOSTS = 10
FEW = 10
"""Queues of the event for comparing the number of statements."""


def measure(vhost: str, queues: int, rounds: int) -> dict[str, Any]:
    """Return the microseconds per message of each round, and the SQL statements of an event.

    ``one_vhost``: an event to ``queues`` queues of one vhost; ``bare``: a message to each of these queues with pika's
    ``BlockingConnection``; ``ten_vhosts``: an event to as many queues in ten vhosts.
    """
    management = broker.management()
    others = [f"bench-events-{number}" for number in range(VHOSTS)]
    one = [(vhost, f"events-{number}") for number in range(queues)]
    many = [(other, f"events-{number}") for other in others for number in range(queues // VHOSTS)]
    few = [(vhost, f"few-{number}") for number in range(FEW)]
    for other in others:
        management.create_vhost(other)
    try:
        for name in (*one, *many, *few):
            management.declare_queue(*name, arguments.REGISTERED_QUEUE_ARGUMENTS)
        in_one, in_ten, in_few = _offering(one), _offering(many), _offering(few)
        bare = Bare(vhost, [name for _, name in one], in_one)
        took: dict[str, list[float]] = {"bare": [], "one_vhost": [], "ten_vhosts": []}
        turns: list[tuple[str, Callable[[], None]]] = [
            ("bare", bare.publish),
            ("one_vhost", lambda: _publish(in_one, queues)),
            ("ten_vhosts", lambda: _publish(in_ten, queues)),
        ]
        for number in range(WARM_UPS + rounds):
            for what, publish in turns if number % 2 else reversed(turns):
                seconds, _ = timed(publish)
                if number >= WARM_UPS:
                    took[what].append(1_000_000 * seconds / queues)
        bare.close()
        statements = {"few": [_statements(in_few, FEW)], "all": [_statements(in_one, queues)]}
    finally:
        broker.publisher().close()
        for other in others:
            management.delete_vhost(other)
        with broker.clients() as clients:
            for queue_vhost, queue in (*one, *few):
                clients.sessions.of(queue_vhost).delete_queue(queue)
    return {**took, "statements": statements}


class Bare:
    """Publishes the same messages with pika over one connection, each confirmed before the next."""

    def __init__(self, vhost: str, queues: Sequence[str], offering: Offering) -> None:
        parameters = pika.URLParameters(broker.amqp_url())
        parameters.virtual_host = vhost
        self._connection = pika.BlockingConnection(parameters)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._queues = queues
        added = {"object_type": OBJECT_TYPE, "offering_uuid": offering.uuid.hex, "schema_version": 1}
        self._body = orjson.dumps({**PAYLOAD, **added})

    def publish(self) -> None:
        """Publish one message to each queue."""
        properties = pika.BasicProperties(
            content_type="application/json",
            delivery_mode=2,
            message_id=uuid.uuid4().hex,
            type=OBJECT_TYPE,
            headers={"object_type": OBJECT_TYPE},
        )
        for name in self._queues:
            self._channel.basic_publish("", name, self._body, properties, mandatory=True)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _offering(queues: Sequence[QueueName]) -> Offering:
    """Create an offering and an owner whose subscriptions have these queues."""
    offering = Offering.objects.create(name="Benchmark")
    owner = Owner.objects.create_user(f"{offering.uuid.hex}@example.org", vouched=True)
    offering.members.add(owner)
    subscriptions = EventSubscription.objects.bulk_create(EventSubscription(owner=owner) for _ in queues)
    SubscriptionQueue.objects.bulk_create(
        SubscriptionQueue(
            subscription=subscription,
            offering=offering,
            object_type=OBJECT_TYPE,
            vhost=vhost,
            queue_name=name,
            state=Registration.READY,
        )
        for subscription, (vhost, name) in zip(subscriptions, queues, strict=True)
    )
    return offering


def _publish(offering: Offering, queues: int) -> None:
    """Publish an event, and check that it reaches this number of queues."""
    published = publishing.publish(offering, OBJECT_TYPE, PAYLOAD)
    if published.delivered != queues:
        raise AssertionError(f"an event did not reach {queues} queues: {published}")


def _statements(offering: Offering, queues: int) -> int:
    with CaptureQueriesContext(connection) as captured:
        _publish(offering, queues)
    return len(captured)
