"""What goes from the broker when rows go: with the deletion or not at all, once, and in the end always."""

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
from urllib.parse import quote, urlsplit

import pika
import pytest
from django.contrib import admin
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction
from django.db.models import F
from django.db.models.deletion import Collector
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts import tokens
from accounts.models import AuthToken, Owner
from agents import deletions, registration
from agents import removals as agents_removals
from agents.models import (
    AgentIdentity,
    AgentVhost,
    Consumer,
    EventSubscription,
    Offering,
    Registration,
    SubscriptionQueue,
)
from agents.removals import pending
from core import locks, removals
from core.models import Removal
from core.tasks import finish_removals
from queues import tombstones
from queues.models import Queue, QueueEvent
from rabbit.management import BrokerError, BrokerUnavailable, Management
from rabbit.names import DEAD_LETTER_QUEUE
from tests.agents import make_removals_due
from tests.proxy import Proxy
from tests.toolbox import AWAY, Killed, can_log_in, in_background, in_parallel, stored_queue, wait_until_blocked
from tools.benchmarks.passes import counted_requests

KIND = Removal.Kind


class Setting:
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


@pytest.fixture
def made(agents):
    return Setting(agents)


@contextmanager
def logged_in(broker, vhost, username, key):
    """Give a live connection of a RabbitMQ user."""
    address = urlsplit(broker.amqp_url)
    login = f"amqp://{username}:{key}@{address.hostname}:{address.port}/{quote(vhost, safe='')}"
    opened = pika.BlockingConnection(pika.URLParameters(login))
    try:
        yield opened
    finally:
        if opened.is_open:
            opened.close()


def is_closed(opened):
    """Return whether the broker has closed a connection, or does so within some seconds."""
    try:
        opened.process_data_events(5)
    except pika.exceptions.AMQPError:
        return True
    return False


def on_broker(agents, made):
    """Return the queues that the owner's vhost has beside the dead-letter queue, and which of their logins are left."""
    there = set(agents.queues(made.vhost)) - {DEAD_LETTER_QUEUE} if made.vhost in agents.vhosts() else None
    return there, agents.users() & {made.subscription.rmq_username, made.consumer.rmq_username}


def many_queues(agents, count):
    """Give a subscription with so many queues, which are rows alone."""
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


# Each cascade


def test_a_queue_goes_with_its_row_and_nothing_else_does(made, agents):
    made.queue.delete()
    left = {made.other_queue.queue_name, made.consumer.queue_name}
    assert on_broker(agents, made) == (left, {made.username, made.consumer.rmq_username})
    assert not Removal.objects.exists()


def test_a_subscription_goes_with_its_user_and_its_queues(made, agents):
    made.subscription.delete()
    assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})
    assert not Removal.objects.exists()


def test_a_consumer_goes_with_its_user_and_its_queue(made, agents):
    made.consumer.delete()
    assert on_broker(agents, made) == ({made.queue.queue_name, made.other_queue.queue_name}, {made.username})
    assert not Removal.objects.exists()


def test_an_identity_goes_with_all_it_registered(made, agents):
    made.identity.delete()
    assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})
    AgentIdentity.objects.all().delete()
    assert on_broker(agents, made) == (set(), set())
    assert not Removal.objects.exists()


def test_an_offering_goes_with_the_queues_that_are_about_it(made, agents):
    made.second.delete()
    assert on_broker(agents, made) == ({made.queue.queue_name}, {made.username})
    assert not Removal.objects.exists()


def test_an_owner_goes_with_the_vhost_and_all_in_it(made, agents):
    made.owner.delete()
    assert on_broker(agents, made) == (None, set())
    assert not Removal.objects.exists()


def test_with_a_vhost_its_queues_go_without_a_request_for_each(made):
    with counted_requests() as sent:
        made.owner.delete()
    assert sorted(request.rpartition("/")[0] for request in sent) == ["DELETE /api/users"] * 2 + ["DELETE /api/vhosts"]


def test_a_queryset_in_autocommit_takes_the_queues_along(made, agents):
    SubscriptionQueue.objects.filter(subscription=made.subscription).delete()
    assert on_broker(agents, made)[0] == {made.consumer.queue_name}


def test_several_owners_lose_their_vhosts_in_one_deletion(agents):
    settings = Setting(agents), Setting(agents)
    with counted_requests() as sent:
        Owner.objects.filter(pk__in=[made.owner.pk for made in settings]).delete()
    assert len(sent) == 6
    assert [on_broker(agents, made) for made in settings] == [(None, set())] * 2


def test_what_the_admin_deletes_as_selected_goes_too(made, agents, rf):
    model_admin = admin.ModelAdmin(EventSubscription, admin.site)
    model_admin.delete_queryset(rf.post("/"), EventSubscription.objects.filter(pk=made.subscription.pk))
    assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})


def test_a_deletion_of_unknown_origin_takes_the_queues_along(made, agents):
    collector = Collector(using="default")
    collector.collect([made.subscription, *AuthToken.objects.none()])
    collector.delete()
    assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})
    collector = Collector(using="default")
    collector.collect([made.presented.token])
    collector.delete()
    assert not Removal.objects.exists()
    made.consumer.refresh_from_db()
    assert (made.consumer.token, made.consumer.password_set) == (None, False)


def test_live_connections_go_with_the_subscription(made, broker):
    with logged_in(broker, made.vhost, made.username, made.presented.key) as opened:
        opened.channel().basic_consume(made.queue.queue_name, lambda *message: None)
        made.subscription.delete()
        assert is_closed(opened)
    assert not can_log_in(broker, made.vhost, made.username, made.presented.key)


