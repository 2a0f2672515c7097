"""Removals: what a deletion of rows removes from the broker, once, and finally always."""

import contextlib
import logging
import random
import threading
import time
import uuid
from collections import Counter
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial

import pika
import pytest
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction
from django.db.models import F
from django.db.models.deletion import Collector
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.access import tokens
from accounts.models import AuthToken, Owner
from agents.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    Offering,
    Registration,
    SubscriptionQueue,
)
from agents.registration import queues as registration
from agents.removal import deletions
from agents.removal import handlers as agents_removals
from core import locks, removals
from core.models import Removal
from core.tasks import finish_removals
from queues.actions import tombstones
from queues.models import Queue, QueueEvent
from rabbit.amqp import Session
from rabbit.errors import BrokerError, BrokerUnavailable
from rabbit.management import Management
from rabbit.names import DEAD_LETTER_QUEUE
from tests.conftest import Amqp
from tests.support.agents import make_removals_due, run_removals
from tests.support.counting import counted_requests
from tests.support.proxy import Proxy
from tests.support.toolbox import (
    AWAY,
    AWAY_AMQP,
    Killed,
    calling_first,
    can_log_in,
    in_background,
    in_parallel,
    raising,
    stored_queue,
    url_for,
    wait_until_blocked,
)

KIND = Removal.Kind


class Registrations:
    """An owner with two agents: one with a subscription and two queues, and one with a consumer."""

    def __init__(self, agents):
        self.owner = agents.owner()
        self.presented = agents.token(self.owner)
        self.first, self.second = agents.offering(self.owner), agents.offering(self.owner)
        self.identity = agents.identity(self.owner, self.first)
        self.subscription, _ = registration.register_subscription(self.identity, "order", self.presented)
        self.queue, _ = registration.create_queue(self.subscription, self.first, "order", self.presented)
        self.other_queue, _ = registration.create_queue(self.subscription, self.second, "order", self.presented)
        self.consumer, _ = registration.register_consumer(
            agents.identity(self.owner, self.second), self.presented, None
        )
        self.vhost = self.owner.uuid.hex
        self.username = self.subscription.rmq_username
        self.of_consumer = {self.consumer.queue_name}, {self.consumer.rmq_username}


@pytest.fixture
def registered(agents):
    return Registrations(agents)


def write_due(kind, *names, vhost=""):
    due_at = timezone.now() - timedelta(seconds=1)
    removals.write([Removal(kind=kind, vhost=vhost, name=name) for name in names], due_at=due_at)


@contextmanager
def logged_in(broker, vhost, username, key):
    """Give an open connection of a RabbitMQ user."""
    opened = Amqp(url_for(broker, username, key), vhost).connection
    try:
        yield opened
    finally:
        if opened.is_open:
            opened.close()


def is_closed(opened):
    """Return whether the broker closes a connection within 5 seconds."""
    try:
        opened.process_data_events(5)
    except pika.exceptions.AMQPError:
        return True
    return False


def on_broker(agents, registered):
    """Return the queues of the owner's vhost without the dead-letter queue, and the remaining logins."""
    there = set(agents.queues(registered.vhost)) - {DEAD_LETTER_QUEUE} if registered.vhost in agents.vhosts() else None
    return there, agents.users() & {registered.subscription.rmq_username, registered.consumer.rmq_username}


def many_queues(agents, count):
    """Return a subscription with this many queue rows, without queues on the broker: see declare_all."""
    owner = agents.owner()
    offering = agents.offering(owner)
    identity = agents.identity(owner, offering)
    subscription = EventSubscription.objects.create(owner=owner, identity=identity, object_type="order")
    offerings = Offering.objects.bulk_create(Offering(name=f"many {number}") for number in range(count - 1))
    SubscriptionQueue.objects.bulk_create(
        SubscriptionQueue(
            subscription=subscription,
            offering=one,
            object_type="order",
            vhost=owner.uuid.hex,
            queue_name=f"subscription_{subscription.uuid.hex}_offering_{one.uuid.hex}_order",
            state=Registration.READY,
        )
        for one in (offering, *offerings)
    )
    Consumer.objects.create(identity=identity, vhost=owner.uuid.hex, queue_name=f"consumer_{uuid.uuid4().hex}")
    AgentVhost.objects.create(owner=owner, name=owner.uuid.hex, ready=True)
    return subscription


def declare_all(subscription, management):
    vhost = subscription.owner.uuid.hex
    management.create_vhost(vhost)
    for name in subscription.queues.values_list("queue_name", flat=True):
        management.declare_queue(vhost, name)
    return vhost


