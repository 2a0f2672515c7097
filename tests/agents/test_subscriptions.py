"""Registration on a real broker: what an agent gets, what it may do, and what a failure leaves."""

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
from django.utils import timezone

from accounts.access.vouching import NotVouched
from accounts.models import AuthToken, Owner
from agents.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    ObjectType,
    Offering,
    SubscriptionQueue,
)
from agents.registration import credentials, identities, queues, records
from agents.registration.identities import NoSuchObjectType, check_object_type, create_identity, read_config
from agents.registration.queues import (
    create_queue,
    create_subscription,
    redeclare,
    register_consumer,
    register_subscription,
)
from agents.registration.records import Busy
from agents.registration.vhosts import create_vhost
from agents.removal import deletions
from agents.sweeps.registered import agent_vhosts, mark_vanished, registered_queues
from core import broker, locks, removals
from core.models import Removal
from rabbit.arguments import DEAD_LETTER_QUEUE_ARGUMENTS, REGISTERED_QUEUE_ARGUMENTS
from rabbit.errors import BrokerUnavailable, NotOnBroker, Refused
from rabbit.http import PooledClient
from rabbit.management import Management
from rabbit.permissions import Permissions
from tests.conftest import Amqp
from tests.support.agents import make_removals_due
from tests.support.api import Program
from tests.support.proxy import Proxy
from tests.support.toolbox import AWAY, AWAY_AMQP, Killed, in_background, in_parallel, wait_until_blocked

pytestmark = pytest.mark.usefixtures("agents")


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
    """Return a function that connects to the broker like an agent."""
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
def requests(monkeypatch):
    """Collect the HTTP requests of all threads to the broker, like "PUT queues"."""
    collected = []
    real = PooledClient.send

    def count(self, method, target, *arguments, **options):
        collected.append(f"{method} {target.split('/')[2].split('?')[0]}")
        return real(self, method, target, *arguments, **options)

    monkeypatch.setattr(PooledClient, "send", count)
    return collected


def call_before(monkeypatch, name, act, place=Management):
    """Call ``act`` before the first call of a method."""
    real, done = getattr(place, name), []

    def called(*arguments, **options):
        if not done:
            done.append(True)
            act()
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, called)


def call_after(monkeypatch, name, act, place=Management):
    """Call ``act`` after the first call of a method."""
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
def closed_with(code):
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        yield
    assert caught.value.reply_code == code


def pending():
    return set(Removal.objects.values_list("kind", "vhost", "name"))


# Registration


def test_a_new_queue_is_declared_with_vhost_and_dead_letter_queue(agents, alice, offering, subscription, presented):
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


def test_registered_and_dead_letter_queues_are_quorum_queues_if_the_setting_says_so(
    agents, alice, offering, presented, settings
):
    settings.GUARDIAN_REGISTERED_QUEUE_TYPE = "quorum"
    subscription = create_subscription(alice, presented)
    queue, _ = create_queue(subscription, offering, "order", presented)
    quorum = {"x-queue-type": "quorum"}
    assert agents.queues(queue.vhost) == {
        queue.queue_name: REGISTERED_QUEUE_ARGUMENTS | quorum | {"x-overflow": "reject-publish"},
        "guardian.dlq": DEAD_LETTER_QUEUE_ARGUMENTS | quorum,
    }
    assert create_queue(subscription, offering, "order", presented) == (queue, False)