# With the deletion, or not at all


def test_what_is_rolled_back_writes_nothing_and_removes_nothing(made, agents):
    before = on_broker(agents, made)
    with transaction.atomic():
        made.owner.delete()
        assert Removal.objects.count() == 6
        transaction.set_rollback(True)
    assert not Removal.objects.exists()
    assert removals.run_due(50) == 0
    assert on_broker(agents, made) == before


def test_a_savepoint_that_is_rolled_back_leaves_nothing(made, agents):
    with transaction.atomic():
        with transaction.atomic():
            made.subscription.delete()
            transaction.set_rollback(True)
        made.consumer.delete()
    assert on_broker(agents, made) == ({made.queue.queue_name, made.other_queue.queue_name}, {made.username})


def test_a_deletion_that_fails_on_the_way_leaves_nothing_to_a_later_one(made, agents):
    before = on_broker(agents, made)

    def fail(execute, sql, params, many, context):
        if sql.startswith("DELETE"):
            raise OperationalError("the disk is full")
        return execute(sql, params, many, context)

    with pytest.raises(OperationalError), connection.execute_wrapper(fail):
        made.identity.delete()
    assert removals.run_due(50) == 0
    assert on_broker(agents, made) == before
    made.identity.delete()
    assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})


def test_nothing_is_asked_of_the_broker_before_the_commit(made):
    with counted_requests() as sent, transaction.atomic():
        made.subscription.delete()
        assert sent == []
    assert len(sent) == 3


# While something is registered below it


class _Gave(Exception):
    """What PostgreSQL's driver raises, as far as it is looked at."""

    def __init__(self, pgcode):
        super().__init__(pgcode)
        self.pgcode = pgcode


def add_queue(subscription, offering):
    return SubscriptionQueue.objects.create(
        subscription=subscription, offering=offering, object_type="resource", vhost="v", queue_name=uuid.uuid4().hex
    )


@pytest.mark.parametrize("what", ["subscription", "identity", "owner", "subscriptions"])
def test_what_is_registered_below_a_row_that_is_just_being_deleted_finds_it_gone(made, what):
    began = []

    def register_once_the_children_were_read(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if not began and sql.startswith("SELECT") and 'FROM "agents_subscriptionqueue"' in sql:
            began.append(in_background(add_queue, made.subscription, made.second))
            wait_until_blocked(began[0])
        return result

    rows = EventSubscription.objects.filter(owner=made.owner) if what == "subscriptions" else getattr(made, what)
    with connection.execute_wrapper(register_once_the_children_were_read):
        gone = deletions.delete(rows)
    assert isinstance(began[0].exception(), IntegrityError)
    assert gone["agents.SubscriptionQueue"] == 2
    assert not EventSubscription.objects.exists()
    assert not Removal.objects.exists()


@pytest.mark.parametrize("pgcode", [None, deletions.DEADLOCK])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_deletion_that_another_change_gets_in_the_way_of_begins_again_twice_at_most(made, agents, failures, pgcode):
    before = on_broker(agents, made)
    failed = []

    def fail(execute, sql, params, many, context):
        if sql.startswith('DELETE FROM "agents_agentidentity"') and len(failed) < failures:
            failed.append(sql)
            if pgcode is None:
                raise IntegrityError("there is something below it")
            raise OperationalError("deadlock detected") from _Gave(pgcode)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail):
        if failures == deletions.MAX_ATTEMPTS:
            with pytest.raises((IntegrityError, OperationalError)):
                deletions.delete(made.identity)
            assert on_broker(agents, made) == before
        else:
            deletions.delete(made.identity)
            assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})
    assert len(failed) == failures
    assert not Removal.objects.exists()


def test_what_no_retry_can_cure_is_raised_at_once(made):
    tried = []

    def fail(execute, sql, params, many, context):
        if sql.startswith("DELETE"):
            tried.append(sql)
            raise OperationalError("the disk is full")
        return execute(sql, params, many, context)

    with pytest.raises(OperationalError, match="disk"), connection.execute_wrapper(fail):
        deletions.delete(made.identity)
    assert len(tried) == 1


def test_what_is_gone_already_is_deleted_without_an_error(made, agents):
    queue = SubscriptionQueue.objects.get(pk=made.queue.pk)
    assert deletions.delete(queue) == {"agents.SubscriptionQueue": 1}
    assert deletions.delete(queue) == {}


def test_a_deletion_that_waits_for_another_change_which_waits_for_it_is_done_all_the_same(made, agents):
    if not connection.features.has_select_for_update:
        pytest.skip("this database has one transaction at a time that writes")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL deadlock_timeout = '60s'")  # so that PostgreSQL ends the deletion, not this
        SubscriptionQueue.objects.select_for_update().get(pk=made.queue.pk)
        deletion = in_background(deletions.delete, made.subscription)
        wait_until_blocked(deletion)
        EventSubscription.objects.select_for_update(no_key=True).get(pk=made.subscription.pk)
    deletion.result()
    assert on_broker(agents, made)[0] == {made.consumer.queue_name}


def test_one_queue_and_a_larger_cascade_that_has_it_are_deleted_at_the_same_time(made, agents):
    if not connection.features.has_select_for_update:
        pytest.skip("this database has one transaction at a time that writes")
    consumer, _ = registration.register_consumer(made.identity, made.presented, None)
    row_is_deleted, go_on = threading.Event(), threading.Event()

    def stop_before_the_removal(execute, sql, params, many, context):
        if sql.startswith('INSERT INTO "core_removal"'):
            row_is_deleted.set()
            assert go_on.wait(30)
        return execute(sql, params, many, context)

    def delete_one():
        with connection.execute_wrapper(stop_before_the_removal):
            return made.queue.delete()[0]

    deletion = in_background(delete_one)
    assert row_is_deleted.wait(30)
    # As in a cascade that comes to its consumers first.
    collector = Collector(using="default", origin=made.identity)
    collector.collect([consumer])
    collector.collect([made.identity])
    cascade = in_background(collector.delete)
    wait_until_blocked(cascade)
    go_on.set()
    cascade.result()
    assert deletion.result() == 1
    assert on_broker(agents, made)[0] == {made.consumer.queue_name}


