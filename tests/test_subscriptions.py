"""Registering, on a real broker: what an agent gets, what it may do with it, and what is left where that fails."""

import logging
import uuid
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pika
import pytest
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import AuthToken, Owner
from accounts.vouching import NotVouched
from agents import credentials, deletions, identities, records, registration
from agents.identities import (
    IdentityExists,
    NoSuchObjectType,
    NoSuchOffering,
    check_object_type,
    create_identity,
    read_config,
    subscribable_offering,
    update_identity,
)
from agents.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    ObjectType,
    Offering,
    SubscriptionQueue,
)
from agents.records import Busy
from agents.registered import agent_vhosts, mark_returned, mark_vanished, registered_queues
from agents.registration import create_queue, create_subscription, redeclare, register_consumer, register_subscription
from agents.vhosts import create_vhost
from core import broker, locks, removals
from core.models import Removal
from rabbit.arguments import DEAD_LETTER_QUEUE_ARGUMENTS, REGISTERED_QUEUE_ARGUMENTS
from rabbit.http import PooledClient
from rabbit.management import BrokerUnavailable, Management, NotOnBroker, Refused
from rabbit.permissions import Permissions
from tests.agents import make_removals_due
from tests.api import Program
from tests.conftest import Amqp
from tests.proxy import Proxy
from tests.toolbox import AWAY, Killed, in_background, in_parallel, wait_until_blocked

pytestmark = pytest.mark.usefixtures("agents")

TRANSACTIONS = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE")


@pytest.fixture
def presented(agents, alice):
    return agents.token(alice)


@pytest.fixture
def offering(agents, alice):
    return agents.offering(alice, name="Cluster")


@pytest.fixture
def identity(agents, alice, offering):
    return agents.identity(alice, offering)


@pytest.fixture
def subscription(identity, presented):
    return register_subscription(identity, "order", presented)[0]


@pytest.fixture
def open_amqp(broker):
    """Open connections to the broker, as an agent would, and close them afterwards."""
    opened = []

    def connect(username, password, vhost):
        address = pika.URLParameters(broker.amqp_url)
        credentials = pika.PlainCredentials(username, password)
        parameters = pika.ConnectionParameters(address.host, address.port, vhost, credentials)
        opened.append(pika.BlockingConnection(parameters))
        return opened[-1]

    yield connect
    for one in opened:
        if one.is_open:
            one.close()


@pytest.fixture
def asked(monkeypatch):
    """Collect the requests that the broker gets over HTTP, as "PUT queues"; other threads' too."""
    requests = []
    real = PooledClient.send

    def count(self, method, target, *arguments, **options):
        requests.append(f"{method} {target.split('/')[2].split('?')[0]}")
        return real(self, method, target, *arguments, **options)

    monkeypatch.setattr(PooledClient, "send", count)
    return requests


def statements(captured):
    return [query["sql"] for query in captured if not query["sql"].startswith(TRANSACTIONS)]


def before(monkeypatch, name, act, place=Management):
    """Have this happen right before the first call of a method."""
    real, done = getattr(place, name), []

    def called(*arguments, **options):
        if not done:
            done.append(True)
            act()
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, called)


def after(monkeypatch, name, act, place=Management):
    """Have this happen right after the first call of a method."""
    real, done = getattr(place, name), []

    def called(*arguments, **options):
        outcome = real(*arguments, **options)
        if not done:
            done.append(True)
            act()
        return outcome

    monkeypatch.setattr(place, name, called)


def kill():
    raise Killed


@contextmanager
def refused(code):
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        yield
    assert caught.value.reply_code == code


def pending():
    return set(Removal.objects.values_list("kind", "vhost", "name"))


# What an agent gets


def test_a_new_queue_is_on_the_broker_with_its_vhost_its_arguments_and_its_dead_letter_queue(
    agents, alice, offering, subscription, presented
):
    queue, new = create_queue(subscription, offering, "order", presented)
    assert new
    assert queue.state == "ready"
    assert queue.vhost == alice.uuid.hex
    assert queue.queue_name == f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_order"
    assert agents.queues(queue.vhost) == {
        queue.queue_name: REGISTERED_QUEUE_ARGUMENTS,
        "guardian.dlq": DEAD_LETTER_QUEUE_ARGUMENTS,
    }
    assert AgentVhost.objects.get().ready


def test_asking_again_gives_the_same_queue_and_says_that_it_is_not_new(offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    assert create_queue(subscription, offering, "order", presented) == (queue, False)
    assert SubscriptionQueue.objects.count() == 1


def test_an_identity_has_one_subscription_for_each_type(identity, presented):
    orders, new = register_subscription(identity, "order", presented, description="Orders", source_ip="192.0.2.7")
    assert (new, orders.description, orders.source_ip) == (True, "Orders", "192.0.2.7")
    assert register_subscription(identity, "order", presented) == (orders, False)
    resources, new = register_subscription(identity, "resource", presented)
    assert new
    assert resources != orders


def test_a_subscription_without_an_identity_is_a_new_one_each_time(agents, alice, presented):
    objects = [{"object_type": "order"}]
    one = create_subscription(alice, presented, observable_objects=objects, description="Orders")
    two = create_subscription(alice, presented)
    assert one.uuid != two.uuid
    assert (one.observable_objects, one.password_set, one.token) == (objects, True, presented.token)
    assert {one.rmq_username, two.rmq_username} <= agents.users()


def test_a_consumer_has_one_queue_and_a_user_of_its_own(agents, identity, presented, management):
    consumer, new = register_consumer(identity, presented, None)
    assert (new, consumer.object_types, consumer.state) == (True, [], "ready")
    assert consumer.queue_name == f"consumer_{consumer.uuid.hex}"
    assert agents.queues(consumer.vhost)[consumer.queue_name] == REGISTERED_QUEUE_ARGUMENTS
    reads = Permissions("^$", "^$", f"^consumer_{consumer.uuid.hex}$")
    assert management.permissions_of(consumer.rmq_username) == {consumer.vhost: reads}


def test_the_types_of_a_consumer_stay_where_none_are_named_and_an_empty_list_means_all(identity, presented):
    types = [register_consumer(identity, presented, said)[0].object_types for said in (["order", "order"], None, [])]
    assert types == [["order"], ["order"], []]
    assert Consumer.objects.get().object_types == []


@pytest.mark.parametrize("kind", ["subscription", "consumer"])
def test_the_token_reads_the_queue_over_amqp_and_can_do_nothing_else(
    kind, agents, alice, identity, offering, subscription, presented, open_amqp, broker
):
    login, queue = subscription, create_queue(subscription, offering, "order", presented)[0]
    other = register_consumer(identity, presented, None)[0]
    if kind == "consumer":
        login, queue, other = other, other, queue
    Amqp(broker.amqp_url, queue.vhost).publish(queue.queue_name, 1)
    agent = open_amqp(login.rmq_username, presented.key, alice.uuid.hex)
    _, _, body = agent.channel().basic_get(queue.queue_name, auto_ack=True)
    assert body == b"0"
    for stranger in (other.queue_name, "guardian.dlq"):
        with refused(403):
            agent.channel().basic_get(stranger)
    with refused(403):
        agent.channel().queue_declare("its-own")
    with refused(403):
        agent.channel().queue_declare(f"{queue.queue_name}_more", durable=True)
    with refused(403):
        agent.channel().queue_delete(queue.queue_name)
    with refused(403):
        agent.channel().queue_bind(queue.queue_name, "amq.topic", "#")
    with refused(403):
        channel = agent.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue.queue_name, b"{}")


