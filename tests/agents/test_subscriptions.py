"""Registration on a real broker: what an agent gets, what it may do, and what a failure leaves."""

import logging
import uuid
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import OperationalError, connection, transaction
from django.test import override_settings
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
from agents.registration.identities import check_object_type, create_identity, read_config
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
from agents.sweeps.registered import vhosts
from core import broker, locks, removals
from core.models import Lease, Removal
from core.refusals import Refusal
from rabbit.arguments import DEAD_LETTER_QUEUE_ARGUMENTS, REGISTERED_QUEUE_ARGUMENTS
from rabbit.errors import BrokerUnavailable, NotOnBroker, Refused
from rabbit.http import PooledClient
from rabbit.management import Management
from tests.conftest import Amqp
from tests.support.agents import NewAgent, run_removals
from tests.support.api import Program
from tests.support.proxy import Proxy
from tests.support.toolbox import (
    AWAY,
    Killed,
    call_after,
    call_before,
    calling_first,
    can_log_in,
    in_background,
    in_parallel,
    is_refused,
    raising,
    url_for,
    wait_until_blocked,
)

pytestmark = pytest.mark.usefixtures("agents")


@pytest.fixture
def agent(agents):
    return NewAgent(agents, "alice")


@pytest.fixture
def subscribed(agent):
    """Return Alice's agent, which has subscribed to orders and has no queue yet."""
    agent.subscription, _ = agent.subscribe()
    return agent


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


def kill():
    raise Killed


def pending():
    return set(Removal.objects.values_list("kind", "vhost", "name"))


# Registration


def test_a_new_queue_is_declared_with_vhost_and_dead_letter_queue(agents, subscribed):
    queue, new = subscribed.create_queue()
    assert new
    assert queue.state == "ready"
    assert queue.vhost == subscribed.vhost
    subscription, offering = subscribed.subscription.uuid.hex, subscribed.offering.uuid.hex
    assert queue.queue_name == f"subscription_{subscription}_offering_{offering}_order"
    assert agents.queues(queue.vhost) == {
        queue.queue_name: REGISTERED_QUEUE_ARGUMENTS,
        "guardian.dlq": DEAD_LETTER_QUEUE_ARGUMENTS,
    }
    assert AgentVhost.objects.get().ready


def test_queues_are_quorum_queues_if_the_setting_says_so_and_an_empty_one_is_replaced(agents, agent, settings):
    subscription = create_subscription(agent.owner, agent.presented)
    queue, _ = create_queue(subscription, agent.offering, "order", agent.presented)
    settings.GUARDIAN_REGISTERED_QUEUE_TYPE = "quorum"
    create_vhost(agent.owner, agents.management)
    assert create_queue(subscription, agent.offering, "order", agent.presented) == (queue, False)
    quorum = {"x-queue-type": "quorum"}
    assert agents.queues(queue.vhost) == {
        queue.queue_name: REGISTERED_QUEUE_ARGUMENTS | quorum | {"x-overflow": "reject-publish"},
        "guardian.dlq": DEAD_LETTER_QUEUE_ARGUMENTS | quorum,
    }


@pytest.mark.parametrize("kind", ["subscription", "consumer"])
def test_the_token_only_reads_its_queue_over_amqp(kind, subscribed, broker):
    login, queue = subscribed.subscription, subscribed.create_queue()[0]
    other = subscribed.register_consumer()[0]
    if kind == "consumer":
        login, queue, other = other, other, queue
    Amqp(broker.amqp_url, queue.vhost).publish(queue.queue_name, 1)
    opened = Amqp(url_for(broker, login.rmq_username, subscribed.presented.key), subscribed.vhost).connection
    _, _, body = opened.channel().basic_get(queue.queue_name, auto_ack=True)
    assert body == b"0"
    for action in (
        lambda channel: channel.basic_get(other.queue_name),
        lambda channel: channel.basic_get("guardian.dlq"),
        lambda channel: channel.queue_declare("its-own"),
        lambda channel: channel.queue_declare(f"{queue.queue_name}_more", durable=True),
        lambda channel: channel.queue_delete(queue.queue_name),
        lambda channel: channel.queue_bind(queue.queue_name, "amq.topic", "#"),
        lambda channel: (channel.confirm_delivery(), channel.basic_publish("", queue.queue_name, b"{}")),
    ):
        assert is_refused(opened, action)


