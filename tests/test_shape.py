"""The shape of what grows with queues, without a clock: as many statements and requests for 1,000 queues as for 100.

Where the broker takes one request for each queue, as for deleting it, that is asserted: one, and no more. The bindings
of few queues among many are asked for one by one, too, which costs the broker less than a list of all (test_facts.py).
First passes, and steady ones: test_monitor.py; by figures: test_prometheus.py; the list of queues: test_queue_list.py.
"""

import uuid

import httpx
import pytest
from django.db import connection, transaction
from django.db.models import CharField, Value
from django.db.models.functions import Cast, Concat
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import Owner, PulseUser
from agents import events, registration, sweep
from agents.models import AgentVhost, EventSubscription, Registration, SubscriptionQueue
from agents.removals import pending
from notifications import claims, enqueue, sending
from notifications.models import Notification
from queues import deletion, monitor
from queues.models import Queue, QueueEvent
from rabbit.arguments import REGISTERED_QUEUE_ARGUMENTS
from tools.benchmarks.passes import counted_requests

FEW, MANY = 100, 300

NOT_COUNTED = ('DELETE FROM "agents_subscriptionqueue"', 'UPDATE "core_lease"')
"""How Django deletes the rows of a cascade, a statement for each hundred; and the lease, renewed as time goes by."""


@pytest.fixture
def make(broker):
    """Give a function that makes queues on the broker, all in one request."""

    def post(vhost, names, arguments=None):
        queues = [{"name": name, "durable": True, "auto_delete": False, "arguments": arguments or {}} for name in names]
        address = f"{broker.management_url.rstrip('/')}/api/definitions/{vhost}"
        httpx.post(address, json={"queues": queues}, timeout=60, trust_env=False).raise_for_status()

    return post


def counted(do):
    """Return what this gives, and how many statements and requests it took, the requests by their methods."""
    with CaptureQueriesContext(connection) as captured, counted_requests() as sent:
        result = do()
    statements = [one["sql"] for one in captured if not one["sql"].startswith(NOT_COUNTED)]
    deletes = [request for request in sent if request.startswith("DELETE ")]
    return result, len(statements), len(sent) - len(deletes), len(deletes)


@pytest.fixture
def alice(guarded):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    account = PulseUser.objects.create(username="alice", ready=True)
    account.owners.add(owner)
    return owner


@pytest.fixture
def filled(guarded, alice, make, amqp, settings):
    """Give a function that makes so many of alice's queues, each past its warn length of one message, and lists them.

    The maximum is out of reach.
    """
    settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH = 1_000, 2_000
    settings.GUARDIAN_DELETE_BRAKE = 10 * MANY

    def fill(number):
        names = [f"queue/alice/{number}-{one}" for one in range(number)]
        make(guarded, names)
        channel = amqp.connection.channel()  # without confirms: they take most of the time
        for name in names:
            channel.basic_publish("", name, b"1")
            channel.basic_publish("", name, b"2")
        channel.close()
        assert monitor.run_pass().new == number
        while Queue.objects.exclude(state="gone").exclude(ready=2).exists():
            monitor.run_pass()
        return number

    return fill


def test_warning_takes_as_many_statements_and_requests_for_many_queues_as_for_few(filled, settings):
    found = []
    for number in (FEW, MANY):
        filled(number)
        Queue.objects.update(state="ok", said="ok", quiet_until=None)
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


def test_claiming_what_is_due_takes_as_many_statements_for_many_as_for_few(db):
    found = []
    for number in (FEW, MANY):
        Notification.objects.all().delete()
        now = timezone.now()
        Notification.objects.bulk_create(
            Notification(
                uuid=uuid.uuid4(), recipient=f"{one}@example.org", channel="email", kind="outage", about=f"{one}",
                facts={"error": "away"}, state=Notification.State.DUE, created=now, due_at=now,
            )
            for one in range(number)
        )  # fmt: skip
        batch, statements, _, _ = counted(lambda: claims.claim(claims.MAX_CLAIMED))
        assert len(batch) == claims.MAX_CLAIMED
        found.append(statements)
    assert found[0] == found[1]