# Cascades


# What is deleted, and which queues and logins remain.
CASCADES = [
    ("queue", {"other_queue", "consumer"}, {"subscription", "consumer"}),
    ("subscription", {"consumer"}, {"consumer"}),
    ("consumer", {"queue", "other_queue"}, {"subscription"}),
    ("identity", {"consumer"}, {"consumer"}),
    ("second", {"queue"}, {"subscription"}),
    ("owner", None, set()),
]


@pytest.mark.parametrize(("what", "queues", "logins"), CASCADES)
def test_deleting_a_row_deletes_its_queues_and_logins_only(registered, agents, what, queues, logins):
    getattr(registered, what).delete()
    assert on_broker(agents, registered) == (
        None if queues is None else {getattr(registered, name).queue_name for name in queues},
        {getattr(registered, name).rmq_username for name in logins},
    )
    assert not Removal.objects.exists()


def test_deleting_several_owners_deletes_their_vhosts(agents):
    settings = Registrations(agents), Registrations(agents)
    with counted_requests() as sent:
        Owner.objects.filter(pk__in=[registered.owner.pk for registered in settings]).delete()
    assert len(sent) == 6
    assert [on_broker(agents, registered) for registered in settings] == [(None, set())] * 2


def test_a_collector_without_origin_deletes_queues_and_passwords(registered, agents):
    collector = Collector(using="default")
    collector.collect([registered.subscription, *AuthToken.objects.none()])
    collector.delete()
    assert on_broker(agents, registered) == registered.of_consumer
    collector = Collector(using="default")
    collector.collect([registered.presented.token])
    collector.delete()
    assert not Removal.objects.exists()
    registered.consumer.refresh_from_db()
    assert (registered.consumer.token, registered.consumer.password_set) == (None, False)


def test_deleting_a_subscription_closes_its_connections(registered, broker):
    with logged_in(broker, registered.vhost, registered.username, registered.presented.key) as opened:
        opened.channel().basic_consume(registered.queue.queue_name, lambda *message: None)
        registered.subscription.delete()
        assert is_closed(opened)
    assert not can_log_in(broker, registered.vhost, registered.username, registered.presented.key)


# Transactions


def test_a_deletion_is_carried_out_after_the_commit_unless_its_savepoint_was_rolled_back(registered, agents):
    with counted_requests() as sent, transaction.atomic():
        with transaction.atomic():
            registered.subscription.delete()
            transaction.set_rollback(True)
        registered.consumer.delete()
        assert sent == []
    assert on_broker(agents, registered) == (
        {registered.queue.queue_name, registered.other_queue.queue_name},
        {registered.username},
    )


# Concurrent registrations


def add_queue(subscription, offering):
    return SubscriptionQueue.objects.create(
        subscription=subscription, offering=offering, object_type="resource", vhost="v", queue_name=uuid.uuid4().hex
    )


@pytest.mark.parametrize("what", ["subscription", "identity", "owner", "subscriptions"])
def test_a_registration_during_a_deletion_fails(registered, what):
    began = []

    def register_once_the_children_were_read(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if not began and sql.startswith("SELECT") and 'FROM "agents_subscriptionqueue"' in sql:
            began.append(in_background(add_queue, registered.subscription, registered.second))
            wait_until_blocked(began[0])
        return result

    rows = (
        EventSubscription.objects.filter(owner=registered.owner)
        if what == "subscriptions"
        else getattr(registered, what)
    )
    with connection.execute_wrapper(register_once_the_children_were_read):
        gone = deletions.delete(rows)
    assert isinstance(began[0].exception(), IntegrityError)
    assert gone["agents.SubscriptionQueue"] == 2
    assert not EventSubscription.objects.exists()
    assert not Removal.objects.exists()


def test_a_deletion_does_not_wait_for_rows_of_others(registered, agents):
    if not connection.features.has_select_for_update:
        pytest.skip("this database has one writer at a time")
    other = agents.offering(agents.owner())
    with transaction.atomic():
        Offering.objects.select_for_update().get(pk=other.pk)
        in_background(deletions.delete, registered.owner).result(30)
    assert not Owner.objects.filter(pk=registered.owner.pk).exists()


CONFLICT = IntegrityError("there is something below it")


@pytest.mark.parametrize(
    ("error", "failures", "is_deleted"),
    [(CONFLICT, 2, True), (CONFLICT, deletions.MAX_ATTEMPTS, False), (OperationalError("the disk is full"), 1, False)],
)
def test_a_deletion_is_retried_twice_after_a_conflict_only(registered, agents, error, failures, is_deleted):
    before = on_broker(agents, registered)
    failed = []

    def fail(execute, sql, params, many, context):
        if sql.startswith('DELETE FROM "agents_agentidentity"') and len(failed) < failures:
            failed.append(sql)
            raise error
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail), contextlib.nullcontext() if is_deleted else pytest.raises(type(error)):
        deletions.delete(registered.identity)
    assert len(failed) == failures
    assert on_broker(agents, registered) == (registered.of_consumer if is_deleted else before)
    assert not Removal.objects.exists()