def test_the_token_presented_last_is_the_password(agents, subscribed, broker):
    subscribed.create_queue()
    newer = agents.token(subscribed.owner)
    assert subscribed.create_queue(presented=newer)[1] is False
    assert EventSubscription.objects.get().token == newer.token
    assert can_log_in(broker, subscribed.vhost, subscribed.subscription.rmq_username, newer.key)
    assert not can_log_in(broker, subscribed.vhost, subscribed.subscription.rmq_username, subscribed.presented.key)


def test_a_token_is_in_no_error_and_no_log(subscribed, caplog, settings):
    caplog.set_level(logging.DEBUG)
    subscribed.create_queue()
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    with pytest.raises(BrokerUnavailable) as caught:
        subscribed.create_queue()
    presented = subscribed.presented
    assert presented.key not in f"{presented} {presented!r} {caught.value} {caplog.text}"
    assert (SubscriptionQueue.objects.get().state, Removal.objects.exists()) == ("ready", False)


# Cost


def test_registrations_take_one_request_per_created_object(agent, requests):
    subscription, _ = agent.subscribe()
    queue, _ = create_queue(subscription, agent.offering, "order", agent.presented)
    created = {"PUT vhosts": 1, "PUT queues": 2, "PUT users": 1, "PUT permissions": 2}
    assert Counter(requests) == {**created, "GET whoami": 1}
    agent.register_consumer(["order"])
    requests.clear()
    assert create_queue(subscription, agent.offering, "order", agent.presented) == (queue, False)
    assert not agent.register_consumer(["order"])[1]
    assert not agent.subscribe()[1]
    assert requests == ["PUT queues"] * 2


# Refusals and outages


def test_an_unknown_object_type_is_refused_before_anything_is_created(subscribed):
    for call in (
        partial(check_object_type, "Order"),
        partial(subscribed.subscribe, ""),
        partial(subscribed.create_queue, "orders"),
        partial(subscribed.register_consumer, ["order", "orders"]),
    ):
        with pytest.raises(Refusal, match="user_ssh_key"):
            call()
    assert [check_object_type(one) for one in ObjectType.values] == ObjectType.values
    assert not SubscriptionQueue.objects.exists()
    assert not Consumer.objects.exists()


def test_an_unvouched_owner_keeps_registrations_and_gets_no_new_ones(agents, subscribed):
    queue, _ = subscribed.create_queue()
    Owner.objects.update(vouched=False)
    subscribed.owner.refresh_from_db()
    for call in (
        partial(create_identity, subscribed.owner, subscribed.offering, "another"),
        partial(create_subscription, subscribed.owner, subscribed.presented),
        partial(subscribed.subscribe, "resource"),
        partial(subscribed.create_queue, "resource"),
        subscribed.register_consumer,
    ):
        with pytest.raises(NotVouched):
            call()
    assert subscribed.create_queue() == (queue, False)
    assert subscribed.subscribe() == (subscribed.subscription, False)
    assert (AgentIdentity.objects.count(), EventSubscription.objects.count()) == (1, 1)
    assert set(agents.queues(queue.vhost)) == {queue.queue_name, "guardian.dlq"}
    assert not Removal.objects.exists()


@pytest.mark.parametrize("url", [AWAY, ""], ids=["away", "not configured"])
def test_without_the_broker_nothing_is_registered(url, settings, subscribed):
    settings.RABBITMQ_MANAGEMENT_URL = url
    for call in (
        partial(create_subscription, subscribed.owner, subscribed.presented),
        partial(subscribed.subscribe, "resource"),
        subscribed.create_queue,
        subscribed.register_consumer,
    ):
        with pytest.raises(BrokerUnavailable):
            call()
    assert list(EventSubscription.objects.all()) == [subscribed.subscription]
    assert not SubscriptionQueue.objects.exists()
    assert not Consumer.objects.exists()
    assert not Removal.objects.exists()


@contextmanager
def late_answers(broker):
    """Delay the broker's answers to Guardian beyond its timeout."""
    with Proxy.before(broker.management_url) as proxy:
        proxy.delay(3)
        address = proxy.url(broker.management_url)
        with override_settings(RABBITMQ_MANAGEMENT_URL=address, GUARDIAN_BROKER_TIMEOUT_SECONDS=0.5):
            yield