@pytest.mark.parametrize("at_least", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_registering_and_deleting_of_everything_end_in_no_error_of_the_database(agents, at_least):
    owners = {number: agents.owner() for number in range(2)}
    offerings = [agents.offering(*owners.values()) for _ in range(3)]
    broken, done = [], Counter()
    began = time.monotonic()

    def is_over():
        """Whether the time is up and a registration was completed: on a busy machine most lose their rows first."""
        seconds = time.monotonic() - began
        return seconds > 30 or (seconds > at_least and done["register"] > 0)

    def register(number):
        owner = owners[number]
        presented = agents.token(owner)
        identity = AgentIdentity.objects.filter(owner=owner).first() or agents.identity(owner, offerings[0], "agent")
        subscription, _ = registration.register_subscription(identity, "order", presented)
        for offering in offerings:
            registration.create_queue(subscription, offering, "order", presented)
        registration.register_consumer(identity, presented, None)

    def remove(number):
        time.sleep(random.random() / 2)  # slower than a registration, which is refused if its rows go
        model = random.choice([SubscriptionQueue, EventSubscription, AgentIdentity, Consumer, Owner])
        row = model.objects.order_by("?").first()
        if row is not None:
            deletions.delete(row)
        if model is Owner:
            for one, owner in owners.items():
                if not Owner.objects.filter(pk=owner.pk).exists():
                    owners[one] = agents.owner()
                    with contextlib.suppress(IntegrityError):  # another thread removed the new one already
                        for offering in offerings:
                            offering.members.add(owners[one])

    def again_and_again(do, number):
        while not is_over():
            try:
                do(number)
            except DatabaseError as error:
                if not isinstance(error, IntegrityError) or do is remove:  # an owner of the test's, gone meanwhile
                    broken.append((do.__name__, error))
            except (BrokerError, PermissionDenied, ObjectDoesNotExist, ValueError):
                done["refused"] += 1
            else:
                done[do.__name__] += 1

    in_parallel(*(partial(again_and_again, do, number) for do in (register, remove) for number in (0, 1, 0)))
    assert broken == []
    assert done["register"]
    assert done["remove"]


# By hand


@pytest.mark.parametrize("what", ["owner", "first", "identity", "subscription", "consumer", "queue"])
def test_the_admin_removes_a_row_with_all_below_it_as_everybody_else_does(made, agents, client, monkeypatch, what):
    deleted = []
    delete = deletions.delete
    monkeypatch.setattr(deletions, "delete", lambda rows: deleted.append(rows) or delete(rows))
    client.force_login(agents.owner(is_staff=True, is_superuser=True))
    row = getattr(made, what)
    path = f"/admin/{row._meta.app_label}/{row._meta.model_name}/"
    assert client.post(f"{path}{row.pk}/delete/", {"post": "yes"}).status_code == 302
    assert deleted == [row]
    assert not type(row).objects.filter(pk=row.pk).exists()
    assert not Removal.objects.exists()
    if what != "owner":  # of which several can't be deleted at once
        rest = type(row).objects.all()
        selected = {"action": "delete_selected", "_selected_action": [one.pk for one in rest], "post": "yes"}
        if rest:
            assert client.post(path, selected).status_code == 302
            assert len(deleted) == 2
        assert not type(row).objects.exists()


# Bounded


def statements_of(delete):
    """Return the statements of a deletion and its callback, without Django's own batches of a hundred rows."""
    with CaptureQueriesContext(connection) as captured:
        delete()
    return [query["sql"] for query in captured if not query["sql"].startswith('DELETE FROM "agents_subscriptionqueue"')]


@pytest.mark.parametrize("what", ["owner", "identity", "subscription", "queues"])
def test_many_queues_take_as_many_statements_as_few(agents, what):
    counts = []
    for count in (20, 200):
        subscription = many_queues(agents, count)
        doomed = {
            "owner": subscription.owner,
            "identity": subscription.identity,
            "subscription": subscription,
            "queues": SubscriptionQueue.objects.filter(subscription=subscription),
        }[what]
        counts.append(len(statements_of(doomed.delete)))
        assert not Removal.objects.exists()
    assert counts[0] == counts[1] < 90


def test_an_offering_with_many_queues_takes_as_many_statements_as_one_with_few(agents):
    counts = []
    for count in (20, 200):
        subscription = many_queues(agents, 1)
        others = EventSubscription.objects.bulk_create(
            EventSubscription(owner=subscription.owner) for _ in range(count)
        )
        offering = Offering.objects.create(name="popular")
        SubscriptionQueue.objects.bulk_create(
            SubscriptionQueue(
                subscription=other,
                offering=offering,
                object_type="order",
                vhost=subscription.owner.uuid.hex,
                queue_name=f"subscription_{other.uuid.hex}_offering_{offering.uuid.hex}_order",
            )
            for other in others
        )
        counts.append(len(statements_of(offering.delete)))
    assert counts[0] == counts[1]


def test_many_revoked_tokens_take_as_many_statements_to_revoke_as_few(agents, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    ContentType.objects.get_for_model(AuthToken)  # the trail looks that up once in a process
    counts = []
    for count in (3, 30):
        owner = agents.owner()
        for _ in range(count):
            EventSubscription.objects.create(owner=owner, token=agents.token(owner).token, password_set=True)
        counts.append(len(statements_of(lambda owner=owner: tokens.revoke_tokens_of(owner))))
        assert not EventSubscription.objects.exclude(token=None, password_set=False).exists()
        assert Removal.objects.filter(kind=KIND.PASSWORD).count() == count
        Removal.objects.all().delete()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.soak)])