def test_sending_mails_takes_as_many_statements_for_each_claim_however_many_are_due(db, mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]
    sending.send_due()  # the first one makes the lease
    found = {}
    for number in (claims.MAX_CLAIMED, FEW, MANY):
        with transaction.atomic():
            notices = [enqueue.Notice("outage", {"error": f"{one}"}) for one in range(number)]
            enqueue.enqueue(notices, timezone.now())
        Notification.objects.filter(state="due").update(about=Concat(Value("about "), Cast("id", CharField())))
        delivery, found[number], _, _ = counted(sending.send_due)
        assert (delivery.sent, len(mailbox.mails)) == (number, number)
        mailbox.clear()
    a_claim = found[FEW] - found[claims.MAX_CLAIMED]
    assert found[MANY] - found[FEW] == a_claim * (MANY - FEW) / claims.MAX_CLAIMED


def test_deleting_takes_one_request_for_each_queue_and_the_rest_for_each_batch(filled, settings, monkeypatch):
    monkeypatch.setattr(deletion, "BATCH_SIZE", FEW)
    found = []
    for number in (FEW, MANY):
        filled(number)
        settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH = 0, 1
        report, statements, requests, deletes = counted(monitor.run_pass)
        settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH = 1_000, 2_000
        assert (report.deleted, report.errors, deletes) == (number, [], number)
        assert QueueEvent.objects.filter(kind="deleted").count() == sum((FEW, MANY)[: len(found) + 1])
        found.append((statements, requests))
    (few, asked), (many, asked_of_many) = found
    # What a batch takes is the same, whatever is in it.
    batches = MANY // FEW - 1
    assert few < 40
    assert many - few == 13 * batches
    assert asked_of_many == asked


@pytest.fixture
def subscribed(agents, alice, make, management):
    """Give a function that makes so many queues of one subscription of alice's, with their rows, and returns it."""
    vhost = alice.uuid.hex
    management.create_vhost(vhost)
    AgentVhost.objects.create(owner=alice, name=vhost, ready=True)

    def subscribe(number, **fields):
        subscription = EventSubscription.objects.create(owner=alice, password_set=True)
        management.put_user(subscription.rmq_username, None)
        names = [f"subscription_{subscription.uuid.hex}_{one}" for one in range(number)]
        make(vhost, names, dict(REGISTERED_QUEUE_ARGUMENTS))
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


def test_a_cascade_takes_one_request_for_each_queue_and_as_many_statements_for_many_as_for_few(subscribed, management):
    found = []
    for number in (FEW - 1, MANY - 1):  # and the account
        subscription = subscribed(number)
        _, statements, requests, deletes = counted(subscription.delete)
        assert not management.list_queues(subscription.owner.uuid.hex, {"columns": "name", "name": "subscription_"})
        found.append((statements, requests, deletes - number))
    assert found[0] == found[1]


def test_a_sweep_takes_as_many_statements_and_requests_for_many_registered_queues_as_for_few(subscribed):
    found = []
    for number in (FEW, MANY):
        subscribed(number)
        sweep.sweep_orphans()
        report, *count = counted(sweep.sweep_orphans)
        assert (report.found, report.repaired, report.errors) == (0, 0, [])
        found.append(count)
    assert found[0] == found[1]


def test_publishing_takes_as_many_statements_for_many_queues_as_for_few(guarded, agents, alice, make):
    found = []
    for number in (FEW, MANY):
        offering = agents.offering(alice)
        names = [f"subscription_{number}_{one}" for one in range(number)]
        make(guarded, names, dict(REGISTERED_QUEUE_ARGUMENTS))
        subscriptions_of_it = EventSubscription.objects.bulk_create(
            EventSubscription(owner=alice, object_type="order") for _ in names
        )
        SubscriptionQueue.objects.bulk_create(
            SubscriptionQueue(
                subscription=subscription, offering=offering, object_type="order", vhost=guarded, queue_name=name,
                state=Registration.READY,
            )
            for subscription, name in zip(subscriptions_of_it, names, strict=True)
        )  # fmt: skip
        published, *count = counted(lambda offering=offering: events.publish(offering, "order", {}))
        assert (published.delivered, published.skipped, published.rejected) == (number, 0, 0)
        found.append(count)
    assert found[0] == found[1]


def test_a_registration_takes_as_much_beside_many_queues_as_beside_few(subscribed, agents, alice):
    presented = agents.token(alice)
    found = []
    for number in (FEW, MANY):
        subscribed(number)
        identity = agents.identity(alice)
        registration.register_subscription(identity, "order", presented)
        new = agents.identity(alice)
        _, *first = counted(lambda new=new: registration.register_subscription(new, "order", presented))
        _, *again = counted(lambda new=new: registration.register_subscription(new, "order", presented))
        found.append((first, again))
    assert found[0] == found[1]
    assert not pending()