def test_a_timeout_leaves_a_removal_of_the_queue(broker, agents, subscribed):
    with late_answers(broker), pytest.raises(BrokerUnavailable):
        subscribed.create_queue()
    assert not SubscriptionQueue.objects.exists()
    removal = Removal.objects.get()
    assert (removal.kind, removal.vhost, removal.if_unused) == ("queue", subscribed.vhost, True)
    assert removal.due_at > timezone.now() + timedelta(seconds=50)
    assert removal.name in agents.queues(removal.vhost)
    queue, new = subscribed.create_queue()
    assert (new, queue.queue_name, queue.state) == (True, removal.name, "ready")
    assert not Removal.objects.exists()


def test_a_timeout_leaves_a_removal_of_the_user(broker, agents, subscribed):
    for call in (
        partial(create_subscription, subscribed.owner, subscribed.presented),
        partial(subscribed.subscribe, "resource"),
    ):
        with late_answers(broker), pytest.raises(BrokerUnavailable):
            call()
    assert list(EventSubscription.objects.all()) == [subscribed.subscription]
    made = agents.users() & set(Removal.objects.filter(kind="user").values_list("name", flat=True))
    assert len(made) == 2
    assert run_removals() == 2
    assert not made & agents.users()


# Existing queues and vhosts


@pytest.mark.parametrize("holds", ["a message", "a consumer"])
def test_a_used_queue_with_other_arguments_is_refused_with_the_differences(holds, agents, broker, subscribed):
    longest = max(ObjectType.values, key=len)
    name = f"subscription_{subscribed.subscription.uuid.hex}_offering_{subscribed.offering.uuid.hex}_{longest}"
    early = Amqp(broker.amqp_url, subscribed.vhost)
    found = {"x-queue-type": "classic", "x-max-length": 5}  # as RabbitMQ 4 lists it
    early.queue(name, 1 if holds == "a message" else 0, arguments=found)
    if holds == "a consumer":
        early.channel.basic_consume(name, lambda *_: None)
    with pytest.raises(Refused) as caught:
        subscribed.create_queue(longest)
    assert "x-max-length is 5 and should be 10000" in caught.value.reason
    assert "x-message-ttl is not set and should be 3600000" in caught.value.reason
    assert name in caught.value.reason
    early.connection.close()
    assert not SubscriptionQueue.objects.exists()
    assert not Removal.objects.exists()
    assert agents.queues(subscribed.vhost)[name] == found


def test_an_equal_queue_keeps_its_messages(broker, subscribed):
    queue, _ = subscribed.create_queue()
    SubscriptionQueue.objects.all()._raw_delete("default")  # like a restored database
    before = Amqp(broker.amqp_url, queue.vhost)
    before.publish(queue.queue_name, 2)
    assert subscribed.create_queue()[1]
    before.take(queue.queue_name, 2)
    before.connection.close()


def test_a_pending_removal_stays_if_the_queue_has_other_arguments_and_messages(management, broker, subscribed):
    vhost = subscribed.vhost
    name = subscribed.queue_name
    management.declare_queue(vhost, name, {})
    Amqp(broker.amqp_url, vhost).publish(name, 2)
    soon = timezone.now() + timedelta(minutes=1)
    Removal.objects.create(kind="queue", vhost=vhost, name=name, due_at=soon)
    with pytest.raises(Refused):
        subscribed.create_queue()
    assert not SubscriptionQueue.objects.exists()
    assert pending() == {("queue", vhost, name)}


def test_a_wrong_dead_letter_queue_does_not_prevent_registration(agents, agent, management, broker, caplog):
    management.create_vhost(agent.vhost)
    by_hand = Amqp(broker.amqp_url, agent.vhost)
    by_hand.queue("guardian.dlq", 1)
    subscription, _ = agent.subscribe()
    assert create_queue(subscription, agent.offering, "order", agent.presented)[0].state == "ready"
    assert "The dead-letter queue of the vhost" in caplog.text
    by_hand.take("guardian.dlq", 1)
    by_hand.connection.close()
    create_vhost(agent.owner, management)
    assert agents.queues(agent.vhost)["guardian.dlq"] == DEAD_LETTER_QUEUE_ARGUMENTS