def test_deleting_a_deleted_row_is_no_error(registered, agents):
    queue = SubscriptionQueue.objects.get(pk=registered.queue.pk)
    assert deletions.delete(queue) == {"agents.SubscriptionQueue": 1}
    assert deletions.delete(queue) == {}


def test_a_deletion_in_a_deadlock_is_retried(registered, agents):
    if not connection.features.has_select_for_update:
        pytest.skip("this database has one writer at a time")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL deadlock_timeout = '60s'")  # so that PostgreSQL ends the other transaction
        SubscriptionQueue.objects.select_for_update().get(pk=registered.queue.pk)
        deletion = in_background(deletions.delete, registered.subscription)
        wait_until_blocked(deletion)
        EventSubscription.objects.select_for_update(no_key=True).get(pk=registered.subscription.pk)
    deletion.result()
    assert on_broker(agents, registered)[0] == {registered.consumer.queue_name}


def test_a_queue_and_a_cascade_with_it_are_deleted_concurrently(registered, agents):
    if not connection.features.has_select_for_update:
        pytest.skip("this database has one writer at a time")
    consumer, _ = registration.register_consumer(registered.identity, registered.presented, None)
    row_is_deleted, may_continue = threading.Event(), threading.Event()

    def stop_before_the_removal(execute, sql, params, many, context):
        if sql.startswith('INSERT INTO "core_removal"'):
            row_is_deleted.set()
            assert may_continue.wait(30)
        return execute(sql, params, many, context)

    def delete_one():
        with connection.execute_wrapper(stop_before_the_removal):
            return registered.queue.delete()[0]

    deletion = in_background(delete_one)
    assert row_is_deleted.wait(30)
    # Like a cascade that collects consumers first.
    collector = Collector(using="default", origin=registered.identity)
    collector.collect([consumer])
    collector.collect([registered.identity])
    cascade = in_background(collector.delete)
    wait_until_blocked(cascade)
    may_continue.set()
    cascade.result()
    assert deletion.result() == 1
    assert on_broker(agents, registered)[0] == {registered.consumer.queue_name}


