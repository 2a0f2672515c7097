"""Publishing events: recipients, message format, and counts of undelivered events."""

import json
import time
import uuid
from datetime import timedelta

import pytest
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.access.vouching import NotVouched
from agents.events import publishing
from agents.events.publishing import InvalidPayload, Published, publish
from agents.models import Consumer, EventSubscription, Registration, SubscriptionQueue
from core import broker
from queues.models import QueueEvent
from rabbit import arguments
from rabbit.errors import BrokerUnavailable
from rabbit.management import Management
from rabbit.publishing import OutcomeUnknown
from tests.conftest import Amqp
from tests.support.api import Program
from tests.support.toolbox import in_parallel, memory_alarm, queue_lengths, stored_queue, wait_until_equal

pytestmark = pytest.mark.usefixtures("agents")


@pytest.fixture
def offering(agents, alice):
    return agents.offering(alice, name="Big cluster")


@pytest.fixture
def create_subscription_queue(guarded, management, alice, offering):
    """Return a function that creates a row of a subscription queue, and with ``there`` its queue."""

    def make(
        name, *, owner=alice, object_type="order", state="ready", there=True, vhost=guarded, of=offering, **limits
    ):
        subscription = EventSubscription.objects.create(owner=owner, object_type=object_type)
        if there:
            management.declare_queue(vhost, name, {**arguments.REGISTERED_QUEUE_ARGUMENTS, **limits})
        return SubscriptionQueue.objects.create(
            subscription=subscription, offering=of, object_type=object_type, vhost=vhost, queue_name=name, state=state
        )

    return make


@pytest.fixture
def create_consumer(guarded, management, agents, alice, offering):
    """Return a function that creates a consumer with its queue."""

    def make(name, *object_types, owner=alice, state="ready"):
        management.declare_queue(guarded, name, arguments.REGISTERED_QUEUE_ARGUMENTS)
        identity = agents.identity(owner, offering)
        return Consumer.objects.create(
            identity=identity, object_types=list(object_types), vhost=guarded, queue_name=name, state=state
        )

    return make


@pytest.fixture
def lengths(guarded, management):
    return lambda: queue_lengths(management, guarded)


@pytest.fixture
def take(broker, guarded):
    """Return a function that takes a message from a queue: its properties and its body."""
    amqp = Amqp(broker.amqp_url, guarded)
    yield lambda name: amqp.channel.basic_get(name, auto_ack=True)[1:]
    amqp.connection.close()


def counts(published):
    return published.delivered, published.skipped, published.rejected, published.gone


def recorded_events():
    return [
        (event.queue_name, event.kind, event.details["count"], event.details["why"])
        for event in QueueEvent.objects.order_by("queue_name", "id")
    ]


# Recipients


def test_an_event_goes_to_all_ready_queues_of_its_offering_and_type(
    create_subscription_queue, create_consumer, lengths, offering, agents, alice
):
    create_subscription_queue("one")
    create_subscription_queue("two")
    create_subscription_queue("another-type", object_type="resource")
    create_subscription_queue("another-offering", of=agents.offering(alice))
    create_consumer("all-types")
    create_consumer("with-order", "resource", "order")
    create_consumer("without-order", "resource", "offering_user")
    assert counts(publish(offering, "order", {"order_uuid": "1"})) == (4, 0, 0, 0)
    assert lengths() == {
        "one": 1, "two": 1, "another-type": 0, "another-offering": 0,
        "all-types": 1, "with-order": 1, "without-order": 0,
    }  # fmt: skip
    assert recorded_events() == []