def test_there_are_as_many_requests_as_things(agents, management, count):
    subscription = many_queues(agents, count)
    vhost = subscription.owner.uuid.hex
    management.create_vhost(vhost)
    management.put_user(subscription.rmq_username, "secret")
    for name in subscription.queues.values_list("queue_name", flat=True):
        management.declare_queue(vhost, name)
        stored_queue(name, vhost=vhost)
    with counted_requests() as sent:
        subscription.delete()
    assert len(sent) == len(set(sent)) == count + 1
    assert agents.queues(vhost) == {}
    assert subscription.rmq_username not in agents.users()
    assert Queue.objects.filter(state="gone").count() == count


# What was there before is known to be gone


def test_the_queues_are_known_to_be_gone_at_once(made):
    there = stored_queue(made.queue.queue_name, vhost=made.vhost, state="warned", ready=7, unacknowledged=0)
    kept = stored_queue(made.consumer.queue_name, vhost=made.vhost)
    made.subscription.delete()
    there.refresh_from_db()
    kept.refresh_from_db()
    assert (there.state, there.length, kept.state) == ("gone", None, "ok")
    event = QueueEvent.objects.get()
    assert (event.kind, event.queue, event.details["length"]) == ("removed", there, 7)


def test_all_queues_of_a_vhost_are_known_to_be_gone_with_it(made):
    for name in (made.queue.queue_name, DEAD_LETTER_QUEUE, "somebody's own"):
        stored_queue(name, vhost=made.vhost)
    elsewhere = stored_queue("elsewhere", vhost="/")
    made.owner.delete()
    assert list(Queue.objects.exclude(state="gone")) == [elsewhere]
    assert QueueEvent.objects.filter(kind="removed").count() == 3


def test_what_is_still_to_go_is_told_in_one_statement(made, settings, django_assert_num_queries):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    made.subscription.delete()
    with django_assert_num_queries(1):
        assert pending() == {(made.vhost, queue.queue_name) for queue in (made.queue, made.other_queue)}


# A broker that is away, or comes and goes


def test_a_broker_that_is_away_keeps_nobody_from_deleting_and_the_task_finishes_it(made, agents, settings, broker):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    made.subscription.delete()
    assert Removal.objects.count() == 3
    assert removals.run_due() == 0  # everything is due in a minute
    assert Removal.objects.filter(claim=None, due_at__gt=timezone.now() + timedelta(seconds=30)).count() == 3
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    finish_removals()
    assert Removal.objects.count() == 3
    make_removals_due()
    finish_removals()
    assert not Removal.objects.exists()
    assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})


def test_no_broker_at_all_is_one_that_is_away(made, settings):
    settings.RABBITMQ_MANAGEMENT_URL = ""
    made.queue.delete()
    removal = Removal.objects.get()
    assert (removal.claim, removal.attempts) == (None, 1)
    assert "no broker is configured" in removal.last_error


def test_a_second_deletion_of_a_request_does_not_wait_for_the_first_ones_things(made, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    made.queue.delete()
    with counted_requests() as sent:
        removals.run_due()
    assert sent == []


def test_a_broker_that_goes_away_in_the_middle_is_asked_no_more_and_the_rest_goes_later(
    agents, management, broker, settings, monkeypatch
):
    subscription = many_queues(agents, 60)
    vhost = subscription.owner.uuid.hex
    management.create_vhost(vhost)
    for name in subscription.queues.values_list("queue_name", flat=True):
        management.declare_queue(vhost, name)
    with Proxy.before(broker.management_url) as proxy:
        settings.RABBITMQ_MANAGEMENT_URL = proxy.url(broker.management_url)
        real, asked = Management.delete_queue, []

        def counted(self, *arguments, **options):
            asked.append(arguments)
            if len(asked) == 20:
                proxy.close_next(1000)
            return real(self, *arguments, **options)

        monkeypatch.setattr(Management, "delete_queue", counted)
        subscription.delete()
        assert len(asked) < 20 + removals.MAX_PARALLEL
        left = Removal.objects.count()
        assert left == len(agents.queues(vhost)) > 30
        # What may still be done by a request without an answer can't be taken back by a registration meanwhile.
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


def test_one_thing_that_makes_the_broker_fail_does_not_keep_all_others(made, agents, monkeypatch):
    real = Management.delete_user

    def failing(self, name):
        if name == made.username:
            raise removals.BrokerUnavailable("answered 500")
        real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Management, "delete_user", failing)
        made.subscription.delete()
        make_removals_due()
        removals.run_due(50)
        # A minute later all others are due, and this one is not yet.
        Removal.objects.update(due_at=F("due_at") - timedelta(seconds=65))
        removals.run_due(50)
    assert [(removal.name, removal.attempts) for removal in Removal.objects.all()] == [(made.username, 2)]
    assert on_broker(agents, made)[0] == {made.consumer.queue_name}


def test_what_fails_again_and_again_waits_longer_each_time_up_to_a_limit():
    assert [removals.retry_seconds(attempts, 300) for attempts in (1, 2, 3, 4, 1000)] == [60, 120, 240, 300, 300]