@pytest.mark.parametrize("at_least", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_concurrent_registrations_and_deletions_cause_no_database_error(agents, at_least):
    broken, done = [], Counter()
    began = time.monotonic()

    def is_over():
        """Return whether the time is up and a registration succeeded; on a busy machine most lose their rows first."""
        seconds = time.monotonic() - began
        return seconds > 30 or (seconds > at_least and done["register"] > 0)

    def register():
        owner = Owner.objects.order_by("?").first() or agents.owner()
        offering, presented = agents.offering(owner), agents.token(owner)
        identity = AgentIdentity.objects.filter(owner=owner).first() or agents.identity(owner, offering, "agent")
        subscription, _ = registration.register_subscription(identity, "order", presented)
        registration.create_queue(subscription, offering, "order", presented)
        registration.register_consumer(identity, presented, None)

    def remove():
        time.sleep(random.random() / 2)  # slower than a registration, which fails if its rows are deleted
        model = random.choice([SubscriptionQueue, EventSubscription, AgentIdentity, Consumer, Owner])
        row = model.objects.order_by("?").first()
        if row is not None:
            deletions.delete(row)

    def repeat(do):
        while not is_over():
            try:
                do()
            except DatabaseError as error:
                if not isinstance(error, IntegrityError) or do is remove:  # the test's owner was deleted meanwhile
                    broken.append((do.__name__, error))
            except (BrokerError, PermissionDenied, ObjectDoesNotExist, ValueError):
                done["refused"] += 1
            else:
                done[do.__name__] += 1

    in_parallel(*[partial(repeat, register), partial(repeat, remove)] * 3)
    assert broken == []
    assert done["register"]
    assert done["remove"]


# Cost


def statements_of(delete):
    """Return the statements of a deletion and its callback, without Django's batches of a hundred rows."""
    with CaptureQueriesContext(connection) as captured:
        delete()
    return [query["sql"] for query in captured if not query["sql"].startswith('DELETE FROM "agents_subscriptionqueue"')]


@pytest.mark.parametrize("are_expired", [False, True])
def test_the_statements_of_removing_passwords_do_not_grow(agents, settings, are_expired):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    ContentType.objects.get_for_model(AuthToken)  # the audit trail caches it per process
    counts = []
    for count in (3, 30):
        owner = agents.owner()
        for _ in range(count):
            EventSubscription.objects.create(owner=owner, token=agents.token(owner).token, password_set=True)
        if are_expired:
            AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
            counts.append(len(statements_of(agents_removals.revoke_expired_passwords)))
        else:
            counts.append(len(statements_of(partial(tokens.revoke_tokens_of, owner))))
        assert not EventSubscription.objects.exclude(token=None, password_set=False).exists()
        assert Removal.objects.filter(kind=KIND.PASSWORD).count() == count
        Removal.objects.all().delete()
    assert counts[0] == counts[1]


# Stored queues


def test_queues_of_a_deleted_subscription_are_gone_with_an_event(registered):
    there = stored_queue(registered.queue.queue_name, vhost=registered.vhost, state="warned", ready=7, unacknowledged=0)
    kept = stored_queue(registered.consumer.queue_name, vhost=registered.vhost)
    registered.subscription.delete()
    there.refresh_from_db()
    kept.refresh_from_db()
    assert (there.state, there.length, kept.state) == ("gone", None, "ok")
    event = QueueEvent.objects.get()
    assert (event.kind, event.queue, event.details["length"]) == ("removed", there, 7)


def test_all_queues_of_a_deleted_vhost_are_gone(registered):
    for name in (registered.queue.queue_name, DEAD_LETTER_QUEUE, "somebody's own"):
        stored_queue(name, vhost=registered.vhost)
    elsewhere = stored_queue("elsewhere", vhost="/")
    registered.owner.delete()
    assert list(Queue.objects.exclude(state="gone")) == [elsewhere]
    assert QueueEvent.objects.filter(kind="removed").count() == 3


# Outages of the broker


def test_without_a_configured_broker_removals_wait(registered, settings):
    settings.RABBITMQ_MANAGEMENT_URL = ""
    registered.queue.delete()
    removal = Removal.objects.get()
    assert (removal.claim, removal.attempts) == (None, 1)
    assert "no broker is configured" in removal.last_error


def test_removals_stop_at_an_outage_and_continue_later(agents, management, broker, settings, monkeypatch):
    subscription = many_queues(agents, 60)
    vhost = declare_all(subscription, management)
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        real, asked = Session.delete_queue, []

        def counted(self, *arguments, **options):
            asked.append(arguments)
            if len(asked) == 20:
                proxy.close_next(1000)
            return real(self, *arguments, **options)

        monkeypatch.setattr(Session, "delete_queue", counted)
        subscription.delete()
        assert len(asked) < 20 + removals.MAX_PARALLEL
        left = Removal.objects.count()
        assert left == len(agents.queues(vhost)) > 30
        # Removals whose request got no answer stay claimed, so that no registration can cancel them.
        unknown = Removal.objects.filter(claim__isnull=False)
        assert 0 < unknown.count() <= removals.MAX_PARALLEL
        assert set(unknown.values_list("attempts", flat=True)) == {1}
        assert not Removal.objects.filter(due_at__lt=timezone.now() + timedelta(seconds=30)).exists()
        proxy.forward()
        make_removals_due()
        proxy.close_next(0)
        assert removals.run_due(50) == left
    assert not Removal.objects.exists()
    assert agents.queues(vhost) == {}


def test_a_removal_that_breaks_the_broker_does_not_block_others(registered, agents, monkeypatch):
    real = Management.delete_user

    def failing(self, name):
        if name == registered.username:
            raise removals.BrokerUnavailable("answered 500")
        real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Management, "delete_user", failing)
        registered.subscription.delete()
        run_removals()
        # A minute later all others are due, but not this one.
        Removal.objects.update(due_at=F("due_at") - timedelta(seconds=65))
        removals.run_due(50)
    assert [(removal.name, removal.attempts) for removal in Removal.objects.all()] == [(registered.username, 2)]
    assert on_broker(agents, registered)[0] == {registered.consumer.queue_name}