@pytest.mark.parametrize("spelled", [None, lambda given: given.hex, str, lambda given: str(given).upper()])
def test_an_event_adds_type_offering_and_schema_version_to_the_payload(
    create_subscription_queue, offering, take, spelled
):
    create_subscription_queue("one")
    payload = {"order_uuid": "1", "ü": ["\0", {"a": None}], "object_type": "order"}
    published = publish(offering, "order", payload | ({"offering_uuid": spelled(offering.uuid)} if spelled else {}))
    properties, body = take("one")
    assert json.loads(body) == payload | {
        "object_type": "order", "offering_uuid": offering.uuid.hex, "schema_version": 1,
    }  # fmt: skip
    assert (properties.delivery_mode, properties.content_type) == (2, "application/json")
    assert (properties.type, properties.headers) == ("order", {"object_type": "order"})
    assert properties.message_id == published.message_id == uuid.UUID(published.message_id).hex


LARGE = 123456789012345678901234567890


@pytest.mark.parametrize("number", [-LARGE, 2**64, 0.1, 1e300])
def test_a_number_of_any_size_arrives_unchanged(create_subscription_queue, offering, take, alice, number):
    create_subscription_queue("one")
    offering.publishers.add(alice)
    body = {"object_type": "order", "payload": {"big": number, "in": [{"side": number}]}}
    answer = Program(alice).post(f"offerings/{offering.uuid.hex}/events/", body)
    assert (answer.status_code, answer.json()["delivered"]) == (200, 1), answer.text
    found = json.loads(take("one")[1])
    assert (found["big"], found["in"], type(found["big"])) == (number, [{"side": number}], type(number))


def test_an_event_without_subscribers_is_published_to_nobody(offering, settings):
    settings.RABBIT_URL = "amqp://guest:guest@127.0.0.1:1"
    published = publish(offering, "order", {})
    assert published == Published(published.message_id)


def test_a_given_message_id_is_used(create_subscription_queue, offering, take):
    create_subscription_queue("one")
    given = uuid.uuid4()
    assert publish(offering, "order", {}, message_id=given).message_id == given.hex
    assert take("one")[0].message_id == given.hex


def test_queues_being_created_are_skipped_logged_and_recorded(
    create_subscription_queue, create_consumer, offering, lengths, caplog
):
    create_subscription_queue("one")
    create_subscription_queue("being-made", state=Registration.CREATING)
    create_consumer("consumer-being-made", state=Registration.CREATING)
    assert counts(publish(offering, "order", {})) == (1, 2, 0, 0)
    assert lengths() == {"one": 1, "being-made": 0, "consumer-being-made": 0}
    assert "was skipped for" in caplog.text
    assert "being-made in" in caplog.text
    assert recorded_events() == [
        ("being-made", "skipped", 1, publishing.BEING_CREATED),
        ("consumer-being-made", "skipped", 1, publishing.BEING_CREATED),
    ]


def test_queues_of_inactive_or_removed_members_are_skipped(
    create_subscription_queue, create_consumer, offering, lengths, agents, alice, caplog
):
    bob, carol = agents.owner("bob"), agents.owner("carol", is_staff=True)
    create_subscription_queue("alices")
    create_subscription_queue("bobs", owner=bob)
    create_subscription_queue("carols", owner=carol)
    create_consumer("alices-consumer")
    assert counts(publish(offering, "order", {})) == (3, 1, 0, 0)
    assert lengths() == {"alices": 1, "bobs": 0, "carols": 1, "alices-consumer": 1}
    assert recorded_events() == [("bobs", "skipped", 1, publishing.NOT_ALLOWED)]
    assert f"bobs in {SubscriptionQueue.objects.get(queue_name='bobs').vhost}: {publishing.NOT_ALLOWED}" in caplog.text
    offering.members.add(bob)
    alice.is_active = False
    alice.save()
    assert counts(publish(offering, "order", {})) == (2, 2, 0, 0)
    assert lengths() == {"alices": 1, "bobs": 1, "carols": 2, "alices-consumer": 1}