# Concurrency and crashes


def test_ten_concurrent_registrations_of_an_agent_create_one(agents, agent, broker):
    def register_all():
        subscription, _ = register_subscription(AgentIdentity.objects.get(), "order", agent.presented)
        _, is_new_queue = create_queue(subscription, agent.offering, "order", agent.presented)
        _, is_new_consumer = register_consumer(AgentIdentity.objects.get(), agent.presented, ["order"])
        return is_new_queue, is_new_consumer

    got = in_parallel(*[register_all] * 10)
    assert [one for one in got if isinstance(one, Exception)] == []
    assert [sum(new) for new in zip(*got, strict=True)] == [1, 1]
    for login in (EventSubscription.objects.get(), Consumer.objects.get()):
        assert (login.token, login.password_set) == (agent.presented.token, True)
        assert can_log_in(broker, agent.vhost, login.rmq_username, agent.presented.key)
    assert len(agents.queues(agent.vhost)) == 3


@pytest.mark.parametrize("when", [call_before, call_after])
def test_a_killed_registration_is_finished_by_the_next_call(when, monkeypatch, agents, subscribed):
    with monkeypatch.context() as patched:
        when(patched, Management, "declare_queue", kill)
        with pytest.raises(Killed):
            subscribed.create_queue()
    queue = SubscriptionQueue.objects.get()
    assert queue.state == "creating"
    assert (queue.queue_name in agents.queues(queue.vhost)) == (when is call_after)
    assert subscribed.create_queue() == (queue, False)
    assert SubscriptionQueue.objects.get().state == "ready"
    assert queue.queue_name in agents.queues(queue.vhost)


def test_a_consumer_keeps_its_object_types_if_a_pass_finishes_its_killed_registration(agent):
    with raising(Management, "declare_queue", Killed), pytest.raises(Killed):
        agent.register_consumer(["order"])
    redeclare(Consumer.objects.get(), broker.management())
    assert Consumer.objects.get().object_types == ["order"]


@pytest.mark.parametrize(
    ("place", "has_vhost"),
    [("create_vhost", False), ("declare_queue", False), ("put_user", True), ("set_permissions", True)],
)
def test_a_subscription_interrupted_by_a_kill_is_finished_by_the_next_call(place, has_vhost, agents, agent, broker):
    with raising(Management, place, Killed), pytest.raises(Killed):
        agent.subscribe()
    left = EventSubscription.objects.get()
    assert (left.token, left.password_set, bool(vhosts())) == (None, False, has_vhost)
    assert agent.subscribe() == (left, False)
    assert can_log_in(broker, agent.vhost, left.rmq_username, agent.presented.key)
    assert set(agents.queues(agent.vhost)) == {"guardian.dlq"}
    assert vhosts() == {agent.vhost: agent.owner.pk}


# Concurrent removals


@pytest.mark.parametrize("when", [call_before, call_after])
def test_a_queue_deleted_during_its_registration_is_registered_again(when, monkeypatch, agents, subscribed):
    if when is call_before:
        subscribed.create_queue()
    gone = []
    when(monkeypatch, Management, "declare_queue", lambda: gone.append(SubscriptionQueue.objects.all().delete()[0]))
    queue, new = subscribed.create_queue()
    assert (gone, new) == ([1], True)
    assert SubscriptionQueue.objects.get() == queue
    assert queue.queue_name in agents.queues(queue.vhost)
    assert not Removal.objects.exists()


@pytest.mark.parametrize("model", [EventSubscription, Offering])
def test_a_queue_whose_parent_is_deleted_is_removed_later(model, monkeypatch, agents, subscribed):
    call_before(monkeypatch, Management, "declare_queue", lambda: model.objects.all().delete())
    with pytest.raises(ObjectDoesNotExist):
        subscribed.create_queue()
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}
    run_removals()
    assert set(agents.queues(subscribed.vhost)) == {"guardian.dlq"}


def test_a_subscription_deleted_during_its_registration_leaves_no_user(monkeypatch, agents, subscribed):
    newer = agents.token(subscribed.subscription.owner)
    call_before(monkeypatch, Management, "put_user", lambda: EventSubscription.objects.all().delete())
    with pytest.raises(ObjectDoesNotExist):
        subscribed.create_queue(presented=newer)
    run_removals()
    assert subscribed.subscription.rmq_username not in agents.users()
    assert set(agents.queues(subscribed.vhost)) == {"guardian.dlq"}
    assert not Removal.objects.exists()