def test_a_refusal_is_written_down_and_the_others_go(made, agents, broker, caplog):
    with closing(pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_url}/{made.vhost}"))) as opened:
        channel = opened.channel()
        channel.queue_delete(made.queue.queue_name)
        channel.queue_declare(made.queue.queue_name, exclusive=True)
        with caplog.at_level(logging.WARNING, "core.removals"):
            made.subscription.delete()
        removal = Removal.objects.get()
        assert (removal.name, removal.attempts, removal.claim) == (made.queue.queue_name, 1, None)
        assert "exclusive" in removal.last_error
        assert made.queue.queue_name in caplog.text
        waits = []
        for _ in range(3):
            make_removals_due()
            removals.run_due(50)
            removal.refresh_from_db()
            waits.append(round((removal.due_at - timezone.now()).total_seconds() / 60))
        assert waits == [2, 4, 8]
    assert on_broker(agents, made)[0] == {made.consumer.queue_name}
    make_removals_due()
    assert removals.run_due(50) == 1


def test_what_is_gone_already_is_done(made, management):
    management.delete_queue(made.vhost, made.queue.queue_name)
    management.delete_user(made.username)
    made.subscription.delete()
    assert not Removal.objects.exists()


def test_a_database_that_is_away_is_logged_and_nothing_is_lost(made, caplog):
    def fail(execute, sql, params, many, context):
        if sql.startswith("SELECT"):
            raise OperationalError("the database is away")
        return execute(sql, params, many, context)

    removals.write([Removal(kind=KIND.QUEUE, vhost="nowhere", name="q")], due_at=timezone.now() - timedelta(seconds=1))
    with connection.execute_wrapper(fail), caplog.at_level(logging.ERROR, "core.removals"):
        assert removals.run_due() == 0
    assert "the database is away" in caplog.text
    assert removals.run_due() == 1


# Crashes, and several at once


def test_what_a_process_leaves_that_is_killed_after_the_commit_is_finished_by_the_task(made, agents, monkeypatch):
    def killed():
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(removals, "run_due", killed)
        with pytest.raises(Killed):
            made.subscription.delete()
    assert not EventSubscription.objects.exists()
    assert on_broker(agents, made)[0] > {made.queue.queue_name}
    finish_removals()
    assert on_broker(agents, made) == ({made.consumer.queue_name}, {made.consumer.rmq_username})


def test_what_a_process_leaves_that_is_killed_on_the_way_is_finished_when_its_claim_is_over(made, monkeypatch):
    there = stored_queue(made.queue.queue_name, vhost=made.vhost)

    def killed(names):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(tombstones, "forget", killed)
        with pytest.raises(Killed):
            made.subscription.delete()
    assert removals.run_due(50) == 0
    soonest = timezone.now() + timedelta(seconds=locks.lock_seconds())
    assert Removal.objects.filter(due_at__gt=soonest, due_at__lt=soonest + timedelta(seconds=60)).count() == 3
    make_removals_due()
    assert removals.run_due(50) == 3
    there.refresh_from_db()
    assert there.state == "gone"


def test_two_workers_remove_each_thing_once(agents, management):
    subscription = many_queues(agents, 100)
    vhost = subscription.owner.uuid.hex
    management.create_vhost(vhost)
    for name in subscription.queues.values_list("queue_name", flat=True):
        management.declare_queue(vhost, name)
    names = list(subscription.queues.values_list("queue_name", flat=True))
    subscription.queues.all()._raw_delete("default")
    removals.write(
        [Removal(kind=KIND.QUEUE, vhost=vhost, name=name) for name in names],
        due_at=timezone.now() - timedelta(seconds=1),
    )
    with counted_requests() as sent:
        done = in_parallel(*[removals.run_due] * 3)
    assert sum(done) == len(sent) == len(set(sent)) == 100
    assert agents.queues(vhost) == {}


def test_what_is_registered_again_in_between_keeps_its_queue_and_its_user(made, agents):
    before = on_broker(agents, made)
    removals.write(
        [
            Removal(kind=KIND.QUEUE, vhost=made.vhost, name=made.queue.queue_name),
            Removal(kind=KIND.QUEUE, vhost=made.vhost, name=made.consumer.queue_name),
            Removal(kind=KIND.USER, name=made.username),
            Removal(kind=KIND.USER, name=made.consumer.rmq_username),
            Removal(kind=KIND.PASSWORD, name=made.username),
            Removal(kind=KIND.VHOST, name=made.vhost),
        ]
    )
    assert not Removal.objects.exists()
    assert on_broker(agents, made) == before


def test_a_registration_between_the_claim_and_the_request_keeps_its_queue(made, agents, settings, broker, monkeypatch):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    made.queue.delete()
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    make_removals_due()
    real = removals._claim

    def registered_before(*arguments):
        again, _ = registration.create_queue(made.subscription, made.first, "order", made.presented)
        assert again.state == Registration.READY
        return real(*arguments)

    monkeypatch.setattr(removals, "_claim", registered_before)
    assert removals.run_due() == 0
    assert not Removal.objects.exists()
    assert made.queue.queue_name in on_broker(agents, made)[0]


def test_what_is_being_removed_is_not_registered_meanwhile(made, agents, monkeypatch):
    refused = []
    real = Management.delete_queue

    def meanwhile(self, vhost, name, **options):
        try:
            registration.create_queue(made.subscription, made.first, "order", made.presented)
        except removals.BrokerUnavailable as error:
            refused.append(str(error))
        finally:
            connection.close()
        real(self, vhost, name, **options)

    monkeypatch.setattr(Management, "delete_queue", meanwhile)
    made.queue.delete()
    assert len(refused) == 1
    assert "being removed" in refused[0]
    assert not SubscriptionQueue.objects.filter(offering=made.first).exists()
    assert made.queue.queue_name not in on_broker(agents, made)[0]
    monkeypatch.undo()