def test_a_refused_removal_is_recorded_and_retried(registered, agents, broker, caplog):
    with closing(pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_url}/{registered.vhost}"))) as opened:
        channel = opened.channel()
        channel.queue_delete(registered.queue.queue_name)
        channel.queue_declare(registered.queue.queue_name, exclusive=True)
        with caplog.at_level(logging.WARNING, "core.removals"):
            registered.subscription.delete()
        removal = Removal.objects.get()
        assert (removal.name, removal.attempts, removal.claim) == (registered.queue.queue_name, 1, None)
        assert "exclusive" in removal.last_error
        assert registered.queue.queue_name in caplog.text
        waits = []
        for _ in range(3):
            run_removals()
            removal.refresh_from_db()
            waits.append(round((removal.due_at - timezone.now()).total_seconds() / 60))
        assert waits == [2, 4, 5]
    assert on_broker(agents, registered)[0] == {registered.consumer.queue_name}
    assert run_removals() == 1


def test_removals_survive_a_database_outage(registered, caplog):
    def fail(execute, sql, params, many, context):
        if sql.startswith("SELECT"):
            raise OperationalError("the database is away")
        return execute(sql, params, many, context)

    write_due(KIND.QUEUE, "q", vhost="nowhere")
    with connection.execute_wrapper(fail), caplog.at_level(logging.ERROR, "core.removals"):
        assert removals.run_due() == 0
    assert "the database is away" in caplog.text
    assert removals.run_due() == 1


# Crashes and concurrency


def test_a_callback_carries_out_the_removals_of_its_own_transaction_only(registered):
    write_due(KIND.QUEUE, "others", vhost=registered.vhost)
    registered.queue.delete()
    assert [removal.name for removal in Removal.objects.all()] == ["others"]


def test_removals_of_a_process_killed_halfway_are_finished_after_the_claim(registered):
    there = stored_queue(registered.queue.queue_name, vhost=registered.vhost)
    with raising(tombstones, "forget", Killed), pytest.raises(Killed):
        registered.subscription.delete()
    assert removals.run_due(50) == 0
    soonest = timezone.now() + timedelta(seconds=locks.lock_seconds())
    assert Removal.objects.filter(due_at__gt=soonest, due_at__lt=soonest + timedelta(seconds=60)).count() == 3
    assert run_removals() == 3
    there.refresh_from_db()
    assert there.state == "gone"


def test_users_are_removed_before_queues_even_in_another_batch(guarded, monkeypatch):
    monkeypatch.setattr(removals, "BATCH_SIZE", 1)
    name = uuid.uuid4().hex
    write_due(KIND.QUEUE, "queue", vhost=guarded)
    write_due(KIND.USER, name)
    with counted_requests() as sent:
        assert removals.run_due(50) == 2
    assert [request for request in sent if request.startswith("DELETE")] == [
        f"DELETE /api/users/{name}",
        f"DELETE queue in {guarded}",
    ]


def test_concurrent_workers_remove_each_queue_once(agents, management):
    subscription = many_queues(agents, 40)
    vhost = declare_all(subscription, management)
    names = list(subscription.queues.values_list("queue_name", flat=True))
    subscription.queues.all()._raw_delete("default")
    write_due(KIND.QUEUE, *names, vhost=vhost)
    with counted_requests() as sent:
        done = in_parallel(*[removals.run_due] * 3)
    assert sum(done) == len(sent) == len(set(sent)) == 40
    assert agents.queues(vhost) == {}


def test_removals_of_registered_queues_and_users_are_cancelled(registered, agents):
    other, _ = registration.register_consumer(agents.identity(registered.owner), registered.presented, None)
    before = on_broker(agents, registered)
    removals.write(
        [
            Removal(kind=KIND.QUEUE, vhost=registered.vhost, name=registered.queue.queue_name),
            Removal(kind=KIND.QUEUE, vhost=registered.vhost, name=registered.consumer.queue_name),
            Removal(kind=KIND.USER, name=registered.username),
            Removal(kind=KIND.USER, name=registered.consumer.rmq_username),
            Removal(kind=KIND.USER, name=other.rmq_username),
            Removal(kind=KIND.PASSWORD, name=registered.username),
            Removal(kind=KIND.VHOST, name=registered.vhost),
        ]
    )
    assert not Removal.objects.exists()
    assert on_broker(agents, registered) == before
    assert other.rmq_username in agents.users()