def test_a_subscription_deleted_at_each_attempt_is_refused_after_three(agent):
    deleted = []

    def delete():
        deleted.append(EventSubscription.objects.all().delete()[0])

    with calling_first(Management, "put_user", delete), pytest.raises(Busy, match="removed repeatedly"):
        agent.subscribe()
    assert deleted == [1, 1, 1]


def test_a_consumer_deleted_during_its_registration_is_registered_again(monkeypatch, agents, agent, broker):
    call_before(monkeypatch, Management, "put_user", lambda: Consumer.objects.all().delete())
    consumer, new = agent.register_consumer()
    assert new
    assert can_log_in(broker, agent.vhost, consumer.rmq_username, agent.presented.key)
    run_removals()
    assert set(agents.queues(agent.vhost)) == {consumer.queue_name, "guardian.dlq"}
    assert not Removal.objects.exists()


def test_a_queue_deleted_and_being_removed_is_busy(monkeypatch, subscribed):
    monkeypatch.setattr(removals, "run_due", lambda **_: 0)

    def remove():
        SubscriptionQueue.objects.all().delete()
        # A worker has claimed the removal and has not sent the request yet.
        Removal.objects.update(claim=uuid.uuid4(), due_at=timezone.now() + timedelta(minutes=1))

    call_after(monkeypatch, Management, "declare_queue", remove)
    with pytest.raises(Busy, match="being removed"):
        subscribed.create_queue()
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}


def test_a_token_revoked_before_it_is_set_is_refused(monkeypatch, agents, subscribed):
    newer = agents.token(subscribed.owner)
    call_after(monkeypatch, Management, "declare_queue", lambda: AuthToken.objects.filter(pk=newer.token.pk).delete())
    with pytest.raises(PermissionDenied, match="revoked"):
        subscribed.create_queue(presented=newer)
    assert not SubscriptionQueue.objects.exists()
    assert {kind for kind, _, _ in pending()} == {"queue"}
    assert EventSubscription.objects.get().token == subscribed.presented.token


def test_a_token_revoked_while_it_is_set_is_not_the_password(monkeypatch, agents, subscribed, broker):
    newer = agents.token(subscribed.owner)
    call_before(monkeypatch, Management, "put_user", lambda: AuthToken.objects.filter(pk=newer.token.pk).delete())
    with pytest.raises(PermissionDenied, match="revoked"):
        subscribed.create_queue(presented=newer)
    left = EventSubscription.objects.get()
    assert (left.token, left.next_token, left.password_set) == (subscribed.presented.token, None, False)
    run_removals()
    assert not can_log_in(broker, subscribed.vhost, subscribed.subscription.rmq_username, newer.key)


def test_a_registration_that_lost_its_lock_sets_no_password(monkeypatch, agents, subscribed):
    lose_lock = partial(Lease.objects.filter(name=locks.lease_name(subscribed.subscription.rmq_username)).delete)
    call_after(monkeypatch, credentials, "_record_next_token", lose_lock)
    with raising(Management, "put_user", AssertionError), pytest.raises(Busy, match="another request"):
        subscribed.create_queue(presented=agents.token(subscribed.owner))


def test_a_registration_waits_for_a_revocation_before_it_locks_the_login(subscribed):
    login = EventSubscription.objects.get()
    EventSubscription.objects.update(token=None, next_token=subscribed.presented.token)
    with transaction.atomic():
        # A revocation locks the token first, and then the login.
        AuthToken.objects.select_for_update().get(pk=subscribed.presented.token.pk)
        confirming = in_background(
            credentials._record_token, EventSubscription.objects.filter(pk=login.pk), subscribed.presented.token
        )
        wait_until_blocked(confirming)
        EventSubscription.objects.select_for_update(nowait=True).get(pk=login.pk)
    assert confirming.result(timeout=10)


def agents_logins(users):
    """Return the RabbitMQ users that are logins of agents."""
    return {name for name in users if len(name) == 32}