def test_what_is_deleted_again_while_it_is_being_removed_is_removed_again(made, monkeypatch):
    asked = []
    real = Management.delete_queue

    def again(self, vhost, name, **options):
        asked.append(name)
        if len(asked) == 1:
            removals.write(
                [Removal(kind=KIND.QUEUE, vhost=vhost, name=name)], due_at=timezone.now() - timedelta(seconds=1)
            )
            connection.close()
        real(self, vhost, name, **options)

    monkeypatch.setattr(Management, "delete_queue", again)
    made.queue.delete()
    assert asked == [made.queue.queue_name] * 2
    assert not Removal.objects.exists()


def test_a_user_that_somebody_changes_right_now_goes_a_little_later(made, agents):
    with locks.lock(made.username):
        made.subscription.delete()
        assert [removal.kind for removal in Removal.objects.all()] == ["user"]
        assert made.username in agents.users()
    make_removals_due()
    assert removals.run_due(50) == 1
    assert made.username not in agents.users()


def test_nothing_is_begun_once_the_time_is_over(made, agents):
    before = on_broker(agents, made)
    removals.write([Removal(kind=KIND.QUEUE, vhost=made.vhost, name="q")], due_at=timezone.now() - timedelta(seconds=1))
    assert removals.run_due(0) == 0
    batch = removals._claim(removals._is_due(), 0, 0)
    batch.carry_out()
    removal = Removal.objects.get()
    assert (batch.removed, removal.claim, removal.attempts) == ([], None, 0)
    assert removal.due_at <= timezone.now() + timedelta(seconds=1)
    assert on_broker(agents, made) == before


# Writing them down


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_that_it_goes_whoever_reads_from_it_is_never_taken_back(agents, order):
    later = timezone.now() + timedelta(minutes=5)
    for if_unused in order:
        removals.write([Removal(kind=KIND.QUEUE, vhost="v", name="q", if_unused=if_unused)], due_at=later)
    assert Removal.objects.get().if_unused is False
    both = [Removal(kind=KIND.QUEUE, vhost="v", name="both", if_unused=if_unused) for if_unused in order]
    removals.write(both, due_at=later)
    assert Removal.objects.get(name="both").if_unused is False


def test_what_is_written_again_is_as_new(agents, django_assert_num_queries):
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


def test_writing_nothing_does_nothing(agents, django_assert_num_queries):
    with django_assert_num_queries(0):
        removals.write([])


# Tokens


def test_a_revoked_token_loses_its_logins_and_their_connections(made, agents, broker):
    key = made.presented.key
    other = agents.token(made.owner)
    with (
        logged_in(broker, made.vhost, made.username, key) as first,
        logged_in(broker, made.vhost, made.consumer.rmq_username, key) as second,
        counted_requests() as sent,
    ):
        tokens.revoke_token(made.presented.token)
        assert is_closed(first)
        assert is_closed(second)
    assert len(sent) == 6
    assert not can_log_in(broker, made.vhost, made.username, key)
    assert not can_log_in(broker, made.vhost, made.consumer.rmq_username, key)
    for login in (made.subscription, made.consumer):
        login.refresh_from_db()
        assert (login.token, login.password_set) == (None, False)
    assert on_broker(agents, made)[0] > {made.queue.queue_name}
    # It works again with the next token that is presented.
    registration.create_queue(made.subscription, made.first, "order", other)
    assert can_log_in(broker, made.vhost, made.username, other.key)


def test_an_expired_token_is_as_a_revoked_one_within_the_task(made, agents, broker):
    made.presented.token.expiry = timezone.now() - timedelta(seconds=1)
    made.presented.token.save()
    with logged_in(broker, made.vhost, made.username, made.presented.key) as opened:
        finish_removals()
        assert is_closed(opened)
    assert not can_log_in(broker, made.vhost, made.username, made.presented.key)
    assert AuthToken.objects.filter(pk=made.presented.token.pk).exists()
    assert not EventSubscription.objects.filter(token__isnull=False).exists()
    assert agents_removals.revoke_expired_passwords() == 0


def test_an_owner_who_is_not_active_any_more_loses_the_logins_within_the_task(made, agents, broker, client):
    client.force_login(agents.owner(is_staff=True, is_superuser=True))
    with logged_in(broker, made.vhost, made.username, made.presented.key) as opened:
        page = f"/admin/accounts/owner/{made.owner.pk}/change/"
        assert client.post(page, {"email": made.owner.email, "full_name": ""}).status_code == 302
        finish_removals()
        assert is_closed(opened)
    assert not Owner.objects.get(pk=made.owner.pk).is_active
    assert not can_log_in(broker, made.vhost, made.username, made.presented.key)
    assert not can_log_in(broker, made.vhost, made.consumer.rmq_username, made.presented.key)
    assert on_broker(agents, made)[0] > {made.queue.queue_name}
    assert AuthToken.objects.filter(pk=made.presented.token.pk).exists()


def test_other_tokens_keep_their_logins(made, agents, broker):
    tokens.revoke_token(agents.token(made.owner).token)
    tokens.revoke_tokens_of(agents.owner())
    assert agents_removals.revoke_expired_passwords() == 0
    assert not Removal.objects.exists()
    assert can_log_in(broker, made.vhost, made.username, made.presented.key)