def test_neither_another_token_nor_another_vhost_lets_anybody_in(
    agents, alice, offering, subscription, presented, open_amqp, vhost
):
    create_queue(subscription, offering, "order", presented)
    for password, place in ((agents.token(alice).key, alice.uuid.hex), (presented.key, vhost)):
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            open_amqp(subscription.rmq_username, password, place)


def test_the_token_presented_last_is_the_password(agents, alice, offering, subscription, presented, open_amqp):
    create_queue(subscription, offering, "order", presented)
    newer = agents.token(alice)
    assert create_queue(subscription, offering, "order", newer)[1] is False
    assert EventSubscription.objects.get().token == newer.token
    open_amqp(subscription.rmq_username, newer.key, alice.uuid.hex)
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        open_amqp(subscription.rmq_username, presented.key, alice.uuid.hex)


def test_a_token_is_in_no_text_and_in_no_log(offering, subscription, presented, caplog, settings):
    caplog.set_level(logging.DEBUG)
    create_queue(subscription, offering, "order", presented)
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    with pytest.raises(BrokerUnavailable) as caught:
        create_queue(subscription, offering, "order", presented)
    assert presented.key not in f"{presented} {presented!r} {caught.value} {caplog.text}"


# What it costs


def test_a_steady_call_makes_one_request_and_few_statements(offering, identity, subscription, presented, asked):
    create_queue(subscription, offering, "order", presented)
    register_consumer(identity, presented, ["order"])
    asked.clear()
    # The row, the vhost, the login, the mark.
    with CaptureQueriesContext(connection) as captured:
        create_queue(subscription, offering, "order", presented)
    assert asked == ["PUT queues"]
    assert len(statements(captured)) == 4
    with CaptureQueriesContext(connection) as captured:
        register_consumer(identity, presented, ["order"])
    assert asked == ["PUT queues"] * 2
    assert len(statements(captured)) == 4
    with CaptureQueriesContext(connection) as captured:
        register_subscription(identity, "order", presented)
    assert asked == ["PUT queues"] * 2
    assert len(statements(captured)) == 3


def test_a_new_queue_takes_one_request_and_as_many_statements_after_ten_as_after_one(
    offering, subscription, presented, asked
):
    counts = []
    for object_type in ObjectType.values[:11]:
        with CaptureQueriesContext(connection) as captured:
            assert create_queue(subscription, offering, object_type, presented)[1]
        counts.append(len(statements(captured)))
    assert asked[-11:] == ["PUT queues"] * 11
    # Whether there is a row, the row, its removal, the vhost, the login, the mark.
    assert (counts[1], counts[10]) == (6, 6)


def test_a_first_registration_takes_as_many_requests_as_there_are_things_to_make(offering, identity, presented, asked):
    subscription, _ = register_subscription(identity, "order", presented)
    create_queue(subscription, offering, "order", presented)
    assert Counter(asked) == {"PUT vhosts": 1, "PUT queues": 2, "PUT users": 1, "PUT permissions": 1}


# What is refused


def test_an_offering_is_found_with_dashes_and_without(alice, offering):
    for written in (str(offering.uuid), offering.uuid.hex, offering.uuid.hex.upper(), offering.uuid):
        assert subscribable_offering(alice, written) == offering


def test_an_offering_that_is_not_theirs_or_not_there_is_refused_in_the_same_words(agents, alice, offering):
    bob = agents.owner("bob")
    texts = set()
    for asking, written in (
        (bob, offering.uuid.hex),
        (alice, uuid.uuid4().hex),
        (alice, "x"),
        (alice, ""),
        (alice, f"{{{offering.uuid}}}"),
        (alice, f"{offering.uuid.hex}\n"),
    ):
        with pytest.raises(NoSuchOffering) as caught:
            subscribable_offering(asking, written)
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_an_operator_may_use_every_offering(agents, offering):
    assert subscribable_offering(agents.owner("ops", is_staff=True), offering.uuid) == offering


def test_an_object_type_that_is_none_is_refused_before_anything_is_made(identity, subscription, offering, presented):
    for call in (
        partial(check_object_type, "Order"),
        partial(register_subscription, identity, "", presented),
        partial(create_queue, subscription, offering, "orders", presented),
        partial(register_consumer, identity, presented, ["order", "orders"]),
    ):
        with pytest.raises(NoSuchObjectType, match="user_ssh_key"):
            call()
    assert [check_object_type(one) for one in ObjectType.values] == ObjectType.values
    assert not SubscriptionQueue.objects.exists()
    assert not Consumer.objects.exists()