@pytest.mark.parametrize(
    "register",
    [
        lambda agent: agent.subscribe(),
        lambda agent: agent.register_consumer(),
        lambda agent: create_subscription(agent.owner, agent.presented),
    ],
    ids=["subscription", "consumer", "without an identity"],
)
def test_a_token_revoked_during_its_first_registration_leaves_no_user(register, monkeypatch, agents, agent):
    users_before = agents_logins(agents.users())
    presented = AuthToken.objects.filter(pk=agent.presented.token.pk)
    call_after(monkeypatch, Management, "set_permissions", presented.delete)
    with pytest.raises(PermissionDenied, match="revoked"):
        register(agent)
    assert not EventSubscription.objects.exists()
    assert not Consumer.objects.exists()
    run_removals()
    assert agents_logins(agents.users()) == users_before
    assert not Removal.objects.exists()


@pytest.mark.parametrize(
    "error",
    [
        Refused("no", status=400, reason="no"),
        BrokerUnavailable("can't connect", never_reached=True),
        BrokerUnavailable("timed out", timed_out=True),
    ],
    ids=["refused", "gone", "late"],
)
def test_failed_permissions_leave_no_user(error, agents, agent):
    users_before = agents_logins(agents.users())
    with raising(Management, "set_permissions", error), pytest.raises(type(error)):
        agent.register_consumer()
    assert not Consumer.objects.exists()
    assert agents_logins(agents.users()) != users_before
    run_removals()
    assert agents_logins(agents.users()) == users_before
    assert set(agents.queues(agent.vhost)) == {"guardian.dlq"}


@pytest.fixture
def broker_lost_before_login():
    """Make the broker unreachable when a user is created."""
    with raising(Management, "put_user", BrokerUnavailable("can't connect", never_reached=True)):
        yield


def test_a_login_whose_user_was_never_requested_leaves_no_removal(subscribed, broker_lost_before_login):
    with pytest.raises(BrokerUnavailable):
        create_subscription(subscribed.owner, subscribed.presented)
    assert EventSubscription.objects.get() == subscribed.subscription
    assert not Removal.objects.exists()
    with pytest.raises(BrokerUnavailable):
        subscribed.register_consumer()
    assert {kind for kind, _, _ in pending()} == {"queue", "user"}  # the queue was declared


@pytest.mark.parametrize("existed", [True, False])
def test_a_registration_that_fails_at_the_login_removes_a_new_queue(
    existed, agents, management, subscribed, broker_lost_before_login
):
    name = subscribed.queue_name
    if existed:
        management.declare_queue(subscribed.vhost, name, REGISTERED_QUEUE_ARGUMENTS)
    with pytest.raises(BrokerUnavailable):
        subscribed.create_queue(presented=agents.token(subscribed.owner))
    assert not SubscriptionQueue.objects.exists()
    assert pending() == (set() if existed else {("queue", subscribed.vhost, name)})


# Lost vhosts


@pytest.mark.parametrize("how", ["an agent", "the sweep", "a new agent", "a new queue"])
def test_agents_can_log_in_again_after_their_vhost_was_lost(how, agents, subscribed, management, broker):
    queue, _ = subscribed.create_queue()
    consumer, _ = subscribed.register_consumer()
    management.delete_vhost(queue.vhost)
    if how == "the sweep":
        redeclare(SubscriptionQueue.objects.get(), management)
        redeclare(Consumer.objects.get(), management)
    elif how == "a new agent":
        AgentVhost.objects.update(ready=False)
        register_subscription(agents.identity(subscribed.owner, subscribed.offering), "order", subscribed.presented)
    elif how == "a new queue":
        create_queue(EventSubscription.objects.get(), subscribed.offering, "resource", subscribed.presented)
        assert can_log_in(broker, queue.vhost, subscribed.subscription.rmq_username, subscribed.presented.key)
    left, _ = subscribed.subscribe()
    create_queue(left, subscribed.offering, "order", subscribed.presented)
    subscribed.register_consumer()
    assert set(agents.queues(queue.vhost)) >= {queue.queue_name, consumer.queue_name, "guardian.dlq"}
    for login in (left, consumer):
        assert can_log_in(broker, queue.vhost, login.rmq_username, subscribed.presented.key)
        login.refresh_from_db()
        assert login.password_set


