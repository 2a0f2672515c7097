"""Complexity without a clock: the numbers of statements and requests do not grow with the queues.

Where the broker needs one request for each queue, as for a deletion, exactly one is asserted. Bindings of few queues
among many are also requested one by one, which costs the broker less than a list of all (test_facts.py). First and
steady passes: test_monitor.py; with Prometheus: test_prometheus.py; the list of queues: test_queue_list.py.
"""

import httpx
import pytest
from django.db import connection, transaction
from django.db.models import CharField, Value
from django.db.models.functions import Cast, Concat
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import PulseUser
from agents.events import publishing
from agents.models import AgentVhost, EventSubscription, Registration, SubscriptionQueue
from agents.sweeps import sweep
from notifications import claims, enqueue, sending
from notifications.models import Notification
from queues.guard import deleter, monitor, once
from queues.models import Queue
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from tests.support.counting import counted_requests

FEW, MANY = 100, 300

NOT_COUNTED = ('DELETE FROM "agents_subscriptionqueue"', 'UPDATE "core_lease"')
"""Django deletes rows of a cascade in batches of a hundred, and the lease is renewed over time."""


@pytest.fixture
def declare_queues(broker):
    """Return a function that declares queues on the broker in one request."""

    def post(vhost, names, arguments=None):
        queues = [{"name": name, "durable": True, "auto_delete": False, "arguments": arguments or {}} for name in names]
        address = f"{broker.management_url.rstrip('/')}/api/definitions/{vhost}"
        httpx.post(address, json={"queues": queues}, timeout=60, trust_env=False).raise_for_status()

    return post


def counted(do):
    """Return the result of a call and its numbers of statements, of requests without DELETE, and of DELETE requests."""
    with CaptureQueriesContext(connection) as captured, counted_requests() as sent:
        result = do()
    statements = [one["sql"] for one in captured if not one["sql"].startswith(NOT_COUNTED)]
    deletes = [request for request in sent if request.startswith("DELETE ")]
    return result, len(statements), len(sent) - len(deletes), len(deletes)


STATEMENTS_FOR_EACH_DELETION = 21


@pytest.fixture
def create_queues(guarded, pulse_user, declare_queues, amqp, settings):
    """Return a function that declares this many queues of Alice with two messages each, and runs passes over them.

    No queue reaches a limit until a test lowers it.
    """
    settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH = 1_000, 2_000
    settings.GUARDIAN_DELETE_BRAKE = 10 * MANY

    def create(number):
        names = [f"queue/alice/{number}-{one}" for one in range(number)]
        declare_queues(guarded, names)
        channel = amqp.connection.channel()  # without publisher confirms, which are slow
        for name in names:
            channel.basic_publish("", name, b"1")
            channel.basic_publish("", name, b"2")
        channel.close()
        assert once.run_once().new == number
        while Queue.objects.exclude(state="gone").exclude(ready=2).exists():
            once.run_once()
        return number

    return create


def test_statements_and_requests_of_warnings_do_not_grow(create_queues, settings):
    found = []
    for number in (FEW, MANY):
        create_queues(number)
        Queue.objects.update(state="ok", notified_state="ok", quiet_until=None)
        Notification.objects.all().delete()
        settings.GUARDIAN_WARN_QUEUE_LENGTH = 1
        report, *count = counted(monitor.run_pass)
        settings.GUARDIAN_WARN_QUEUE_LENGTH = 1_000
        warned = Queue.objects.filter(state="warned").count()
        assert (report.warned, report.errors) == (warned, [])
        assert Notification.objects.filter(recipient="alice@example.org").count() == warned
        found.append(count)
    assert found[0] == found[1]
    assert found[0][2] == 0