def test_a_registration_before_the_claim_cancels_the_removal(registered, agents, settings, broker):
    settings.RABBIT_URL = AWAY_AMQP
    registered.queue.delete()
    settings.RABBIT_URL = broker.amqp_url
    make_removals_due()

    def register():
        again, _ = registration.create_queue(registered.subscription, registered.first, "order", registered.presented)
        assert again.state == Registration.READY

    with calling_first(removals, "_claim", register):
        assert removals.run_due() == 0
    assert not Removal.objects.exists()
    assert registered.queue.queue_name in on_broker(agents, registered)[0]


def test_a_removal_requested_during_a_removal_is_done_again(registered, monkeypatch):
    asked = []
    real = Session.delete_queue

    def again(self, name, **options):
        asked.append(name)
        if len(asked) == 1:
            write_due(KIND.QUEUE, name, vhost=self.vhost)
            connection.close()
        real(self, name, **options)

    monkeypatch.setattr(Session, "delete_queue", again)
    registered.queue.delete()
    assert asked == [registered.queue.queue_name] * 2
    assert not Removal.objects.exists()


def test_a_locked_user_is_removed_later(registered, agents):
    with locks.lock(registered.username):
        registered.subscription.delete()
        assert [removal.kind for removal in Removal.objects.all()] == ["user"]
        assert registered.username in agents.users()
    assert run_removals() == 1
    assert registered.username not in agents.users()


def test_no_removal_is_started_after_the_time_limit(registered, agents):
    before = on_broker(agents, registered)
    write_due(KIND.QUEUE, "q", vhost=registered.vhost)
    assert removals.run_due(0) == 0
    batch = removals._claim(removals._is_due(), 0, 0)
    batch.carry_out()
    removal = Removal.objects.get()
    assert (batch.removed, removal.claim, removal.attempts) == ([], None, 0)
    assert removal.due_at <= timezone.now() + timedelta(seconds=1)
    assert on_broker(agents, registered) == before


# Writing removals


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_if_unused_false_is_never_overwritten(agents, order):
    later = timezone.now() + timedelta(minutes=5)
    for if_unused in order:
        removals.write([Removal(kind=KIND.QUEUE, vhost="v", name="q", if_unused=if_unused)], due_at=later)
    assert Removal.objects.get().if_unused is False
    both = [Removal(kind=KIND.QUEUE, vhost="v", name="both", if_unused=if_unused) for if_unused in order]
    removals.write(both, due_at=later)
    assert Removal.objects.get(name="both").if_unused is False


def test_writing_a_removal_again_resets_it(agents, django_assert_num_queries):
    later = timezone.now() + timedelta(minutes=30)
    Removal.objects.create(
        kind=KIND.QUEUE, vhost="v", name="q", claim=uuid.uuid4(), attempts=5, last_error="away", due_at=later
    )
    with transaction.atomic():
        with django_assert_num_queries(3):  # a savepoint, and one statement
            removals.write([Removal(kind=KIND.QUEUE, vhost="v", name="q"), Removal(kind=KIND.QUEUE, name="r")])
        removal = Removal.objects.get(name="q")
        assert (removal.claim, removal.attempts, removal.last_error) == (None, 0, "")
        assert removal.due_at <= timezone.now()


# Tokens


def test_revoking_a_token_removes_its_logins_passwords_and_connections(registered, agents, broker):
    key = registered.presented.key
    other = agents.token(registered.owner)
    with (
        logged_in(broker, registered.vhost, registered.username, key) as first,
        logged_in(broker, registered.vhost, registered.consumer.rmq_username, key) as second,
        counted_requests() as sent,
    ):
        tokens.revoke_token(registered.presented.token)
        assert is_closed(first)
        assert is_closed(second)
    assert len(sent) == 6
    assert not can_log_in(broker, registered.vhost, registered.username, key)
    assert not can_log_in(broker, registered.vhost, registered.consumer.rmq_username, key)
    for login in (registered.subscription, registered.consumer):
        login.refresh_from_db()
        assert (login.token, login.password_set) == (None, False)
    assert on_broker(agents, registered)[0] > {registered.queue.queue_name}
    # The next presented token is the new password.
    registration.create_queue(registered.subscription, registered.first, "order", other)
    assert can_log_in(broker, registered.vhost, registered.username, other.key)


def expire(token):
    AuthToken.objects.filter(pk=token.pk).update(expiry=timezone.now() - timedelta(days=1))


def deactivate_owner(token):
    Owner.objects.filter(pk=token.user_id).update(is_active=False)