def test_a_login_read_before_the_vhost_was_lost_works_again(subscribed, management, broker):
    queue, _ = subscribed.create_queue()
    read_early = EventSubscription.objects.get()
    management.delete_vhost(queue.vhost)
    subscribed.register_consumer()  # recreates the vhost
    create_queue(read_early, subscribed.offering, "order", subscribed.presented)
    assert can_log_in(broker, queue.vhost, subscribed.subscription.rmq_username, subscribed.presented.key)


def test_a_kill_after_a_vhost_was_recreated_locks_no_agent_out(monkeypatch, subscribed, broker, management):
    subscribed.create_queue()
    management.delete_vhost(subscribed.vhost)
    with monkeypatch.context() as patched:
        call_after(patched, Management, "create_vhost", kill)
        with pytest.raises(Killed):
            subscribed.create_queue()
    create_queue(EventSubscription.objects.get(), subscribed.offering, "order", subscribed.presented)
    assert can_log_in(broker, subscribed.vhost, subscribed.subscription.rmq_username, subscribed.presented.key)


def test_a_lost_vhost_resets_only_its_owners_passwords(agents, subscribed, management, requests):
    bob = agents.owner("bob")
    bobs, _ = register_consumer(agents.identity(bob), agents.token(bob), None)
    alices, _ = subscribed.register_consumer()
    create_vhost(subscribed.owner, management)
    for login in (bobs, alices, subscribed.subscription):
        login.refresh_from_db()
    assert (bobs.password_set, alices.password_set, subscribed.subscription.password_set) == (True, False, False)


# Deleted owners and offerings


def test_nothing_is_registered_for_a_deleted_owner(agents, subscribed):
    queue, _ = subscribed.create_queue()
    stale = Owner.objects.get(pk=subscribed.owner.pk)
    Owner.objects.filter(pk=subscribed.owner.pk).delete()
    for call in (
        partial(create_identity, stale, subscribed.offering, "another"),
        partial(create_subscription, stale, subscribed.presented),
        partial(subscribed.subscribe, "resource"),
        partial(subscribed.create_queue, "resource"),
        subscribed.register_consumer,
        partial(redeclare, queue, broker.management()),
    ):
        with pytest.raises(ObjectDoesNotExist):
            call()
    run_removals()
    assert stale.uuid.hex not in agents.vhosts()
    assert not agents_logins(agents.users())


def test_an_owner_deleted_during_a_registration_leaves_nothing(monkeypatch, agents, agent):
    call_before(monkeypatch, locks, "lock", lambda: Owner.objects.filter(pk=agent.owner.pk).delete())
    with pytest.raises(ObjectDoesNotExist):
        agent.subscribe()
    assert not EventSubscription.objects.exists()
    assert agent.vhost not in agents.vhosts()


@pytest.mark.parametrize(
    ("gone", "method", "status"), [("owner", "post", 404), ("offering", "post", 400), ("offering", "put", 404)]
)
def test_the_api_reports_an_owner_or_offering_deleted_meanwhile(gone, method, status, monkeypatch, agent):
    program = Program(agent.owner)
    program.client.raise_request_exception = False
    model = Owner if gone == "owner" else Offering
    place = "create_identity" if method == "post" else "update_identity"
    call_before(monkeypatch, identities, place, lambda: model.objects.all().delete())
    path = "agent-identities/" + ("" if method == "post" else f"{agent.identity.uuid.hex}/")
    answer = getattr(program, method)(path, {"name": "another", "offering": agent.offering.uuid.hex})
    assert answer.status_code == status
    if status == 400:
        assert list(answer.json()) == ["offering"]


# Locks and deadlocks


def test_a_locked_vhost_or_login_is_busy(monkeypatch, subscribed):
    monkeypatch.setattr(records, "WAIT_SECONDS", 0.1)
    AgentVhost.objects.update(ready=False)
    with locks.lock(f"vhost {subscribed.vhost}"), pytest.raises(Busy, match="another request"):
        create_subscription(subscribed.owner, subscribed.presented)
    AgentVhost.objects.update(ready=True)
    EventSubscription.objects.update(password_set=False)
    with locks.lock(subscribed.subscription.rmq_username), pytest.raises(Busy, match="another request"):
        subscribed.subscribe()
    assert issubclass(Busy, BrokerUnavailable)