def test_sending_mails_takes_constant_statements_per_claim(db, mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
    sending.send_due()  # the first run creates the lease
    found = {}
    for number in (claims.MAX_CLAIMED, FEW, MANY):
        with transaction.atomic():
            notices = [enqueue.Notice("outage", {"error": f"{one}"}) for one in range(number)]
            enqueue.enqueue(notices, timezone.now())
        Notification.objects.filter(state="due").update(about=Concat(Value("about "), Cast("id", CharField())))
        delivery, found[number], _, _ = counted(sending.send_due)
        assert (delivery.sent, len(mailbox.mails)) == (number, number)
        mailbox.clear()
    per_claim = found[FEW] - found[claims.MAX_CLAIMED]
    assert found[MANY] - found[FEW] == per_claim * (MANY - FEW) / claims.MAX_CLAIMED


def test_a_pass_records_any_number_of_deletions_in_as_many_statements_and_the_deleter_takes_as_many_for_each(
    create_queues, settings
):
    settings.GUARDIAN_ARCHIVE_DAYS = 0
    of_pass, of_deleter = [], []
    for number in (20, 60):
        create_queues(number)
        PulseUser.objects.update(warn_length=0, max_length=1)
        report, *count = counted(monitor.run_pass)
        assert (len(report.decided), report.errors, count[-1]) == (number, [], 0)
        of_pass.append(count)
        outcome, *count = counted(deleter.run)
        assert (outcome.deleted, outcome.errors, count[-1]) == (number, [], number)
        of_deleter.append(count)
        PulseUser.objects.update(warn_length=None, max_length=None)
    assert of_pass[0] == of_pass[1]
    (few, asked, _), (many, asked_of_many, _) = of_deleter
    assert asked == asked_of_many
    # Each second it also looks for new decisions, and one run takes more seconds than the other.
    assert abs(many - few - STATEMENTS_FOR_EACH_DELETION * 40) < 100


@pytest.fixture
def create_subscription(agents, alice, declare_queues, management):
    """Return a function that creates a subscription of Alice with this many queues, and returns it."""
    vhost = alice.uuid.hex
    management.create_vhost(vhost)
    AgentVhost.objects.create(owner=alice, name=vhost, ready=True)

    def subscribe(number, **fields):
        subscription = EventSubscription.objects.create(owner=alice, password_set=True)
        management.put_user(subscription.rmq_username, None)
        names = [f"subscription_{subscription.uuid.hex}_{one}" for one in range(number)]
        declare_queues(vhost, names, dict(REGISTERED_QUEUE_ARGUMENTS))
        offerings = agents.offering(alice)
        SubscriptionQueue.objects.bulk_create(
            SubscriptionQueue(
                subscription=subscription, offering=offerings, object_type=f"type-{one}", vhost=vhost,
                queue_name=name, state=Registration.READY, **fields,
            )
            for one, name in enumerate(names)
        )  # fmt: skip
        return subscription

    return subscribe


def test_a_cascade_takes_one_request_per_queue_and_constant_statements(create_subscription, management):
    found = []
    for number in (FEW - 1, MANY - 1):  # plus the user
        subscription = create_subscription(number)
        _, statements, requests, deletes = counted(subscription.delete)
        assert not management.list_queues(subscription.owner.uuid.hex, {"columns": "name", "name": "subscription_"})
        found.append((statements, requests, deletes - number))
    assert found[0] == found[1]


def test_statements_and_requests_of_a_sweep_do_not_grow(create_subscription):
    found = []
    for number in (FEW, MANY):
        create_subscription(number)
        sweep.sweep_orphans()
        report, *count = counted(sweep.sweep_orphans)
        assert (report.found, report.repaired, report.errors) == (0, 0, [])
        found.append(count)
    assert found[0] == found[1]


def test_statements_and_requests_of_publishing_do_not_grow(guarded, agents, alice, declare_queues):
    found = []
    for number in (FEW, MANY):
        offering = agents.offering(alice)
        names = [f"subscription_{number}_{one}" for one in range(number)]
        declare_queues(guarded, names, dict(REGISTERED_QUEUE_ARGUMENTS))
        subscriptions = EventSubscription.objects.bulk_create(
            EventSubscription(owner=alice, object_type="order") for _ in names
        )
        SubscriptionQueue.objects.bulk_create(
            SubscriptionQueue(
                subscription=subscription, offering=offering, object_type="order", vhost=guarded, queue_name=name,
                state=Registration.READY,
            )
            for subscription, name in zip(subscriptions, names, strict=True)
        )  # fmt: skip
        published, *count = counted(lambda offering=offering: publishing.publish(offering, "order", {}))
        assert (published.delivered, published.skipped, published.rejected) == (number, 0, 0)
        found.append(count)
    assert found[0] == found[1]