def test_full_and_missing_queues_are_counted_and_recorded(
    create_subscription_queue, offering, lengths, management, guarded
):
    management.declare_queue(guarded, "guardian.dlq", arguments.DEAD_LETTER_QUEUE_ARGUMENTS)
    create_subscription_queue("one")
    create_subscription_queue("full", **{"x-max-length": 1})
    create_subscription_queue("gone", there=False)
    stored_queue("full", vhost=guarded)
    assert counts(publish(offering, "order", {})) == (2, 0, 0, 1)
    assert counts(publish(offering, "order", {})) == (1, 0, 1, 1)
    assert recorded_events() == [("full", "rejected", 1, publishing.FULL), ("gone", "skipped", 2, publishing.MISSING)]
    assert QueueEvent.objects.get(queue_name="full").queue.name == "full"
    assert QueueEvent.objects.get(queue_name="gone").queue is None
    wait_until_equal(lengths, {"one": 2, "full": 1, "guardian.dlq": 1})
    assert SubscriptionQueue.objects.get(queue_name="gone").state == "ready"  # only two complete lists change it


def test_skips_within_a_minute_are_one_event_with_their_count(create_subscription_queue, offering):
    create_subscription_queue("one")
    create_subscription_queue("being-made", state=Registration.CREATING)
    assert in_parallel(*[lambda: counts(publish(offering, "order", {}))] * 8) == [(1, 1, 0, 0)] * 8
    assert recorded_events() == [("being-made", "skipped", 8, publishing.BEING_CREATED)]
    QueueEvent.objects.update(at=timezone.now() - timedelta(seconds=61))
    publish(offering, "order", {})
    assert [event[2] for event in recorded_events()] == [8, 1]


def test_failed_deliveries_take_a_constant_number_of_statements(create_subscription_queue, create_consumer, offering):
    counts = []
    for number in (1, 5):
        for one in range(number):
            create_subscription_queue(f"gone-{number}-{one}", there=False)
            create_consumer(f"making-{number}-{one}", state=Registration.CREATING)
        publish(offering, "order", {})
        with CaptureQueriesContext(connection) as captured:
            publish(offering, "order", {})
        counts.append(len(captured))
    assert counts[0] == counts[1]


def test_a_queue_has_the_time_of_its_last_delivery_and_its_last_error(create_subscription_queue, offering):
    queue = create_subscription_queue("small", **{"x-max-length": 1})
    assert publish(offering, "order", {}).delivered == 1
    queue.refresh_from_db()
    delivered_at = queue.last_delivered_at
    assert (delivered_at is not None, queue.last_error, queue.last_error_at) == (True, "", None)
    assert publish(offering, "order", {}).rejected == 1
    queue.refresh_from_db()
    assert (queue.last_delivered_at, queue.last_error) == (delivered_at, "The queue got no event: it is full.")
    assert queue.last_error_at > delivered_at


# Refusals


def test_only_publishers_and_operators_may_publish(create_subscription_queue, offering, agents, alice, lengths):
    create_subscription_queue("one")
    with pytest.raises(PermissionDenied, match="may not publish events of Big cluster"):
        publish(offering, "order", {}, by=alice)
    assert lengths() == {"one": 0}
    offering.publishers.add(alice)
    assert publish(offering, "order", {}, by=alice).delivered == 1
    assert publish(offering, "order", {}, by=agents.owner("carol", is_staff=True)).delivered == 1
    another = agents.offering(publishers=(alice,))
    offering.publishers.clear()
    assert publish(another, "order", {}, by=alice).delivered == 0
    with pytest.raises(PermissionDenied):
        publish(offering, "order", {}, by=alice)


def test_a_publisher_who_lost_access_is_refused(create_subscription_queue, offering, alice, lengths):
    create_subscription_queue("one")
    offering.publishers.add(alice)
    alice.vouched = False
    alice.save()
    with pytest.raises(NotVouched, match="has no access"):
        publish(offering, "order", {}, by=alice)
    assert lengths() == {"one": 0}


def circle():
    inside = {}
    inside["inside"] = inside
    return inside