def test_a_vhost_that_cannot_be_recreated_is_busy(monkeypatch, subscribed, management):
    management.delete_vhost(subscribed.vhost)
    monkeypatch.setattr(Management, "create_vhost", lambda *_: True)
    with pytest.raises(Busy, match="node is down"):
        subscribed.create_queue()


def test_a_concurrent_request_does_not_register_a_queue_being_removed(monkeypatch, subscribed):
    queue, _ = subscribed.create_queue()
    SubscriptionQueue.objects.all()._raw_delete("default")
    got = []

    def register_second():
        # The removal was claimed before the row existed, and is in progress.
        Removal.objects.create(
            kind="queue",
            vhost=queue.vhost,
            name=queue.queue_name,
            claim=uuid.uuid4(),
            due_at=timezone.now() + timedelta(minutes=1),
        )
        with pytest.raises(Busy) as caught:
            subscribed.create_queue()
        got.append(str(caught.value))

    call_before(monkeypatch, queues, "cancel_removal", register_second)
    with pytest.raises(Busy, match="being removed"):
        subscribed.create_queue()
    assert len(got) == 1
    assert not SubscriptionQueue.objects.exists()


def test_a_row_that_another_request_made_ready_is_kept(monkeypatch, subscribed):
    subscribed.create_queue()
    SubscriptionQueue.objects.all()._raw_delete("default")
    real = queues.cancel_removal

    def register_second(*what):
        monkeypatch.setattr(queues, "cancel_removal", real)
        assert subscribed.create_queue()[1] is False
        raise Busy("it was just being removed")

    monkeypatch.setattr(queues, "cancel_removal", register_second)
    with pytest.raises(Busy):
        subscribed.create_queue()
    assert SubscriptionQueue.objects.get().state == "ready"


class Deadlock(Exception):
    pgcode = deletions.DEADLOCK


@pytest.mark.parametrize(("times", "left"), [(2, 1), (3, 0)])
def test_an_insert_in_a_deadlock_is_tried_three_times(times, left, agent):
    failed = []

    def fail(execute, sql, params, many, context):
        if sql.startswith('INSERT INTO "agents_agentidentity"') and len(failed) < times:
            failed.append(sql)
            raise OperationalError("deadlock detected") from Deadlock()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail):
        if left:
            create_identity(agent.owner, agent.offering, "agent")
        else:
            with pytest.raises(Busy):
                create_identity(agent.owner, agent.offering, "agent")
    assert len(failed) == times
    assert AgentIdentity.objects.filter(name="agent").count() == left


# Identities


def test_the_configuration_of_an_agent_is_stored_sealed(settings, agent):
    identity = create_identity(
        agent.owner, agent.offering, "agent", config_file_content="password: secret", version="1.0.7"
    )
    assert identity.version == "1.0.7"
    assert "secret" not in AgentIdentity.objects.get(name="agent").sealed_config
    assert read_config(AgentIdentity.objects.get(name="agent")) == "password: secret"
    settings.SECRET_KEY = "another"
    assert read_config(identity) == ""
    settings.SECRET_KEY_FALLBACKS = ["for-the-tests-alone"]
    assert read_config(identity) == "password: secret"


# Registered queues for other packages


def test_a_queue_deleted_during_its_redeclaration_is_removed(monkeypatch, agents, management, subscribed):
    queue, _ = subscribed.create_queue()
    management.delete_queue(queue.vhost, queue.queue_name)
    call_before(monkeypatch, Management, "declare_queue", lambda: SubscriptionQueue.objects.all().delete())
    redeclare(queue, management)
    assert queue.queue_name in agents.queues(queue.vhost)
    run_removals()
    assert queue.queue_name not in agents.queues(queue.vhost)


def test_a_vhost_of_an_owner_deleted_meanwhile_is_removed_later(monkeypatch, agents, agent, management):
    call_before(monkeypatch, Management, "create_vhost", lambda: Owner.objects.filter(pk=agent.owner.pk).delete())
    with pytest.raises(ObjectDoesNotExist):
        agent.subscribe()
    run_removals()
    assert agent.vhost not in agents.vhosts()
    with pytest.raises(NotOnBroker):
        management.delete_vhost(agent.vhost)