def test_tokens_revoked_together_lose_exactly_their_logins(made, agents, broker):
    other = Setting(agents)
    AuthToken.objects.filter(user__email=made.owner.email).delete()
    assert not can_log_in(broker, made.vhost, made.username, made.presented.key)
    assert can_log_in(broker, other.vhost, other.username, other.presented.key)


@pytest.mark.parametrize("count", [3, 30])
def test_any_number_of_expired_tokens_takes_six_statements(agents, settings, count, django_assert_num_queries):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    owner = agents.owner()
    for _ in range(count):
        token = agents.token(owner).token
        EventSubscription.objects.create(owner=owner, token=token, password_set=True)
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    with transaction.atomic():
        with django_assert_num_queries(8):  # two savepoints take two each
            assert agents_removals.revoke_expired_passwords() == count
        assert Removal.objects.count() == count
        transaction.set_rollback(True)


def test_a_login_that_has_another_token_by_now_keeps_it(made, agents, broker, settings):
    other = agents.token(made.owner)
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    tokens.revoke_token(made.presented.token)
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    registration.create_queue(made.subscription, made.first, "order", other)
    with logged_in(broker, made.vhost, made.username, other.key) as opened:
        Removal.objects.update(attempts=0)
        make_removals_due()
        finish_removals()
        opened.process_data_events(0.5)
    assert can_log_in(broker, made.vhost, made.username, other.key)
    assert not Removal.objects.exists()
    made.subscription.refresh_from_db()
    assert made.subscription.password_set


def test_a_password_that_a_late_request_may_have_taken_is_set_anew_by_the_next_call(made, agents, settings, broker):
    removals.write([Removal(kind=KIND.PASSWORD, name=made.username)], due_at=timezone.now() - timedelta(seconds=1))
    Removal.objects.update(attempts=1)
    removals.run_due(50)
    made.subscription.refresh_from_db()
    assert not made.subscription.password_set
    made.presented.token.refresh_from_db()
    registration.create_queue(made.subscription, made.first, "order", made.presented)
    assert can_log_in(broker, made.vhost, made.username, made.presented.key)


def revoked(token):
    tokens.revoke_token(token)


def expired(token):
    AuthToken.objects.filter(pk=token.pk).update(expiry=timezone.now() - timedelta(days=1))


def settle():
    """Have the task do all there is to do, as often as it may need."""
    for _ in range(3):
        make_removals_due()
        finish_removals()
    assert not Removal.objects.exists()


def present_in_vain(settings, made, presented):
    """Present a token while the broker is away."""
    settings.RABBITMQ_MANAGEMENT_URL, working = AWAY, settings.RABBITMQ_MANAGEMENT_URL
    with pytest.raises(BrokerUnavailable):
        registration.register_subscription(made.identity, "order", presented)
    settings.RABBITMQ_MANAGEMENT_URL = working


@pytest.mark.parametrize("end", [revoked, expired])
def test_a_token_that_ends_after_another_was_presented_in_vain_is_no_password_any_more(
    end, made, agents, broker, settings
):
    other = agents.token(made.owner)
    present_in_vain(settings, made, other)
    made.subscription.refresh_from_db()
    assert (made.subscription.token, made.subscription.next_token) == (made.presented.token, other.token)
    assert can_log_in(broker, made.vhost, made.username, made.presented.key)
    end(made.presented.token)
    settle()
    assert not can_log_in(broker, made.vhost, made.username, made.presented.key)
    made.subscription.refresh_from_db()
    assert (made.subscription.token, made.subscription.password_set) == (None, False)
    registration.register_subscription(made.identity, "order", other)
    assert can_log_in(broker, made.vhost, made.username, other.key)


@pytest.mark.parametrize("end", [revoked, expired])
def test_a_token_that_ends_after_its_answer_was_lost_is_no_password_any_more(end, made, agents, broker, monkeypatch):
    other = agents.token(made.owner)
    real = Management.put_user

    def lost(*arguments):
        real(*arguments)
        raise BrokerUnavailable("no answer came in time", timed_out=True)

    with monkeypatch.context() as patched:
        patched.setattr(Management, "put_user", lost)
        with pytest.raises(BrokerUnavailable):
            registration.register_subscription(made.identity, "order", other)
    assert can_log_in(broker, made.vhost, made.username, other.key)
    end(other.token)
    settle()
    assert not can_log_in(broker, made.vhost, made.username, other.key)
    made.subscription.refresh_from_db()
    assert (made.subscription.next_token, made.subscription.password_set) == (None, False)
    registration.register_subscription(made.identity, "order", made.presented)
    assert can_log_in(broker, made.vhost, made.username, made.presented.key)


@pytest.mark.parametrize("end", [revoked, expired])
def test_a_token_whose_answer_was_lost_is_not_forgotten_for_a_third_one(
    end, made, agents, broker, settings, monkeypatch
):
    second, third = agents.token(made.owner), agents.token(made.owner)
    real = Management.put_user

    def lost(*arguments):
        real(*arguments)
        raise BrokerUnavailable("no answer came in time", timed_out=True)

    with monkeypatch.context() as patched:
        patched.setattr(Management, "put_user", lost)
        with pytest.raises(BrokerUnavailable):
            registration.register_subscription(made.identity, "order", second)
    present_in_vain(settings, made, third)
    end(second.token)
    settle()
    for presented in (made.presented, second, third):
        assert not can_log_in(broker, made.vhost, made.username, presented.key)
    registration.register_subscription(made.identity, "order", third)
    assert can_log_in(broker, made.vhost, made.username, third.key)