@pytest.mark.parametrize("end", [expire, deactivate_owner])
def test_the_task_removes_the_passwords_of_expired_tokens_and_deactivated_owners(registered, agents, broker, end):
    end(registered.presented.token)
    with logged_in(broker, registered.vhost, registered.username, registered.presented.key) as opened:
        agents_removals.revoke_expired_passwords()
        assert is_closed(opened)
    for username in (registered.username, registered.consumer.rmq_username):
        assert not can_log_in(broker, registered.vhost, username, registered.presented.key)
    assert on_broker(agents, registered)[0] > {registered.queue.queue_name}
    assert AuthToken.objects.filter(pk=registered.presented.token.pk).exists()
    assert not EventSubscription.objects.filter(token__isnull=False).exists()
    assert agents_removals.revoke_expired_passwords() == 0


def test_revoking_other_tokens_keeps_a_password(registered, agents, broker):
    tokens.revoke_token(agents.token(registered.owner).token)
    tokens.revoke_tokens_of(agents.owner())
    assert agents_removals.revoke_expired_passwords() == 0
    assert not Removal.objects.exists()
    assert can_log_in(broker, registered.vhost, registered.username, registered.presented.key)


def test_a_login_with_a_newer_token_keeps_its_password(registered, agents, broker, settings):
    other = agents.token(registered.owner)
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    tokens.revoke_token(registered.presented.token)
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    registration.create_queue(registered.subscription, registered.first, "order", other)
    with logged_in(broker, registered.vhost, registered.username, other.key) as opened:
        Removal.objects.update(attempts=0)
        make_removals_due()
        finish_removals()
        opened.process_data_events(0.5)
    assert can_log_in(broker, registered.vhost, registered.username, other.key)
    assert not Removal.objects.exists()
    registered.subscription.refresh_from_db()
    assert registered.subscription.password_set


def test_a_possibly_removed_password_is_set_by_the_next_registration(registered, agents, broker):
    write_due(KIND.PASSWORD, registered.username)
    Removal.objects.update(attempts=1)
    removals.run_due(50)
    registered.subscription.refresh_from_db()
    assert not registered.subscription.password_set
    registered.presented.token.refresh_from_db()
    registration.create_queue(registered.subscription, registered.first, "order", registered.presented)
    assert can_log_in(broker, registered.vhost, registered.username, registered.presented.key)


LOST = BrokerUnavailable("no answer came in time", timed_out=True)


def revoke(token):
    tokens.revoke_token(token)


def settle():
    for _ in range(3):
        make_removals_due()
        agents_removals.revoke_expired_passwords()
        finish_removals()
    assert not Removal.objects.exists()


def present_during_outage(settings, registered, presented):
    settings.RABBITMQ_MANAGEMENT_URL, working = AWAY, settings.RABBITMQ_MANAGEMENT_URL
    with pytest.raises(BrokerUnavailable):
        registration.register_subscription(registered.identity, "order", presented)
    settings.RABBITMQ_MANAGEMENT_URL = working


def present_and_be_killed(settings, registered, presented):
    """Present a token in a process that is killed before the request to the broker."""
    with raising(Management, "put_user", Killed), pytest.raises(Killed):
        registration.register_subscription(registered.identity, "order", presented)


@pytest.mark.parametrize(
    ("fail", "end"),
    [(present_during_outage, revoke), (present_during_outage, expire), (present_and_be_killed, revoke)],
)
def test_a_token_ended_after_a_failed_change_is_no_longer_the_password(fail, end, registered, agents, broker, settings):
    other = agents.token(registered.owner)
    fail(settings, registered, other)
    registered.subscription.refresh_from_db()
    assert (registered.subscription.token, registered.subscription.next_token) == (
        registered.presented.token,
        other.token,
    )
    assert can_log_in(broker, registered.vhost, registered.username, registered.presented.key)
    end(registered.presented.token)
    settle()
    assert not can_log_in(broker, registered.vhost, registered.username, registered.presented.key)
    registered.subscription.refresh_from_db()
    assert (registered.subscription.token, registered.subscription.password_set) == (None, False)
    registration.register_subscription(registered.identity, "order", other)
    assert can_log_in(broker, registered.vhost, registered.username, other.key)


@pytest.mark.parametrize("end", [revoke, expire])
def test_a_token_ended_after_a_lost_answer_is_no_longer_the_password(end, registered, agents, broker):
    other = agents.token(registered.owner)
    with raising(Management, "put_user", LOST, after=True), pytest.raises(BrokerUnavailable):
        registration.register_subscription(registered.identity, "order", other)
    assert can_log_in(broker, registered.vhost, registered.username, other.key)
    end(other.token)
    settle()
    assert not can_log_in(broker, registered.vhost, registered.username, other.key)
    registered.subscription.refresh_from_db()
    assert (registered.subscription.next_token, registered.subscription.password_set) == (None, False)
    registration.register_subscription(registered.identity, "order", registered.presented)
    assert can_log_in(broker, registered.vhost, registered.username, registered.presented.key)