def deep():
    inside = []
    for _ in range(100_000):
        inside = [inside]
    return {"deep": inside}


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ([], "must be a JSON object"),
        ({"object_type": "resource"}, "'object_type' is 'resource' in the payload, but must be 'order'"),
        ({"offering_uuid": "0" * 32}, "'offering_uuid'"),
        ({"offering_uuid": "no uuid"}, "'offering_uuid' is 'no uuid' in the payload, but must be"),
        ({"offering_uuid": 7}, "'offering_uuid'"),
        ({"schema_version": 2}, "'schema_version' is 2 in the payload, but must be 1"),
        ({"schema_version": True}, "'schema_version'"),
        ({"schema_version": "1" * 100_000}, "'schema_version'"),
        ({"a": float("nan")}, "as JSON"),
        ({"a": "\ud800"}, "as JSON"),
        ({"a": object()}, "as JSON"),
        (circle(), "as JSON"),
        (deep(), "as JSON"),
        ({"a": "x" * publishing.MAX_PAYLOAD_BYTES}, "1,048,576 are allowed"),
    ],
)
def test_an_invalid_payload_is_refused_with_the_reason(create_subscription_queue, offering, lengths, payload, says):
    create_subscription_queue("one")
    with pytest.raises(InvalidPayload, match=says) as raised:
        publish(offering, "order", payload)
    assert len(str(raised.value)) < 300
    assert lengths() == {"one": 0}


def test_the_largest_payload_arrives(create_subscription_queue, offering):
    create_subscription_queue("one")
    around = len(publishing._body(offering, "order", {"a": ""}))
    assert publish(offering, "order", {"a": "x" * (publishing.MAX_PAYLOAD_BYTES - around)}).delivered == 1


# Without the broker


def test_without_the_broker_nothing_is_published_or_counted(create_subscription_queue, offering, settings):
    create_subscription_queue("one")
    create_subscription_queue("being-made", state=Registration.CREATING)
    settings.RABBIT_URL = "amqp://guest:sekret-word@127.0.0.1:1"
    with pytest.raises(BrokerUnavailable) as raised:
        publish(offering, "order", {})
    assert raised.value.never_reached
    assert "sekret-word" not in str(raised.value)
    assert recorded_events() == []


@pytest.fixture
def new_publisher():
    """Let the test publish without the connections of earlier ones."""
    broker._publisher.cache_clear()
    yield
    broker._publisher.cache_clear()


def test_a_partly_unknown_outcome_counts_known_results_and_can_be_repeated(
    guarded_node, create_subscription_queue, offering, new_publisher, monkeypatch
):
    management = Management(guarded_node.management_url)
    for name in ("one", "hung"):
        management.declare_queue("/", name)
    for name in ("one", "hung", "gone"):
        create_subscription_queue(name, there=False, vhost="/")
    given = uuid.uuid4()
    monkeypatch.setattr("rabbit.publishing.CALL_SECONDS", 1)
    pid = 'amqqueue:get_pid(element(2, rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"hung">>))))'
    guarded_node.eval(f"sys:suspend({pid}).")
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown, match=given.hex) as raised:
        publish(offering, "order", {}, message_id=given)
    assert time.monotonic() - began < 4
    assert sorted(name for _, name in raised.value.results) == ["gone", "one"]
    assert recorded_events() == [("gone", "skipped", 1, publishing.MISSING)]
    guarded_node.eval(f"sys:resume({pid}).")
    assert publish(offering, "order", {}, message_id=given) == Published(given.hex, delivered=2, gone=1)


def test_during_a_memory_alarm_the_outcome_is_unknown_within_the_timeout(
    guarded_node, create_subscription_queue, offering, new_publisher, monkeypatch
):
    monkeypatch.setattr("rabbit.publishing.BLOCKED_SECONDS", 0.5)
    Management(guarded_node.management_url).declare_queue("/", "one")
    create_subscription_queue("one", there=False, vhost="/")
    assert publish(offering, "order", {}).delivered == 1
    with memory_alarm(guarded_node):
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            publish(offering, "order", {})
        assert time.monotonic() - began < 3
        assert broker.publisher().connections == 0
    assert publish(offering, "order", {}).delivered == 1