def test_the_third_token_stays_the_password_where_the_second_ones_answer_was_lost(made, agents, broker, settings):
    second, third = agents.token(made.owner), agents.token(made.owner)
    present_in_vain(settings, made, second)
    registration.register_subscription(made.identity, "order", third)
    settle()
    assert can_log_in(broker, made.vhost, made.username, third.key)
    made.subscription.refresh_from_db()
    # A late request may have set the second one since, so it is set once more with the next registration.
    assert (made.subscription.token, made.subscription.password_set) == (third.token, False)


def test_a_token_that_is_revoked_after_a_process_was_killed_before_setting_another_is_no_password_any_more(
    made, agents, broker, monkeypatch
):
    def die(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Management, "put_user", die)
        with pytest.raises(Killed):
            registration.register_subscription(made.identity, "order", agents.token(made.owner))
    tokens.revoke_token(made.presented.token)
    settle()
    assert not can_log_in(broker, made.vhost, made.username, made.presented.key)


def test_a_password_that_is_still_to_go_goes_though_another_token_was_presented_in_vain(made, agents, broker, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    tokens.revoke_token(made.presented.token)
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    present_in_vain(settings, made, agents.token(made.owner))
    settle()
    assert not can_log_in(broker, made.vhost, made.username, made.presented.key)
    made.subscription.refresh_from_db()
    assert not made.subscription.password_set


def test_a_token_that_is_given_to_a_login_while_the_expired_are_looked_up_keeps_its_removal(
    made, agents, broker, monkeypatch
):
    if connection.vendor == "sqlite":
        pytest.skip("one transaction writes at a time")
    other = agents.token(made.owner)
    registration.register_consumer(made.identity, other, None)
    expired(other.token)
    username, registrations = agents_removals._username, []

    def register_meanwhile(value):
        if not registrations:
            registrations.append(in_background(registration.register_subscription, made.identity, "order", other))
            wait_until_blocked(registrations[0])
        return username(value)

    monkeypatch.setattr(agents_removals, "_username", register_meanwhile)
    agents_removals.revoke_expired_passwords()
    registrations[0].result()
    agents_removals.revoke_expired_passwords()
    settle()
    assert not can_log_in(broker, made.vhost, made.username, other.key)
    made.subscription.refresh_from_db()
    assert (made.subscription.token, made.subscription.password_set) == (None, False)


def test_no_user_is_made_by_taking_its_password(made, agents, management):
    management.delete_user(made.username)
    tokens.revoke_token(made.presented.token)
    assert made.username not in agents.users()
    assert not Removal.objects.exists()


def test_an_owners_tokens_ask_nothing_where_the_users_go_as_well(made):
    with counted_requests() as sent:
        made.owner.delete()
    assert not [request for request in sent if request.startswith(("GET", "PUT"))]


# For the sweep


def orphans(made, management, *names):
    """Make queues without a row, write their Removals as the sweep does, and return their ids."""
    for name in names:
        management.declare_queue(made.vhost, name)
    removals.write(
        [Removal(kind=KIND.QUEUE, vhost=made.vhost, name=name, if_unused=True) for name in names],
        due_at=timezone.now() + timedelta(minutes=5),
    )
    return list(Removal.objects.filter(vhost=made.vhost).values_list("id", flat=True))


def test_a_sweep_hears_what_went_what_is_read_and_what_was_refused(made, agents, management, broker):
    with closing(pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_url}/{made.vhost}"))) as opened:
        channel = opened.channel()
        channel.queue_declare("subscription_mine", exclusive=True)
        ids = orphans(made, management, "subscription_unused", "subscription_read")
        channel.basic_consume("subscription_read", lambda *message: None)
        removals.write(
            [Removal(kind=KIND.QUEUE, vhost=made.vhost, name="subscription_mine")],
            due_at=timezone.now() + timedelta(minutes=5),
        )
        ids.append(Removal.objects.get(name="subscription_mine").pk)
        outcome = removals.run(ids)
        assert (outcome.removed, outcome.kept, outcome.away) == (1, [(made.vhost, "subscription_read")], False)
        assert len(outcome.errors) == 1
        assert "subscription_mine" in outcome.errors[0]
        assert [removal.name for removal in Removal.objects.all()] == ["subscription_mine"]
        assert "subscription_read" in agents.queues(made.vhost)


def test_a_sweep_touches_nothing_else_that_is_due(made, settings, broker):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    made.queue.delete()
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    make_removals_due()
    removals.write(
        [Removal(kind=KIND.QUEUE, vhost=made.vhost, name="subscription_x", if_unused=True)],
        due_at=timezone.now() + timedelta(minutes=5),
    )
    outcome = removals.run([Removal.objects.get(name="subscription_x").pk])
    assert (outcome.removed, outcome.kept, outcome.errors) == (1, [], [])
    assert [removal.name for removal in Removal.objects.all()] == [made.queue.queue_name]


def test_a_sweep_hears_that_the_broker_is_away(made, management, settings):
    ids = orphans(made, management, *(f"subscription_{number}" for number in range(20)))
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    outcome = removals.run(ids)
    assert (outcome.removed, outcome.kept, outcome.away) == (0, [], True)
    assert 1 <= len(outcome.errors) <= removals.MAX_PARALLEL
    assert Removal.objects.filter(claim=None).count() == 20


def test_a_sweep_spares_what_was_registered_meanwhile(made, agents):
    before = on_broker(agents, made)
    removals.write(
        [Removal(kind=KIND.QUEUE, vhost=made.vhost, name=made.queue.queue_name, if_unused=True)],
        due_at=timezone.now() + timedelta(minutes=5),
    )
    outcome = removals.run([Removal.objects.get().pk])
    assert (outcome.removed, outcome.kept, outcome.errors) == (0, [], [])
    assert on_broker(agents, made) == before
    assert not Removal.objects.exists()