@pytest.mark.parametrize("end", [revoke, expire])
def test_a_token_with_a_lost_answer_is_removed_though_a_third_was_presented(end, registered, agents, broker, settings):
    second, third = agents.token(registered.owner), agents.token(registered.owner)
    with raising(Management, "put_user", LOST, after=True), pytest.raises(BrokerUnavailable):
        registration.register_subscription(registered.identity, "order", second)
    present_during_outage(settings, registered, third)
    end(second.token)
    settle()
    for presented in (registered.presented, second, third):
        assert not can_log_in(broker, registered.vhost, registered.username, presented.key)
    registration.register_subscription(registered.identity, "order", third)
    assert can_log_in(broker, registered.vhost, registered.username, third.key)


def test_the_third_token_stays_the_password_after_a_failed_second(registered, agents, broker, settings):
    second, third = agents.token(registered.owner), agents.token(registered.owner)
    present_during_outage(settings, registered, second)
    registration.register_subscription(registered.identity, "order", third)
    settle()
    assert can_log_in(broker, registered.vhost, registered.username, third.key)
    registered.subscription.refresh_from_db()
    # A late request may still set the second token, so the next registration sets the password again.
    assert (registered.subscription.token, registered.subscription.password_set) == (third.token, False)


def test_a_pending_password_removal_survives_a_failed_change(registered, agents, broker, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    tokens.revoke_token(registered.presented.token)
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    present_during_outage(settings, registered, agents.token(registered.owner))
    settle()
    assert not can_log_in(broker, registered.vhost, registered.username, registered.presented.key)
    registered.subscription.refresh_from_db()
    assert not registered.subscription.password_set


def test_an_expired_token_set_during_the_task_is_removed_by_the_next(registered, agents, broker, monkeypatch):
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    other = agents.token(registered.owner)
    registration.register_consumer(registered.identity, other, None)
    expire(other.token)
    username, registrations = agents_removals._username, []

    def register_meanwhile(value):
        if not registrations:
            registrations.append(in_background(registration.register_subscription, registered.identity, "order", other))
            wait_until_blocked(registrations[0])
        return username(value)

    monkeypatch.setattr(agents_removals, "_username", register_meanwhile)
    agents_removals.revoke_expired_passwords()
    registrations[0].result()
    agents_removals.revoke_expired_passwords()
    settle()
    assert not can_log_in(broker, registered.vhost, registered.username, other.key)
    registered.subscription.refresh_from_db()
    assert (registered.subscription.token, registered.subscription.password_set) == (None, False)


def test_removing_missing_passwords_queues_and_users_succeeds_and_creates_no_user(registered, agents, management):
    management.delete_user(registered.username)
    management.delete_queue(registered.vhost, registered.queue.queue_name)
    tokens.revoke_token(registered.presented.token)
    registered.subscription.delete()
    assert registered.username not in agents.users()
    assert not Removal.objects.exists()


# Removals of the sweep


def test_the_outcome_has_removed_kept_and_refused_queues_without_others(registered, agents, management, broker):
    with closing(pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_url}/{registered.vhost}"))) as opened:
        channel = opened.channel()
        channel.queue_declare("subscription_mine", exclusive=True)
        names = ("subscription_unused", "subscription_read")
        for name in names:
            management.declare_queue(registered.vhost, name)
        channel.basic_consume("subscription_read", lambda *message: None)
        removals.write(
            [Removal(kind=KIND.QUEUE, vhost=registered.vhost, name=name, if_unused=True) for name in names],
            due_at=timezone.now() - timedelta(seconds=1),
        )
        write_due(KIND.QUEUE, "subscription_mine", "others", vhost=registered.vhost)
        outcome = removals.run(Removal.objects.exclude(name="others").values_list("id", flat=True))
        assert (outcome.removed, outcome.kept, outcome.unreachable) == (
            1,
            [(registered.vhost, "subscription_read")],
            False,
        )
        assert len(outcome.errors) == 1
        assert "subscription_mine" in outcome.errors[0]
        assert {removal.name for removal in Removal.objects.all()} == {"subscription_mine", "others"}
        assert "subscription_read" in agents.queues(registered.vhost)