def test_an_empty_registered_queue_is_replaced_after_the_setting_of_its_type_changes(
    agents, offering, subscription, presented, settings
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    settings.GUARDIAN_REGISTERED_QUEUE_TYPE = "quorum"
    assert create_queue(subscription, offering, "order", presented) == (queue, False)
    assert agents.queues(queue.vhost)[queue.queue_name]["x-queue-type"] == "quorum"


def test_an_identity_has_one_subscription_per_type(identity, presented):
    orders, new = register_subscription(identity, "order", presented, description="Orders", source_ip="192.0.2.7")
    assert (new, orders.description, orders.source_ip) == (True, "Orders", "192.0.2.7")
    assert register_subscription(identity, "order", presented) == (orders, False)
    resources, new = register_subscription(identity, "resource", presented)
    assert new
    assert resources != orders


def test_each_subscription_without_an_identity_is_new(agents, alice, presented):
    objects = [{"object_type": "order"}]
    one = create_subscription(alice, presented, observable_objects=objects, description="Orders")
    two = create_subscription(alice, presented)
    assert one.uuid != two.uuid
    assert (one.observable_objects, one.password_set, one.token) == (objects, True, presented.token)
    assert {one.rmq_username, two.rmq_username} <= agents.users()


def test_a_consumer_has_its_own_queue_and_user(agents, identity, presented, management):
    consumer, new = register_consumer(identity, presented, None)
    assert (new, consumer.object_types, consumer.state) == (True, [], "ready")
    assert consumer.queue_name == f"consumer_{consumer.uuid.hex}"
    assert agents.queues(consumer.vhost)[consumer.queue_name] == REGISTERED_QUEUE_ARGUMENTS
    reads = Permissions("^$", "^$", f"^consumer_{consumer.uuid.hex}$")
    assert management.permissions_of(consumer.rmq_username) == {consumer.vhost: reads}


def test_omitted_consumer_types_are_kept_and_an_empty_list_means_all(identity, presented):
    results = [
        register_consumer(identity, presented, types)[0].object_types for types in (["order", "order"], None, [])
    ]
    assert results == [["order"], ["order"], []]
    assert Consumer.objects.get().object_types == []


@pytest.mark.parametrize("kind", ["subscription", "consumer"])
def test_the_token_only_reads_its_queue_over_amqp(
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
        with closed_with(403):
            agent.channel().basic_get(stranger)
    with closed_with(403):
        agent.channel().queue_declare("its-own")
    with closed_with(403):
        agent.channel().queue_declare(f"{queue.queue_name}_more", durable=True)
    with closed_with(403):
        agent.channel().queue_delete(queue.queue_name)
    with closed_with(403):
        agent.channel().queue_bind(queue.queue_name, "amq.topic", "#")
    with closed_with(403):
        channel = agent.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue.queue_name, b"{}")


def test_the_token_presented_last_is_the_password(agents, alice, offering, subscription, presented, open_amqp):
    create_queue(subscription, offering, "order", presented)
    newer = agents.token(alice)
    assert create_queue(subscription, offering, "order", newer)[1] is False
    assert EventSubscription.objects.get().token == newer.token
    open_amqp(subscription.rmq_username, newer.key, alice.uuid.hex)
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        open_amqp(subscription.rmq_username, presented.key, alice.uuid.hex)


def test_a_token_is_in_no_error_and_no_log(offering, subscription, presented, caplog, settings):
    caplog.set_level(logging.DEBUG)
    create_queue(subscription, offering, "order", presented)
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    with pytest.raises(BrokerUnavailable) as caught:
        create_queue(subscription, offering, "order", presented)
    assert presented.key not in f"{presented} {presented!r} {caught.value} {caplog.text}"
    assert (SubscriptionQueue.objects.get().state, Removal.objects.exists()) == ("ready", False)


# Cost


def test_registrations_take_one_request_per_created_object(offering, identity, presented, requests):
    subscription, _ = register_subscription(identity, "order", presented)
    queue, _ = create_queue(subscription, offering, "order", presented)
    assert Counter(requests) == {"PUT vhosts": 1, "PUT queues": 2, "PUT users": 1, "PUT permissions": 1}
    register_consumer(identity, presented, ["order"])
    requests.clear()
    assert create_queue(subscription, offering, "order", presented) == (queue, False)
    assert not register_consumer(identity, presented, ["order"])[1]
    assert not register_subscription(identity, "order", presented)[1]
    assert requests == ["PUT queues"] * 2


# Refusals and outages


def test_an_unknown_object_type_is_refused_before_anything_is_created(identity, subscription, offering, presented):
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


def test_an_unvouched_owner_keeps_registrations_and_gets_no_new_ones(
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


@pytest.mark.parametrize("url", [AWAY, ""], ids=["away", "not configured"])
def test_without_the_broker_nothing_is_registered(url, settings, alice, identity, offering, subscription, presented):
    settings.RABBITMQ_MANAGEMENT_URL = url
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


def test_a_timeout_leaves_a_removal_of_the_queue(settings, broker, agents, offering, subscription, presented):
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


def test_a_timeout_leaves_a_removal_of_the_user(settings, broker, agents, alice, identity, subscription, presented):
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


# Existing queues and vhosts


def test_an_empty_queue_with_other_arguments_is_redeclared(agents, broker, offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all().delete()
    early = Amqp(broker.amqp_url, queue.vhost)
    early.queue(queue.queue_name)
    early.connection.close()
    queue, new = create_queue(subscription, offering, "order", presented)
    assert new
    assert agents.queues(queue.vhost)[queue.queue_name] == REGISTERED_QUEUE_ARGUMENTS


@pytest.mark.parametrize("holds", ["a message", "a consumer"])
def test_a_used_queue_with_other_arguments_is_refused_with_the_differences(
    holds, agents, broker, offering, subscription, presented
):
    longest = max(ObjectType.values, key=len)
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_{longest}"
    early = Amqp(broker.amqp_url, subscription.owner.uuid.hex)
    found = {"x-queue-type": "classic", "x-max-length": 5}  # as RabbitMQ 4 lists it
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


def test_an_equal_queue_keeps_its_messages(broker, offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all()._raw_delete("default")  # like a restored database
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


def test_a_manually_deleted_vhost_is_recreated(
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


def test_a_wrong_dead_letter_queue_does_not_prevent_registration(
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


# Concurrency and crashes


def test_ten_concurrent_registrations_of_an_agent_create_one(agents, alice, identity, offering, presented, open_amqp):
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


def test_ten_concurrent_registrations_create_one_consumer(agents, alice, identity, presented, open_amqp):
    got = in_parallel(*[lambda: register_consumer(AgentIdentity.objects.get(), presented, ["order"])] * 10)
    assert [one for one in got if isinstance(one, Exception)] == []
    assert sum(new for _, new in got) == 1
    consumer = Consumer.objects.get()
    assert (consumer.state, consumer.password_set) == ("ready", True)
    open_amqp(consumer.rmq_username, presented.key, alice.uuid.hex)
    assert set(agents.queues(alice.uuid.hex)) == {consumer.queue_name, "guardian.dlq"}


@pytest.mark.parametrize("when", [call_before, call_after])
def test_a_killed_registration_is_finished_by_the_next_call(
    when, monkeypatch, agents, offering, subscription, presented
):
    with monkeypatch.context() as patched:
        when(patched, "declare_queue", kill)
        with pytest.raises(Killed):
            create_queue(subscription, offering, "order", presented)
    queue = SubscriptionQueue.objects.get()
    assert queue.state == "creating"
    assert (queue.queue_name in agents.queues(queue.vhost)) == (when is call_after)
    assert create_queue(subscription, offering, "order", presented) == (queue, False)
    assert SubscriptionQueue.objects.get().state == "ready"
    assert queue.queue_name in agents.queues(queue.vhost)


def test_a_login_interrupted_by_a_kill_is_finished_by_the_next_call(monkeypatch, alice, identity, presented, open_amqp):
    with monkeypatch.context() as patched:
        call_before(patched, "set_permissions", kill)
        with pytest.raises(Killed):
            register_subscription(identity, "order", presented)
    left = EventSubscription.objects.get()
    assert (left.token, left.next_token, left.password_set) == (None, presented.token, False)
    assert register_subscription(identity, "order", presented) == (left, False)
    open_amqp(left.rmq_username, presented.key, alice.uuid.hex)


def test_a_vhost_interrupted_by_a_kill_is_finished_by_the_next_call(monkeypatch, agents, alice, identity, presented):
    with monkeypatch.context() as patched:
        call_before(patched, "declare_queue", kill)
        with pytest.raises(Killed):
            register_subscription(identity, "order", presented)
    assert not AgentVhost.objects.get().ready
    assert agent_vhosts() == {}
    register_subscription(identity, "order", presented)
    assert set(agents.queues(alice.uuid.hex)) == {"guardian.dlq"}
    assert agent_vhosts() == {alice.uuid.hex: alice.pk}


# Concurrent removals


def test_a_queue_deleted_during_its_registration_is_registered_again(
    monkeypatch, agents, offering, subscription, presented
):
    gone = []
    call_after(monkeypatch, "declare_queue", lambda: gone.append(SubscriptionQueue.objects.all().delete()[0]))
    queue, new = create_queue(subscription, offering, "order", presented)
    assert gone == [1]
    assert new
    assert SubscriptionQueue.objects.get() == queue
    assert queue.queue_name in agents.queues(queue.vhost)
    assert not Removal.objects.exists()


def test_a_ready_queue_deleted_before_its_declaration_is_registered_again(
    monkeypatch, agents, offering, subscription, presented
):
    create_queue(subscription, offering, "order", presented)
    call_before(monkeypatch, "declare_queue", lambda: SubscriptionQueue.objects.all().delete())
    queue, new = create_queue(subscription, offering, "order", presented)
    assert new
    assert SubscriptionQueue.objects.get() == queue
    assert not Removal.objects.exists()


@pytest.mark.parametrize("model", [EventSubscription, Offering])
def test_a_queue_whose_parent_is_deleted_is_removed_later(
    model, monkeypatch, agents, offering, subscription, presented
):
    call_before(monkeypatch, "declare_queue", lambda: model.objects.all().delete())
    with pytest.raises(ObjectDoesNotExist):
        create_queue(subscription, offering, "order", presented)
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}
    make_removals_due()
    removals.run_due(50)
    assert set(agents.queues(subscription.owner.uuid.hex)) == {"guardian.dlq"}


def test_a_subscription_deleted_during_its_registration_leaves_no_user(
    monkeypatch, agents, offering, subscription, presented
):
    newer = agents.token(subscription.owner)
    call_before(monkeypatch, "put_user", lambda: EventSubscription.objects.all().delete())
    with pytest.raises(ObjectDoesNotExist):
        create_queue(subscription, offering, "order", newer)
    make_removals_due()
    removals.run_due(50)
    assert subscription.rmq_username not in agents.users()
    assert set(agents.queues(subscription.owner.uuid.hex)) == {"guardian.dlq"}
    assert not Removal.objects.exists()


def test_a_consumer_deleted_during_its_registration_is_registered_again(
    monkeypatch, agents, alice, identity, presented, open_amqp
):
    call_before(monkeypatch, "put_user", lambda: Consumer.objects.all().delete())
    consumer, new = register_consumer(identity, presented, None)
    assert new
    open_amqp(consumer.rmq_username, presented.key, alice.uuid.hex)
    make_removals_due()
    removals.run_due(50)
    assert set(agents.queues(alice.uuid.hex)) == {consumer.queue_name, "guardian.dlq"}
    assert not Removal.objects.exists()


def test_a_registration_cancels_a_pending_removal(settings, offering, subscription, presented):
    create_queue(subscription, offering, "order", presented)
    working, settings.RABBIT_URL = settings.RABBIT_URL, AWAY_AMQP
    SubscriptionQueue.objects.all().delete()
    assert len(pending()) == 1
    settings.RABBIT_URL = working
    assert create_queue(subscription, offering, "order", presented)[1]
    assert not Removal.objects.exists()


def test_a_queue_being_removed_cannot_be_registered(offering, subscription, presented):
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
    make_removals_due()  # by then the claim has expired
    assert create_queue(subscription, offering, "order", presented)[1]
    assert not Removal.objects.exists()


def test_a_queue_deleted_and_being_removed_is_busy(monkeypatch, offering, subscription, presented):
    monkeypatch.setattr(removals, "run_due", lambda **_: 0)

    def remove():
        SubscriptionQueue.objects.all().delete()
        # A worker has claimed the removal and has not sent the request yet.
        Removal.objects.update(claim=uuid.uuid4(), due_at=timezone.now() + timedelta(minutes=1))

    call_after(monkeypatch, "declare_queue", remove)
    with pytest.raises(Busy, match="being removed"):
        create_queue(subscription, offering, "order", presented)
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}


def test_a_token_revoked_before_it_is_set_is_refused(monkeypatch, agents, alice, offering, subscription, presented):
    newer = agents.token(alice)
    call_after(monkeypatch, "declare_queue", lambda: AuthToken.objects.filter(pk=newer.token.pk).delete())
    with pytest.raises(PermissionDenied, match="revoked"):
        create_queue(subscription, offering, "order", newer)
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}
    assert EventSubscription.objects.get().token == presented.token


def test_a_token_revoked_while_it_is_set_is_not_the_password(
    monkeypatch, agents, alice, offering, subscription, presented, open_amqp
):
    newer = agents.token(alice)
    call_before(monkeypatch, "put_user", lambda: AuthToken.objects.filter(pk=newer.token.pk).delete())
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
        AuthToken.objects.select_for_update().get(pk=presented.token.pk)  # a revocation locks the token first
        confirming = in_background(
            credentials._record_token, EventSubscription.objects.filter(pk=login.pk), presented.token
        )
        wait_until_blocked(confirming)
        EventSubscription.objects.select_for_update(nowait=True).get(pk=login.pk)  # and then the login
    assert confirming.result(timeout=10)


def agents_logins(users):
    """Return the RabbitMQ users that are logins of agents."""
    return {name for name in users if len(name) == 32}


def first_subscription(identity, presented):
    register_subscription(identity, "order", presented)


def first_consumer(identity, presented):
    register_consumer(identity, presented, None)


def subscription_without_identity(identity, presented):
    create_subscription(identity.owner, presented)


FIRST_REGISTRATIONS = [first_subscription, first_consumer, subscription_without_identity]


@pytest.mark.parametrize("register", FIRST_REGISTRATIONS)
def test_a_token_revoked_during_its_first_registration_leaves_no_user(
    register, monkeypatch, agents, identity, presented
):
    users_before = agents_logins(agents.users())
    call_after(monkeypatch, "set_permissions", lambda: AuthToken.objects.filter(pk=presented.token.pk).delete())
    with pytest.raises(PermissionDenied, match="revoked"):
        register(identity, presented)
    assert not EventSubscription.objects.exists()
    assert not Consumer.objects.exists()
    make_removals_due()
    removals.run_due(50)
    assert agents_logins(agents.users()) == users_before
    assert not Removal.objects.exists()


@pytest.mark.parametrize("register", FIRST_REGISTRATIONS)
@pytest.mark.parametrize(
    "error",
    [
        Refused("no", status=400, reason="no"),
        BrokerUnavailable("can't connect", never_reached=True),
        BrokerUnavailable("timed out", timed_out=True),
    ],
    ids=["refused", "gone", "late"],
)
def test_failed_permissions_leave_no_user(error, register, monkeypatch, agents, alice, identity, presented):
    users_before = agents_logins(agents.users())

    def fail(*_):
        raise error

    monkeypatch.setattr(Management, "set_permissions", fail)
    with pytest.raises(type(error)):
        register(identity, presented)
    assert not EventSubscription.objects.exists()
    assert not Consumer.objects.exists()
    assert agents_logins(agents.users()) != users_before
    make_removals_due()
    removals.run_due(50)
    assert agents_logins(agents.users()) == users_before
    assert set(agents.queues(alice.uuid.hex)) == {"guardian.dlq"}


@pytest.fixture
def broker_lost_before_login(monkeypatch):
    """Make the broker unreachable when a user is created."""

    def fail(*_):
        raise BrokerUnavailable("can't connect", never_reached=True)

    monkeypatch.setattr(Management, "put_user", fail)


def test_a_login_whose_user_was_never_requested_leaves_no_removal(
    alice, subscription, identity, presented, broker_lost_before_login
):
    with pytest.raises(BrokerUnavailable):
        create_subscription(alice, presented)
    assert EventSubscription.objects.get() == subscription
    assert not Removal.objects.exists()
    with pytest.raises(BrokerUnavailable):
        register_consumer(identity, presented, None)
    assert {kind for kind, _, _ in pending()} == {"queue", "user"}  # the queue was declared


@pytest.mark.parametrize("existed", [True, False])
def test_a_registration_that_fails_at_the_login_removes_a_new_queue(
    existed, agents, management, alice, offering, subscription, broker_lost_before_login
):
    name = f"subscription_{subscription.uuid.hex}_offering_{offering.uuid.hex}_order"
    if existed:
        management.declare_queue(alice.uuid.hex, name, REGISTERED_QUEUE_ARGUMENTS)
    with pytest.raises(BrokerUnavailable):
        create_queue(subscription, offering, "order", agents.token(alice))
    assert not SubscriptionQueue.objects.exists()
    assert pending() == (set() if existed else {("queue", alice.uuid.hex, name)})


# Lost vhosts


def assert_can_log_in(open_amqp, login, presented, vhost):
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
        assert_can_log_in(open_amqp, subscription, presented, queue.vhost)
    left, _ = register_subscription(identity, "order", presented)
    create_queue(left, offering, "order", presented)
    register_consumer(identity, presented, None)
    for login in (left, consumer):
        assert_can_log_in(open_amqp, login, presented, queue.vhost)
        login.refresh_from_db()
        assert login.password_set


def test_a_login_read_before_the_vhost_was_lost_works_again(
    agents, identity, offering, subscription, presented, management, open_amqp
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    read_early = EventSubscription.objects.get()
    management.delete_vhost(queue.vhost)
    register_consumer(identity, presented, None)  # recreates the vhost
    create_queue(read_early, offering, "order", presented)
    assert_can_log_in(open_amqp, subscription, presented, queue.vhost)


def test_a_kill_after_a_vhost_was_recreated_locks_no_agent_out(
    monkeypatch, alice, offering, subscription, presented, open_amqp, management
):
    create_queue(subscription, offering, "order", presented)
    management.delete_vhost(alice.uuid.hex)
    with monkeypatch.context() as patched:
        call_after(patched, "create_vhost", kill)
        with pytest.raises(Killed):
            create_queue(subscription, offering, "order", presented)
    create_queue(EventSubscription.objects.get(), offering, "order", presented)
    assert_can_log_in(open_amqp, subscription, presented, alice.uuid.hex)


def test_a_lost_vhost_resets_only_its_owners_passwords(
    agents, alice, subscription, presented, identity, management, requests
):
    bob = agents.owner("bob")
    bobs, _ = register_consumer(agents.identity(bob), agents.token(bob), None)
    alices, _ = register_consumer(identity, presented, None)
    create_vhost(alice, management)
    for login in (bobs, alices, subscription):
        login.refresh_from_db()
    assert (bobs.password_set, alices.password_set, subscription.password_set) == (True, False, False)


# Deleted owners and offerings


def test_nothing_is_registered_for_a_deleted_owner(agents, alice, identity, offering, subscription, presented):
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
    assert not agents_logins(agents.users())


def test_an_owner_deleted_during_a_registration_leaves_nothing(monkeypatch, agents, alice, identity, presented):
    call_before(monkeypatch, "lock", lambda *_, **__: Owner.objects.filter(pk=alice.pk).delete(), locks)
    with pytest.raises(ObjectDoesNotExist):
        register_subscription(identity, "order", presented)
    assert not EventSubscription.objects.exists()
    assert alice.uuid.hex not in agents.vhosts()


@pytest.mark.parametrize(
    ("gone", "method", "status"), [("owner", "post", 404), ("offering", "post", 400), ("offering", "put", 404)]
)
def test_the_api_reports_an_owner_or_offering_deleted_meanwhile(
    gone, method, status, monkeypatch, alice, offering, identity
):
    program = Program(alice)
    program.client.raise_request_exception = False
    model = Owner if gone == "owner" else Offering
    place = "create_identity" if method == "post" else "update_identity"
    call_before(monkeypatch, place, lambda *_: model.objects.all().delete(), identities)
    path = "agent-identities/" + ("" if method == "post" else f"{identity.uuid.hex}/")
    answer = getattr(program, method)(path, {"name": "another", "offering": offering.uuid.hex})
    assert answer.status_code == status
    if status == 400:
        assert list(answer.json()) == ["offering"]


# Locks and deadlocks


def test_a_locked_vhost_or_login_is_busy(monkeypatch, alice, identity, presented, subscription):
    monkeypatch.setattr(records, "WAIT_SECONDS", 0.1)
    AgentVhost.objects.update(ready=False)
    with locks.lock(f"vhost {alice.uuid.hex}"), pytest.raises(Busy, match="another request"):
        create_subscription(alice, presented)
    AgentVhost.objects.update(ready=True)
    EventSubscription.objects.update(password_set=False)
    with locks.lock(subscription.rmq_username), pytest.raises(Busy, match="another request"):
        register_subscription(identity, "order", presented)
    assert issubclass(Busy, BrokerUnavailable)


def test_a_vhost_that_cannot_be_recreated_is_busy(monkeypatch, offering, subscription, presented, management):
    management.delete_vhost(subscription.owner.uuid.hex)
    monkeypatch.setattr(Management, "create_vhost", lambda *_: True)
    with pytest.raises(Busy, match="node is down"):
        create_queue(subscription, offering, "order", presented)


def test_a_concurrent_request_does_not_register_a_queue_being_removed(monkeypatch, offering, subscription, presented):
    queue, _ = create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all()._raw_delete("default")
    got = []

    def register_second(*_):
        # The removal was claimed before the row existed, and is in progress.
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

    call_before(monkeypatch, "cancel_removal", register_second, queues)
    with pytest.raises(Busy, match="being removed"):
        create_queue(subscription, offering, "order", presented)
    assert len(got) == 1
    assert not SubscriptionQueue.objects.exists()


def test_a_row_that_another_request_made_ready_is_kept(monkeypatch, offering, subscription, presented):
    create_queue(subscription, offering, "order", presented)
    SubscriptionQueue.objects.all()._raw_delete("default")
    real = queues.cancel_removal

    def register_second(*what):
        monkeypatch.setattr(queues, "cancel_removal", real)
        assert create_queue(subscription, offering, "order", presented)[1] is False
        raise Busy("it was just being removed")

    monkeypatch.setattr(queues, "cancel_removal", register_second)
    with pytest.raises(Busy):
        create_queue(subscription, offering, "order", presented)
    assert SubscriptionQueue.objects.get().state == "ready"


class Deadlock(Exception):
    pgcode = deletions.DEADLOCK


@pytest.mark.parametrize(("times", "left"), [(2, 1), (3, 0)])
def test_an_insert_in_a_deadlock_is_tried_three_times(times, left, alice, offering):
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


def test_the_configuration_of_an_agent_is_stored_sealed(settings, alice, offering):
    identity = create_identity(alice, offering, "agent", config_file_content="password: secret", version="1.0.7")
    assert identity.version == "1.0.7"
    assert "secret" not in AgentIdentity.objects.get().sealed_config
    assert read_config(AgentIdentity.objects.get()) == "password: secret"
    settings.SECRET_KEY = "another"
    assert read_config(identity) == ""
    settings.SECRET_KEY_FALLBACKS = ["for-the-tests-alone"]
    assert read_config(identity) == "password: secret"


# Registered queues for other packages


def test_registered_queues_with_owners_take_three_statements(
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


def test_marking_missing_queues_takes_two_statements(
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
    with django_assert_num_queries(0):
        mark_vanished([])


def test_a_queue_deleted_during_its_redeclaration_is_removed(
    monkeypatch, agents, management, offering, subscription, presented
):
    queue, _ = create_queue(subscription, offering, "order", presented)
    management.delete_queue(queue.vhost, queue.queue_name)
    call_before(monkeypatch, "declare_queue", lambda: SubscriptionQueue.objects.all().delete())
    redeclare(queue, management)
    assert queue.queue_name in agents.queues(queue.vhost)
    make_removals_due()
    removals.run_due(50)
    assert queue.queue_name not in agents.queues(queue.vhost)


def test_a_vhost_of_an_owner_deleted_meanwhile_is_removed_later(
    monkeypatch, agents, alice, identity, presented, management
):
    call_before(monkeypatch, "create_vhost", lambda: Owner.objects.filter(pk=alice.pk).delete())
    with pytest.raises(ObjectDoesNotExist):
        register_subscription(identity, "order", presented)
    make_removals_due()
    removals.run_due(50)
    assert alice.uuid.hex not in agents.vhosts()
    with pytest.raises(NotOnBroker):
        management.delete_vhost(alice.uuid.hex)