def test_who_is_not_vouched_for_gets_nothing_new_and_keeps_what_they_have(
    agents, alice, identity, offering, subscription, presented
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    Owner.objects.update(vouched=False)
    alice.refresh_from_db()
    for call in (
        partial(create_identity, alice, offering, "another"),
        partial(create_subscription, alice, presented),
        partial(register_subscription, identity, "resource", presented),
        partial(create_queue, subscription, offering, "resource", presented),
        partial(register_consumer, identity, presented, None),
    ):
        with pytest.raises(NotVouched):
            call()
    assert create_queue(subscription, offering, "order", presented) == (queue, False)
    assert register_subscription(identity, "order", presented) == (subscription, False)
    assert (AgentIdentity.objects.count(), EventSubscription.objects.count()) == (1, 1)
    assert set(agents.queues(queue.vhost)) == {queue.queue_name, "guardian.dlq"}
    assert not Removal.objects.exists()


def test_with_the_broker_away_nothing_is_registered_and_nothing_left_to_be_removed(
    settings, alice, identity, offering, subscription, presented
):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    for call in (
        partial(create_subscription, alice, presented),
        partial(register_subscription, identity, "resource", presented),
        partial(create_queue, subscription, offering, "order", presented),
        partial(register_consumer, identity, presented, None),
    ):
        with pytest.raises(BrokerUnavailable):
            call()
    assert list(EventSubscription.objects.all()) == [subscription]
    assert not SubscriptionQueue.objects.exists()
    assert not Consumer.objects.exists()
    assert not Removal.objects.exists()


def test_with_the_broker_away_what_was_registered_before_stays(settings, offering, subscription, presented):
    create_queue(subscription, offering, "order", presented)
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    with pytest.raises(BrokerUnavailable):
        create_queue(subscription, offering, "order", presented)
    assert SubscriptionQueue.objects.get().state == "ready"
    assert not Removal.objects.exists()


def test_without_a_broker_configured_a_new_queue_leaves_no_row(settings, offering, subscription, presented):
    settings.RABBITMQ_MANAGEMENT_URL = ""
    with pytest.raises(BrokerUnavailable, match="RABBITMQ_MANAGEMENT_URL"):
        create_queue(subscription, offering, "order", presented)
    assert not SubscriptionQueue.objects.exists()
    assert not Removal.objects.exists()


def test_a_broker_that_answers_too_late_leaves_no_queue_without_a_row_or_a_removal(
    settings, broker, agents, offering, subscription, presented
):
    with Proxy.before(broker.management_url) as proxy:
        settings.RABBITMQ_MANAGEMENT_URL = proxy.url(broker.management_url)
        settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 0.5
        proxy.delay(3)
        with pytest.raises(BrokerUnavailable):
            create_queue(subscription, offering, "order", presented)
        assert not SubscriptionQueue.objects.exists()
        removal = Removal.objects.get()
        assert (removal.kind, removal.vhost, removal.if_unused) == ("queue", subscription.owner.uuid.hex, True)
        assert removal.due_at > timezone.now() + timedelta(seconds=50)
        assert removal.name in agents.queues(removal.vhost)
        proxy.forward()
        settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 20
        queue, new = create_queue(subscription, offering, "order", presented)
    assert (new, queue.queue_name, queue.state) == (True, removal.name, "ready")
    assert not Removal.objects.exists()


def test_a_user_that_was_made_too_late_goes_with_the_subscription_that_was_not(
    settings, broker, agents, alice, identity, subscription, presented
):
    with Proxy.before(broker.management_url) as proxy:
        settings.RABBITMQ_MANAGEMENT_URL = proxy.url(broker.management_url)
        settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 0.5
        proxy.delay(3)
        for call in (
            partial(create_subscription, alice, presented),
            partial(register_subscription, identity, "resource", presented),
        ):
            with pytest.raises(BrokerUnavailable):
                call()
    assert list(EventSubscription.objects.all()) == [subscription]
    made = agents.users() & set(Removal.objects.filter(kind="user").values_list("name", flat=True))
    assert len(made) == 2
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 20
    make_removals_due()
    assert removals.run_due(50) == 2
    assert not made & agents.users()


def test_a_broker_that_refuses_is_said_so_and_no_row_is_left(
    settings, broker, management, offering, subscription, presented
):
    name = uuid.uuid4().hex
    management.put_user(name, "secret", ["management"])
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url.replace(
        broker.management_url.split("//")[1].split("@")[0], f"{name}:secret"
    )
    with pytest.raises(Refused) as caught:
        create_queue(subscription, offering, "order", presented)
    assert caught.value.status in (401, 403)
    assert not SubscriptionQueue.objects.exists()
    assert not Removal.objects.exists()


# What is on the broker already


def test_an_empty_queue_with_other_arguments_is_replaced(agents, broker, offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all().delete()
    early = Amqp(broker.amqp_url, queue.vhost)
    early.queue(queue.queue_name)
    early.connection.close()
    queue, new = create_queue(subscription, offering, "order", presented)
    assert new
    assert agents.queues(queue.vhost)[queue.queue_name] == REGISTERED_QUEUE_ARGUMENTS


@pytest.mark.parametrize("holds", ["a message", "a consumer"])
def test_a_queue_with_other_arguments_that_is_used_is_refused_in_words_and_stays(
    holds, agents, broker, offering, subscription, presented
):
    longest = max(ObjectType.values, key=len)
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_{longest}"
    early = Amqp(broker.amqp_url, subscription.owner.uuid.hex)
    found = {"x-max-length": 5}
    early.queue(name, 1 if holds == "a message" else 0, arguments=found)
    if holds == "a consumer":
        early.channel.basic_consume(name, lambda *_: None)
    with pytest.raises(Refused) as caught:
        create_queue(subscription, offering, longest, presented)
    assert "x-max-length is 5 and should be 10000" in caught.value.reason
    assert "x-message-ttl is not set and should be 3600000" in caught.value.reason
    assert name in caught.value.reason
    early.connection.close()
    assert not SubscriptionQueue.objects.exists()
    assert not Removal.objects.exists()
    assert agents.queues(subscription.owner.uuid.hex)[name] == found


def test_a_queue_that_is_not_durable_is_refused_in_words(broker, offering, subscription, presented):
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_order"
    early = Amqp(broker.amqp_url, subscription.owner.uuid.hex)
    early.queue(name, 1, durable=False, arguments=dict(REGISTERED_QUEUE_ARGUMENTS))
    with pytest.raises(Refused, match="durable is False and should be True"):
        create_queue(subscription, offering, "order", presented)
    early.connection.close()


def test_a_quorum_queue_is_never_replaced(agents, broker, offering, subscription, presented):
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_order"
    early = Amqp(broker.amqp_url, subscription.owner.uuid.hex)
    early.queue(name, arguments={"x-queue-type": "quorum"})
    early.connection.close()
    with pytest.raises(Refused, match="x-queue-type is 'quorum'"):
        create_queue(subscription, offering, "order", presented)
    assert agents.queues(subscription.owner.uuid.hex)[name] == {"x-queue-type": "quorum"}
    assert not SubscriptionQueue.objects.exists()


def test_a_queue_that_is_there_just_so_keeps_its_messages(broker, offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all()._raw_delete("default")  # as a restored database has it
    before = Amqp(broker.amqp_url, queue.vhost)
    before.publish(queue.queue_name, 2)
    assert create_queue(subscription, offering, "order", presented)[1]
    before.take(queue.queue_name, 2)
    before.connection.close()


def test_a_pending_removal_stays_if_the_queue_has_other_arguments_and_messages(
    management, broker, alice, offering, subscription, presented
):
    vhost = alice.uuid.hex
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_order"
    management.declare_queue(vhost, name, {})
    Amqp(broker.amqp_url, vhost).publish(name, 2)
    soon = timezone.now() + timedelta(minutes=1)
    Removal.objects.create(kind="queue", vhost=vhost, name=name, due_at=soon)
    with pytest.raises(Refused):
        create_queue(subscription, offering, "order", presented)
    assert not SubscriptionQueue.objects.exists()
    assert pending() == {("queue", vhost, name)}


def test_a_vhost_that_is_deleted_by_hand_is_made_again(
    agents, alice, management, identity, offering, subscription, presented, open_amqp
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    management.delete_vhost(queue.vhost)
    assert create_queue(subscription, offering, "order", presented) == (queue, False)
    assert set(agents.queues(queue.vhost)) == {queue.queue_name, "guardian.dlq"}
    management.delete_vhost(queue.vhost)
    resources, new = register_subscription(identity, "resource", presented)
    assert new
    open_amqp(resources.rmq_username, presented.key, queue.vhost)
    assert set(agents.queues(queue.vhost)) == {"guardian.dlq"}


def test_a_dead_letter_queue_with_other_arguments_keeps_nobody_from_registering(
    agents, alice, management, offering, identity, presented, broker, caplog
):
    management.create_vhost(alice.uuid.hex)
    by_hand = Amqp(broker.amqp_url, alice.uuid.hex)
    by_hand.queue("guardian.dlq", 1)
    subscription, _ = register_subscription(identity, "order", presented)
    assert create_queue(subscription, offering, "order", presented)[0].state == "ready"
    assert "The dead-letter queue of the vhost" in caplog.text
    by_hand.take("guardian.dlq", 1)
    by_hand.connection.close()
    create_vhost(alice, management)
    assert agents.queues(alice.uuid.hex)["guardian.dlq"] == DEAD_LETTER_QUEUE_ARGUMENTS


# Several at once, and crashes


def test_ten_at_once_get_one_queue_and_one_of_them_is_told_that_it_is_new(agents, offering, subscription, presented):
    def ask():
        return create_queue(EventSubscription.objects.get(), offering, "order", presented)

    got = in_parallel(*[ask] * 10)
    assert [one for one in got if isinstance(one, Exception)] == []
    assert len({queue.pk for queue, _ in got}) == 1
    assert sum(new for _, new in got) == 1
    assert all(queue.state == "ready" for queue, _ in got)
    assert SubscriptionQueue.objects.get().state == "ready"
    assert len(agents.queues(subscription.owner.uuid.hex)) == 2


def test_ten_at_once_register_the_whole_of_a_new_agent_once(agents, alice, identity, offering, presented, open_amqp):
    def ask():
        subscription, _ = register_subscription(AgentIdentity.objects.get(), "order", presented)
        return create_queue(subscription, offering, "order", presented)

    got = in_parallel(*[ask] * 10)
    assert [one for one in got if isinstance(one, Exception)] == []
    assert sum(new for _, new in got) == 1
    subscription = EventSubscription.objects.get()
    assert (subscription.token, subscription.password_set) == (presented.token, True)
    open_amqp(subscription.rmq_username, presented.key, alice.uuid.hex)
    assert len(agents.queues(alice.uuid.hex)) == 2
    assert agents.users() >= {subscription.rmq_username}


def test_ten_at_once_register_one_consumer(agents, alice, identity, presented, open_amqp):
    got = in_parallel(*[lambda: register_consumer(AgentIdentity.objects.get(), presented, ["order"])] * 10)
    assert [one for one in got if isinstance(one, Exception)] == []
    assert sum(new for _, new in got) == 1
    consumer = Consumer.objects.get()
    assert (consumer.state, consumer.password_set) == ("ready", True)
    open_amqp(consumer.rmq_username, presented.key, alice.uuid.hex)
    assert set(agents.queues(alice.uuid.hex)) == {consumer.queue_name, "guardian.dlq"}


def test_a_login_that_another_request_changes_for_too_long_is_answered_with_away(
    monkeypatch, agents, alice, offering, subscription, presented
):
    monkeypatch.setattr(records, "WAIT_SECONDS", 0.2)
    with locks.lock(subscription.rmq_username), pytest.raises(BrokerUnavailable, match="by another request"):
        create_queue(subscription, offering, "order", agents.token(alice))
    assert not SubscriptionQueue.objects.exists()


@pytest.mark.parametrize("when", [before, after])
def test_what_a_crash_leaves_is_finished_by_the_next_call(when, monkeypatch, agents, offering, subscription, presented):
    with monkeypatch.context() as patched:
        when(patched, "declare_queue", kill)
        with pytest.raises(Killed):
            create_queue(subscription, offering, "order", presented)
    queue = SubscriptionQueue.objects.get()
    assert queue.state == "creating"
    assert (queue.queue_name in agents.queues(queue.vhost)) == (when is after)
    assert create_queue(subscription, offering, "order", presented) == (queue, False)
    assert SubscriptionQueue.objects.get().state == "ready"
    assert queue.queue_name in agents.queues(queue.vhost)


def test_a_login_that_a_crash_left_half_made_is_finished_by_the_next_call(
    monkeypatch, alice, identity, presented, open_amqp
):
    with monkeypatch.context() as patched:
        before(patched, "set_permissions", kill)
        with pytest.raises(Killed):
            register_subscription(identity, "order", presented)
    left = EventSubscription.objects.get()
    assert (left.token, left.next_token, left.password_set) == (None, presented.token, False)
    assert register_subscription(identity, "order", presented) == (left, False)
    open_amqp(left.rmq_username, presented.key, alice.uuid.hex)


def test_a_vhost_that_a_crash_left_without_its_dead_letter_queue_is_finished_by_the_next_call(
    monkeypatch, agents, alice, identity, presented
):
    with monkeypatch.context() as patched:
        before(patched, "declare_queue", kill)
        with pytest.raises(Killed):
            register_subscription(identity, "order", presented)
    assert not AgentVhost.objects.get().ready
    assert agent_vhosts() == {}
    register_subscription(identity, "order", presented)
    assert set(agents.queues(alice.uuid.hex)) == {"guardian.dlq"}
    assert agent_vhosts() == {alice.uuid.hex: alice.pk}


# What is removed meanwhile


def test_a_queue_that_is_removed_while_it_is_registered_is_registered_anew(
    monkeypatch, agents, offering, subscription, presented
):
    gone = []
    after(monkeypatch, "declare_queue", lambda: gone.append(SubscriptionQueue.objects.all().delete()[0]))
    queue, new = create_queue(subscription, offering, "order", presented)
    assert gone == [1]
    assert new
    assert SubscriptionQueue.objects.get() == queue
    assert queue.queue_name in agents.queues(queue.vhost)
    assert not Removal.objects.exists()


def test_a_ready_queue_that_is_removed_before_it_is_asked_for_on_the_broker_is_registered_anew(
    monkeypatch, agents, offering, subscription, presented
):
    create_queue(subscription, offering, "order", presented)
    before(monkeypatch, "declare_queue", lambda: SubscriptionQueue.objects.all().delete())
    queue, new = create_queue(subscription, offering, "order", presented)
    assert new
    assert SubscriptionQueue.objects.get() == queue
    assert not Removal.objects.exists()


@pytest.mark.parametrize("model", [EventSubscription, Offering])
def test_where_what_it_belongs_to_is_removed_the_queue_is_left_to_be_removed(
    model, monkeypatch, agents, offering, subscription, presented
):
    before(monkeypatch, "declare_queue", lambda: model.objects.all().delete())
    with pytest.raises(ObjectDoesNotExist):
        create_queue(subscription, offering, "order", presented)
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}
    make_removals_due()
    removals.run_due(50)
    assert set(agents.queues(subscription.owner.uuid.hex)) == {"guardian.dlq"}


def test_a_subscription_that_is_removed_while_its_user_is_made_leaves_no_user(
    monkeypatch, agents, offering, subscription, presented
):
    newer = agents.token(subscription.owner)
    before(monkeypatch, "put_user", lambda: EventSubscription.objects.all().delete())
    with pytest.raises(ObjectDoesNotExist):
        create_queue(subscription, offering, "order", newer)
    make_removals_due()
    removals.run_due(50)
    assert subscription.rmq_username not in agents.users()
    assert set(agents.queues(subscription.owner.uuid.hex)) == {"guardian.dlq"}
    assert not Removal.objects.exists()


def test_a_consumer_that_is_removed_while_its_user_is_made_is_registered_anew(
    monkeypatch, agents, alice, identity, presented, open_amqp
):
    before(monkeypatch, "put_user", lambda: Consumer.objects.all().delete())
    consumer, new = register_consumer(identity, presented, None)
    assert new
    open_amqp(consumer.rmq_username, presented.key, alice.uuid.hex)
    make_removals_due()
    removals.run_due(50)
    assert set(agents.queues(alice.uuid.hex)) == {consumer.queue_name, "guardian.dlq"}
    assert not Removal.objects.exists()


def test_a_queue_whose_removal_nobody_has_begun_is_registered_in_its_place(settings, offering, subscription, presented):
    create_queue(subscription, offering, "order", presented)
    working, settings.RABBITMQ_MANAGEMENT_URL = settings.RABBITMQ_MANAGEMENT_URL, AWAY
    SubscriptionQueue.objects.all().delete()
    assert len(pending()) == 1
    settings.RABBITMQ_MANAGEMENT_URL = working
    assert create_queue(subscription, offering, "order", presented)[1]
    assert not Removal.objects.exists()


def test_a_queue_that_is_just_being_removed_is_to_be_asked_for_again(offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all()._raw_delete("default")
    soon = timezone.now() + timedelta(minutes=1)
    removal = Removal.objects.create(
        kind="queue", vhost=queue.vhost, name=queue.queue_name, claim=uuid.uuid4(), due_at=soon
    )
    with pytest.raises(BrokerUnavailable, match="being removed"):
        create_queue(subscription, offering, "order", presented)
    assert not SubscriptionQueue.objects.exists()
    assert list(Removal.objects.all()) == [removal]
    make_removals_due()  # by then its worker must have died
    assert create_queue(subscription, offering, "order", presented)[1]
    assert not Removal.objects.exists()


def test_a_queue_whose_row_is_removed_and_whose_removal_is_under_way_is_busy(
    monkeypatch, offering, subscription, presented
):
    monkeypatch.setattr(removals, "run_due", lambda *args: 0)

    def remove():
        SubscriptionQueue.objects.all().delete()
        # A worker has read the rows, and has not asked the broker yet.
        Removal.objects.update(claim=uuid.uuid4(), due_at=timezone.now() + timedelta(minutes=1))

    after(monkeypatch, "declare_queue", remove)
    with pytest.raises(Busy, match="being removed"):
        create_queue(subscription, offering, "order", presented)
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}


def test_a_token_that_is_revoked_before_it_is_set_is_refused_and_no_queue_is_left_behind(
    monkeypatch, agents, alice, offering, subscription, presented
):
    newer = agents.token(alice)
    after(monkeypatch, "declare_queue", lambda: AuthToken.objects.filter(pk=newer.token.pk).delete())
    with pytest.raises(PermissionDenied, match="revoked"):
        create_queue(subscription, offering, "order", newer)
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}
    assert EventSubscription.objects.get().token == presented.token


def test_a_token_that_is_revoked_while_it_is_set_does_not_stay_the_password(
    monkeypatch, agents, alice, offering, subscription, presented, open_amqp
):
    newer = agents.token(alice)
    before(monkeypatch, "put_user", lambda: AuthToken.objects.filter(pk=newer.token.pk).delete())
    with pytest.raises(PermissionDenied, match="revoked"):
        create_queue(subscription, offering, "order", newer)
    left = EventSubscription.objects.get()
    assert (left.token, left.next_token, left.password_set) == (presented.token, None, False)
    make_removals_due()
    removals.run_due(50)
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        open_amqp(subscription.rmq_username, newer.key, alice.uuid.hex)


def test_a_registration_waits_for_a_revocation_before_it_locks_the_login(subscription, presented):
    login = EventSubscription.objects.get()
    EventSubscription.objects.update(token=None, next_token=presented.token)
    with transaction.atomic():
        AuthToken.objects.select_for_update().get(pk=presented.token.pk)  # a revocation does this first
        confirming = in_background(
            credentials._record_token, EventSubscription.objects.filter(pk=login.pk), presented.token
        )
        wait_until_blocked(confirming)
        EventSubscription.objects.select_for_update(nowait=True).get(pk=login.pk)  # and then this
    assert confirming.result(timeout=10)


def only_hex(users):
    """Return those of the broker's accounts that are logins of agents."""
    return {name for name in users if len(name) == 32}


def first_subscription(identity, presented):
    register_subscription(identity, "order", presented)


def first_consumer(identity, presented):
    register_consumer(identity, presented, None)


def subscription_of_its_own(identity, presented):
    create_subscription(identity.owner, presented)


FIRST = [first_subscription, first_consumer, subscription_of_its_own]


@pytest.mark.parametrize("register", FIRST)
def test_no_user_stays_whose_token_is_revoked_during_its_first_registration(
    register, monkeypatch, agents, identity, presented
):
    before_it = only_hex(agents.users())
    after(monkeypatch, "set_permissions", lambda: AuthToken.objects.filter(pk=presented.token.pk).delete())
    with pytest.raises(PermissionDenied, match="revoked"):
        register(identity, presented)
    assert not EventSubscription.objects.exists()
    assert not Consumer.objects.exists()
    make_removals_due()
    removals.run_due(50)
    assert only_hex(agents.users()) == before_it
    assert not Removal.objects.exists()


@pytest.mark.parametrize("register", FIRST)
@pytest.mark.parametrize(
    "error",
    [
        Refused("no", status=400, reason="no"),
        BrokerUnavailable("can't connect", never_reached=True),
        BrokerUnavailable("timed out", timed_out=True),
    ],
    ids=["refused", "gone", "late"],
)
def test_no_user_stays_whose_permissions_could_not_be_set(
    error, register, monkeypatch, agents, alice, identity, presented
):
    before_it = only_hex(agents.users())

    def fail(*_):
        raise error

    monkeypatch.setattr(Management, "set_permissions", fail)
    with pytest.raises(type(error)):
        register(identity, presented)
    assert not EventSubscription.objects.exists()
    assert not Consumer.objects.exists()
    assert only_hex(agents.users()) != before_it
    make_removals_due()
    removals.run_due(50)
    assert only_hex(agents.users()) == before_it
    assert set(agents.queues(alice.uuid.hex)) == {"guardian.dlq"}


@pytest.fixture
def away_at_the_login(monkeypatch):
    """The broker can't be reached any more when a user is to be created."""

    def fail(*_):
        raise BrokerUnavailable("can't connect", never_reached=True)

    monkeypatch.setattr(Management, "put_user", fail)


def test_a_new_login_whose_user_was_never_asked_for_leaves_nothing_to_be_removed(
    alice, subscription, identity, presented, away_at_the_login
):
    with pytest.raises(BrokerUnavailable):
        create_subscription(alice, presented)
    assert EventSubscription.objects.get() == subscription
    assert not Removal.objects.exists()
    with pytest.raises(BrokerUnavailable):
        register_consumer(identity, presented, None)
    assert {kind for kind, _, _ in pending()} == {"queue", "user"}  # the queue was made


@pytest.mark.parametrize("was_there", [True, False])
def test_a_registration_that_fails_at_the_login_removes_the_queue_if_it_was_not_there_before(
    was_there, agents, management, alice, offering, subscription, away_at_the_login
):
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_order"
    if was_there:
        management.declare_queue(alice.uuid.hex, name, REGISTERED_QUEUE_ARGUMENTS)
    with pytest.raises(BrokerUnavailable):
        create_queue(subscription, offering, "order", agents.token(alice))
    assert not SubscriptionQueue.objects.exists()
    assert pending() == (set() if was_there else {("queue", alice.uuid.hex, name)})


# What belongs to a vhost that is lost


def let_in(open_amqp, login, presented, vhost):
    open_amqp(login.rmq_username, presented.key, vhost).close()


@pytest.mark.parametrize("how", ["an agent", "the sweep", "a new agent", "a new queue"])
def test_agents_can_log_in_again_after_their_vhost_was_lost(
    how, agents, alice, identity, offering, subscription, presented, management, open_amqp
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    consumer, _ = register_consumer(identity, presented, None)
    management.delete_vhost(queue.vhost)
    if how == "the sweep":
        redeclare(SubscriptionQueue.objects.get(), management)
        redeclare(Consumer.objects.get(), management)
    elif how == "a new agent":
        AgentVhost.objects.update(ready=False)
        register_subscription(agents.identity(alice, offering), "order", presented)
    elif how == "a new queue":
        create_queue(EventSubscription.objects.get(), offering, "resource", presented)
        let_in(open_amqp, subscription, presented, queue.vhost)
    left, _ = register_subscription(identity, "order", presented)
    create_queue(left, offering, "order", presented)
    register_consumer(identity, presented, None)
    for login in (left, consumer):
        let_in(open_amqp, login, presented, queue.vhost)
        login.refresh_from_db()
        assert login.password_set


def test_an_agent_whose_login_was_read_before_the_vhost_was_lost_is_let_in(
    agents, identity, offering, subscription, presented, management, open_amqp
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    read_early = EventSubscription.objects.get()
    management.delete_vhost(queue.vhost)
    register_consumer(identity, presented, None)  # makes the vhost again
    create_queue(read_early, offering, "order", presented)
    let_in(open_amqp, subscription, presented, queue.vhost)


def test_a_crash_right_after_a_lost_vhost_was_made_again_keeps_no_agent_out(
    monkeypatch, alice, offering, subscription, presented, open_amqp, management
):
    create_queue(subscription, offering, "order", presented)
    management.delete_vhost(alice.uuid.hex)
    with monkeypatch.context() as patched:
        after(patched, "create_vhost", kill)
        with pytest.raises(Killed):
            create_queue(subscription, offering, "order", presented)
    create_queue(EventSubscription.objects.get(), offering, "order", presented)
    let_in(open_amqp, subscription, presented, alice.uuid.hex)


def test_only_the_logins_of_the_owner_of_a_lost_vhost_are_let_in_anew(
    agents, alice, subscription, presented, identity, management, asked
):
    bob = agents.owner("bob")
    bobs, _ = register_consumer(agents.identity(bob), agents.token(bob), None)
    alices, _ = register_consumer(identity, presented, None)
    create_vhost(alice, management)
    for login in (bobs, alices, subscription):
        login.refresh_from_db()
    assert (bobs.password_set, alices.password_set, subscription.password_set) == (True, False, False)


# An owner or an offering that goes meanwhile


def test_the_vhost_of_an_owner_who_is_gone_is_not_made(agents, alice, management):
    stale = Owner.objects.get(pk=alice.pk)
    alice.delete()
    with pytest.raises(ObjectDoesNotExist):
        create_vhost(stale, management)
    assert stale.uuid.hex not in agents.vhosts()


def test_nothing_is_registered_for_an_owner_who_is_gone(agents, alice, identity, offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    stale = Owner.objects.get(pk=alice.pk)
    Owner.objects.filter(pk=alice.pk).delete()
    for call in (
        partial(create_identity, stale, offering, "another"),
        partial(create_subscription, stale, presented),
        partial(register_subscription, identity, "resource", presented),
        partial(create_queue, subscription, offering, "resource", presented),
        partial(register_consumer, identity, presented, None),
        partial(redeclare, queue, broker.management()),
    ):
        with pytest.raises(ObjectDoesNotExist):
            call()
    make_removals_due()
    removals.run_due(50)
    assert stale.uuid.hex not in agents.vhosts()
    assert not only_hex(agents.users())


def test_an_owner_who_goes_while_the_vhost_of_a_subscription_is_made_leaves_nothing(
    monkeypatch, agents, alice, identity, presented
):
    before(monkeypatch, "held", lambda *_, **__: Owner.objects.filter(pk=alice.pk).delete(), locks)
    with pytest.raises(ObjectDoesNotExist):
        register_subscription(identity, "order", presented)
    assert not EventSubscription.objects.exists()
    assert alice.uuid.hex not in agents.vhosts()


@pytest.mark.parametrize(
    ("gone", "method", "status"), [("owner", "post", 404), ("offering", "post", 400), ("offering", "put", 404)]
)
def test_the_api_tells_an_identity_whose_owner_or_offering_goes_from_one_whose_name_is_taken(
    gone, method, status, monkeypatch, alice, offering, identity
):
    program = Program(alice)
    program.client.raise_request_exception = False
    model = Owner if gone == "owner" else Offering
    place = "create_identity" if method == "post" else "update_identity"
    before(monkeypatch, place, lambda *_: model.objects.all().delete(), identities)
    path = "agent-identities/" + ("" if method == "post" else f"{identity.uuid.hex}/")
    answer = getattr(program, method)(path, {"name": "another", "offering": offering.uuid.hex})
    assert answer.status_code == status
    if status == 400:
        assert list(answer.json()) == ["offering"]


# What gets in each other's way


def test_what_is_held_by_another_request_is_busy_and_not_away(monkeypatch, alice, identity, presented, subscription):
    monkeypatch.setattr(records, "WAIT_SECONDS", 0.1)
    AgentVhost.objects.update(ready=False)
    with locks.lock(f"vhost {alice.uuid.hex}"), pytest.raises(Busy, match="another request"):
        create_subscription(alice, presented)
    AgentVhost.objects.update(ready=True)
    EventSubscription.objects.update(password_set=False)
    with locks.lock(subscription.rmq_username), pytest.raises(Busy, match="another request"):
        register_subscription(identity, "order", presented)
    assert issubclass(Busy, BrokerUnavailable)


def test_a_vhost_that_the_broker_keeps_losing_is_busy(monkeypatch, offering, subscription, presented, management):
    management.delete_vhost(subscription.owner.uuid.hex)
    monkeypatch.setattr(Management, "create_vhost", lambda *_: True)
    with pytest.raises(Busy, match="node is down"):
        create_queue(subscription, offering, "order", presented)


def test_a_queue_that_is_just_being_removed_is_not_registered_by_who_finds_the_others_row(
    monkeypatch, offering, subscription, presented
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all()._raw_delete("default")
    got = []

    def come_second(*_):
        # Its removal has looked before there was a row, and is still at it.
        Removal.objects.create(
            kind="queue",
            vhost=queue.vhost,
            name=queue.queue_name,
            claim=uuid.uuid4(),
            due_at=timezone.now() + timedelta(minutes=1),
        )
        with pytest.raises(Busy) as caught:
            create_queue(subscription, offering, "order", presented)
        got.append(str(caught.value))

    before(monkeypatch, "cancel_removal", come_second, registration)
    with pytest.raises(Busy, match="being removed"):
        create_queue(subscription, offering, "order", presented)
    assert len(got) == 1
    assert not SubscriptionQueue.objects.exists()


def test_a_row_that_another_request_has_made_ready_is_not_taken_back(monkeypatch, offering, subscription, presented):
    create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all()._raw_delete("default")
    real = registration.cancel_removal

    def come_second(*what):
        monkeypatch.setattr(registration, "cancel_removal", real)
        assert create_queue(subscription, offering, "order", presented)[1] is False
        raise Busy("it was just being removed")

    monkeypatch.setattr(registration, "cancel_removal", come_second)
    with pytest.raises(Busy):
        create_queue(subscription, offering, "order", presented)
    assert SubscriptionQueue.objects.get().state == "ready"


class Deadlock(Exception):
    pgcode = deletions.DEADLOCK


@pytest.mark.parametrize(("times", "left"), [(2, 1), (3, 0)])
def test_an_insert_that_the_database_gives_up_for_another_is_tried_three_times(times, left, alice, offering):
    failed = []

    def fail(execute, sql, params, many, context):
        if sql.startswith('INSERT INTO "agents_agentidentity"') and len(failed) < times:
            failed.append(sql)
            raise OperationalError("deadlock detected") from Deadlock()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail):
        if left:
            create_identity(alice, offering, "agent")
        else:
            with pytest.raises(Busy):
                create_identity(alice, offering, "agent")
    assert len(failed) == times
    assert AgentIdentity.objects.count() == left


# Identities


def test_the_configuration_of_an_agent_is_sealed_and_can_be_read(settings, alice, offering):
    identity = create_identity(alice, offering, "agent", config_file_content="password: secret", version="1.0.7")
    assert identity.version == "1.0.7"
    assert "secret" not in AgentIdentity.objects.get().sealed_config
    assert read_config(AgentIdentity.objects.get()) == "password: secret"
    settings.SECRET_KEY = "another"
    assert read_config(identity) == ""
    settings.SECRET_KEY_FALLBACKS = ["for-the-tests-alone"]
    assert read_config(identity) == "password: secret"


def test_what_is_not_told_of_an_identity_stays(alice, offering):
    packages = [{"package": "waldur-site-agent", "version": "1.0.7"}]
    identity = create_identity(alice, offering, "agent", config_file_content="a: b", dependencies=packages)
    modified = identity.modified
    update_identity(identity, version="2", config_file_path="/etc/agent.yaml")
    found = AgentIdentity.objects.get()
    assert (found.version, found.config_file_path, found.dependencies) == ("2", "/etc/agent.yaml", packages)
    assert read_config(found) == "a: b"
    assert found.modified > modified
    update_identity(identity, config_file_content="", name="renamed")
    found = AgentIdentity.objects.get()
    assert (found.name, found.sealed_config) == ("renamed", "")


def test_a_name_is_taken_once_for_an_offering(agents, alice, offering, identity):
    with pytest.raises(IdentityExists, match="another name"):
        create_identity(alice, offering, identity.name)
    other = create_identity(alice, offering, "other")
    with pytest.raises(IdentityExists):
        update_identity(other, name=identity.name)
    assert AgentIdentity.objects.get(pk=other.pk).name == "other"
    create_identity(alice, agents.offering(alice), identity.name)


def test_an_identity_whose_offering_is_removed_meanwhile_is_not_made(alice, offering):
    Offering.objects.all().delete()
    with pytest.raises(NoSuchOffering):
        create_identity(alice, offering, "agent")


def test_an_identity_that_is_removed_meanwhile_is_not_changed(identity):
    AgentIdentity.objects.all().delete()
    with pytest.raises(ObjectDoesNotExist):
        update_identity(identity, version="2")


# What the others ask


def test_what_is_registered_is_told_with_its_owner_in_three_statements(
    agents, alice, offering, identity, subscription, presented, django_assert_num_queries
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    consumer, _ = register_consumer(identity, presented, None)
    bob = agents.owner("bob")
    bobs, _ = register_consumer(agents.identity(bob), agents.token(bob), None)
    with django_assert_num_queries(3):
        found = registered_queues()
    assert found == {
        (alice.uuid.hex, queue.queue_name): alice.pk,
        (alice.uuid.hex, consumer.queue_name): alice.pk,
        (alice.uuid.hex, "guardian.dlq"): alice.pk,
        (bob.uuid.hex, bobs.queue_name): bob.pk,
        (bob.uuid.hex, "guardian.dlq"): bob.pk,
    }
    with django_assert_num_queries(1):
        assert agent_vhosts() == {alice.uuid.hex: alice.pk, bob.uuid.hex: bob.pk}


def test_what_vanished_is_being_made_again_in_two_statements(
    offering, identity, subscription, presented, django_assert_num_queries
):
    orders, _ = create_queue(subscription, offering, "order", presented)
    resources, _ = create_queue(subscription, offering, "resource", presented)
    consumer, _ = register_consumer(identity, presented, None)
    with django_assert_num_queries(2):
        mark_vanished(
            {
                (orders.vhost, orders.queue_name),
                (consumer.vhost, consumer.queue_name),
                ("elsewhere", resources.queue_name),
                (orders.vhost, "guardian.dlq"),
            }
        )
    states = {row.queue_name: row.state for row in (*SubscriptionQueue.objects.all(), Consumer.objects.get())}
    assert states == {
        orders.queue_name: "creating",
        resources.queue_name: "ready",
        consumer.queue_name: "creating",
    }
    with django_assert_num_queries(2):
        mark_returned([(orders.vhost, orders.queue_name), ("elsewhere", consumer.queue_name)])
    assert SubscriptionQueue.objects.get(pk=orders.pk).state == "ready"
    assert Consumer.objects.get().state == "creating"
    with django_assert_num_queries(0):
        mark_vanished([])


@pytest.mark.parametrize("lost", ["queue", "vhost"])
def test_a_queue_that_the_broker_has_lost_is_made_again(
    lost, agents, management, offering, identity, subscription, presented
):
    for row in (
        create_queue(subscription, offering, "order", presented)[0],
        register_consumer(identity, presented, None)[0],
    ):
        if lost == "vhost":
            management.delete_vhost(row.vhost)
        else:
            management.delete_queue(row.vhost, row.queue_name)
        mark_vanished([(row.vhost, row.queue_name)])
        left = type(row).objects.get()
        redeclare(left, management)
        assert left.state == "ready"
        assert type(row).objects.get().state == "ready"
        assert {row.queue_name, "guardian.dlq"} <= set(agents.queues(row.vhost))


def test_a_queue_that_is_removed_while_it_is_made_again_does_not_stay(
    monkeypatch, agents, management, offering, subscription, presented
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    management.delete_queue(queue.vhost, queue.queue_name)
    before(monkeypatch, "declare_queue", lambda: SubscriptionQueue.objects.all().delete())
    redeclare(queue, management)
    assert queue.queue_name in agents.queues(queue.vhost)
    make_removals_due()
    removals.run_due(50)
    assert queue.queue_name not in agents.queues(queue.vhost)


def test_a_queue_is_not_made_again_where_the_broker_is_away(offering, subscription, presented, management):
    queue, _ = create_queue(subscription, offering, "order", presented)
    mark_vanished([(queue.vhost, queue.queue_name)])
    away = Management(AWAY)
    with pytest.raises(BrokerUnavailable):
        redeclare(SubscriptionQueue.objects.get(), away)
    away.close()
    assert SubscriptionQueue.objects.get().state == "creating"


def test_the_vhost_of_an_owner_who_is_removed_meanwhile_is_left_to_be_removed(
    monkeypatch, agents, alice, identity, presented, management
):
    before(monkeypatch, "create_vhost", lambda: Owner.objects.filter(pk=alice.pk).delete())
    with pytest.raises(ObjectDoesNotExist):
        register_subscription(identity, "order", presented)
    make_removals_due()
    removals.run_due(50)
    assert alice.uuid.hex not in agents.vhosts()
    with pytest.raises(NotOnBroker):
        management.delete_vhost(alice.uuid.hex)
