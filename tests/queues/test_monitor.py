"""Passes over a real broker, from the list to the outbox."""

import uuid
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import Owner, PulseUser
from agents.models import AgentVhost, EventSubscription, Offering, SubscriptionQueue
from core import bulk, leases
from core.models import Lease
from notifications.models import Notification
from queues.actions import single
from queues.guard import monitor, once, pruning
from queues.models import Pass, Queue, QueueEvent, QueueSample, Watch
from queues.rules import listing, trends
from tests.support.counting import counted_requests
from tests.support.faults import once_after, once_before
from tests.support.toolbox import queue_events, queue_names, queue_row, remove_as_a_person, sent

pytestmark = pytest.mark.usefixtures("guarded", "pulse_user")


def test_owner_and_operators_are_notified_once_of_a_warning_and_once_of_its_end(amqp):
    amqp.queue("queue/alice/builds", 3)
    report = once.run_once()
    queue = Queue.objects.get()
    assert (report.queues, report.new, report.errors) == (1, 1, [])
    assert (queue.name, queue.ready, queue.unacknowledged, queue.state) == ("queue/alice/builds", 3, 0, "ok")
    assert not Notification.objects.exists()
    amqp.publish("queue/alice/builds", 2)
    assert [once.run_once().warned for _ in range(3)] == [1, 0, 0]
    assert Queue.objects.get().state == "warned"
    amqp.take("queue/alice/builds", 4)
    assert once.run_once().recovered == 1
    assert sent("alice@example.org") == sent("ops@example.org") == ["warning", "recovery"]


def test_a_warning_has_bindings_and_growth_rate(amqp):
    amqp.channel.exchange_declare("exchange/alice/events", "topic", durable=True)
    amqp.queue("queue/alice/builds", 1)
    amqp.channel.queue_bind("queue/alice/builds", "exchange/alice/events", "build.#")
    once.run_once()
    ten_seconds_ago = timezone.now() - timedelta(seconds=10)
    Queue.objects.update(first_seen=ten_seconds_ago)
    QueueSample.objects.update(at=ten_seconds_ago)
    amqp.publish("queue/alice/builds", 5)
    once.run_once()
    facts = Notification.objects.filter(recipient="alice@example.org").get().facts
    assert facts["bindings"] == [{"exchange": "exchange/alice/events", "routing_key": "build.#"}]
    assert facts["consumers"] == 0
    assert facts["length"] == 6
    assert facts["per_second"] == pytest.approx(0.5, rel=0.3)
    assert facts["seconds_to_max"] == pytest.approx(8, rel=0.3)


def test_a_queue_over_its_deletion_limit_is_deleted_and_its_owner_notified(amqp, management, guarded):
    amqp.channel.exchange_declare("exchange/alice/events", "topic", durable=True)
    amqp.queue("queue/alice/builds", 11)
    amqp.channel.queue_bind("queue/alice/builds", "exchange/alice/events", "build.#")
    report = once.run_once()
    assert (report.deleted, report.kept, report.errors) == (1, 0, [])
    assert management.list_queues(guarded, {"columns": "name"}) == []
    assert Queue.objects.get().state == "gone"
    assert queue_events("queue/alice/builds") == ["condemned", "deleted"]
    notification = Notification.objects.get(recipient="alice@example.org")
    facts = notification.facts
    assert (notification.kind, facts["length"], facts["max"]) == ("deletion", 11, 10)
    assert facts["bindings"] == [{"exchange": "exchange/alice/events", "routing_key": "build.#"}]
    row = Pass.objects.get()
    assert (row.queues, row.new, row.deleted, row.brake_held, row.errors) == (1, 1, 1, False, [])
    assert row.seconds > row.listing_seconds > 0


def test_a_queue_that_returns_keeps_its_row_and_its_growth_counts_from_its_return(amqp):
    amqp.queue("queue/alice/builds", 3)
    amqp.queue("another")
    once.run_once()
    before = Queue.objects.get(name="queue/alice/builds")
    Queue.objects.filter(pk=before.pk).update(warn_length=2, unbounded=True)
    QueueSample.objects.update(at=timezone.now() - timedelta(minutes=1))
    amqp.channel.queue_delete("queue/alice/builds")
    once.run_once()
    once.run_once()
    amqp.queue("queue/alice/builds", 6)
    once.run_once()
    queue = Queue.objects.select_related("pulse_user").get(name="queue/alice/builds")
    assert (queue.uuid, queue.unbounded, queue.warn_length, queue.state) == (before.uuid, True, 2, "warned")
    assert queue_events("queue/alice/builds") == ["gone", "returned", "warned"]
    assert queue.events.get(kind="returned").details == {"length": 6}
    assert Notification.objects.filter(recipient="alice@example.org").get().facts["per_second"] is None
    assert trends.trends([queue], timezone.now() + timedelta(minutes=1))[queue.pk].growth.per_second == 0
    assert listing.with_first_sample(Queue.objects.filter(pk=queue.pk), timezone.now()).get().first_length == 6


def test_a_queue_that_becomes_ignored_is_gone(amqp, settings):
    amqp.queue("keep-this", 6)
    amqp.queue("another")
    once.run_once()
    settings.GUARDIAN_IGNORED_QUEUES = "^keep-"
    amqp.queue("keep-that", 20)
    once.run_once()
    assert Queue.objects.get(name="keep-this").state == "gone"
    assert not Queue.objects.filter(name="keep-that").exists()
    settings.GUARDIAN_IGNORED_QUEUES = ""
    once.run_once()
    assert Queue.objects.get(name="keep-this").state == "warned"


def test_a_dry_run_reports_deletions_and_changes_nothing(amqp, management, guarded):
    amqp.queue("long", 11)
    report = once.run_once(dry_run=True)
    assert report.would_delete == [{"vhost": guarded, "queue": "long"}]
    assert len(management.list_queues(guarded, {"columns": "name"})) == 1
    assert not any(model.objects.exists() for model in (Queue, QueueEvent, Notification, Pass, Lease))
    assert Watch.objects.get().listed_at is None


@pytest.mark.parametrize(("seconds", "is_free"), [(leases.LEASE_SECONDS + 1, False), (3600, True)])
def test_a_lease_that_expires_too_far_ahead_is_free_but_not_one_taken_slightly_later(seconds, is_free):
    """On PostgreSQL a statement that waited for a row has an earlier time than the one that held it."""
    expires_at = Now() + timedelta(seconds=seconds)
    Lease.objects.create(name=monitor.LEASE, holder=uuid.uuid4(), expires_at=expires_at)
    assert once.run_once().another_pass is not is_free


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        ("report", set()),
        ("delete-misnamed", {"exchange/alice/builds"}),
        ("delete-unpatterned", {"exchange/alice/builds", "stray"}),
    ],
)
def test_queues_are_reported_or_deleted_by_name(amqp, settings, management, guarded, policy, deleted):
    settings.GUARDIAN_NAMESPACE_POLICY = policy
    names = {"queue/alice/builds", "exchange/alice/builds", "stray"}
    for name in names:
        amqp.queue(name)
    amqp.channel.exchange_declare("queue/alice/events", "topic")
    report = once.run_once()
    assert queue_names(management, guarded) == names - deleted
    assert (report.misnamed, report.unpatterned) == (["exchange/alice/builds"], 1)
    assert report.misnamed_exchanges == ["queue/alice/events"]


def test_a_rabbitmq_user_without_the_administrator_tag_is_an_outage(amqp, settings, create_pulse_user, broker):
    amqp.queue("one")
    once.run_once()
    name, host = create_pulse_user("watcher", ["monitoring"]), broker.management_url.rpartition("@")[2]
    settings.RABBITMQ_MANAGEMENT_URL = f"http://{name}:secret@{host}"
    settings.GUARDIAN_VHOSTS = ["*"]
    report = once.run_once()
    assert report.away
    assert "administrator" in report.errors[0]
    assert Queue.objects.get().misses == 0


def test_a_queue_of_any_name_is_guarded(amqp, management, guarded):
    names = (
        "a/b'c\"d%<b>é\u202e", "x" * 255, ".", "..", "sp ace\t", "100%25", "%2F", "😀", "queue/ann/jobs\0", "\0" * 255,
        "\N{SYMBOL FOR NULL}\N{SYMBOL FOR ESCAPE}\0", "queue/ann/\N{REPLACEMENT CHARACTER}",
    )  # fmt: skip
    for name in names:
        amqp.queue(name, 11)
    assert once.run_once().deleted == len(names)
    assert management.list_queues(guarded, {"columns": "name"}) == []


@pytest.fixture
def builds(guarded, pulse_user, amqp):
    """Return a queue of Alice's with one message, after a pass. Another queue stays, so that no list is empty."""
    amqp.queue("another")
    amqp.queue("queue/alice/builds", 1)
    once.run_once()
    return Queue.objects.get(name="queue/alice/builds")


def test_a_pulse_user_can_be_removed_during_a_pass(amqp, monkeypatch):
    amqp.queue("queue/alice/old", 1)
    once.run_once()
    amqp.queue("queue/alice/new", 1)
    amqp.queue("queue/alice/warned", 6)
    amqp.queue("stray", 11)
    amqp.publish("queue/alice/old", 1)
    pulse_user = PulseUser.objects.get()
    once_before(monkeypatch, "the decision", lambda: remove_as_a_person(pulse_user))
    report = once.run_once()
    assert (report.errors, report.deleted) == ([], 1)
    assert not PulseUser.objects.exists()
    assert Queue.objects.get(name="queue/alice/old").state == "gone"
    assert not Queue.objects.exclude(pulse_user=None).exists()
    assert sent("alice@example.org") == []
    assert queue_events("queue/alice/old") == ["removed"]


@pytest.mark.parametrize("more", [1, 20])
@pytest.mark.parametrize("during", [(once_after, "the list"), (once_before, "the decision")], ids=lambda one: one[1])
def test_a_queue_deleted_manually_during_a_pass_stays_gone(builds, amqp, alice, monkeypatch, more, during):
    amqp.publish(builds.name, more)
    act, step = during
    act(monkeypatch, step, lambda: single.delete_queue(builds, alice))
    reports = [once.run_once() for _ in range(3)]
    assert [(report.deleted, report.gone, report.errors) for report in reports] == [(0, 0, [])] * 3
    builds.refresh_from_db()
    assert (builds.state, builds.length) == ("gone", None)
    assert queue_events(builds.name) == ["removing", "removed"]
    assert list(QueueSample.objects.filter(queue=builds).values_list("length", flat=True)) == [1]
    assert not Notification.objects.exists()


@pytest.mark.parametrize("step", ["the recheck", "the announcement", "the deletion"])
def test_a_manual_deletion_of_a_deletable_queue_is_recorded_as_manual(amqp, alice, monkeypatch, step):
    amqp.queue("another")
    amqp.queue("queue/alice/builds", 11)

    def delete():
        amqp.channel.queue_delete("queue/alice/builds")
        single._record_deletion(Queue.objects.get(name="queue/alice/builds"), alice)

    once_before(monkeypatch, step, delete)
    reports = [once.run_once() for _ in range(3)]
    assert sum(report.deleted for report in reports) == 0
    assert Queue.objects.get(name="queue/alice/builds").state == "gone"
    assert queue_events("queue/alice/builds") == ["condemned", "removed"]
    assert sent("alice@example.org") == []


def test_a_sent_deletion_that_was_done_manually_is_not_recorded_twice(builds, amqp, monkeypatch):
    row = Queue.objects.filter(pk=builds.pk)
    row.update(state="deleting", delete_sent_at=timezone.now())
    amqp.channel.queue_delete(builds.name)
    once_before(monkeypatch, "the decision", lambda: row.update(state="gone"))
    assert once.run_once().deleted == 0
    assert queue_events(builds.name) == []
    assert sent("alice@example.org") == []


def test_a_decision_is_not_taken_back_once_the_request_to_delete_the_queue_is_sent(amqp, monkeypatch):
    amqp.queue("queue/alice/builds", 11)
    monitor.run_pass()
    row = Queue.objects.all()
    row.update(unbounded=True)
    once_before(monkeypatch, "the decision", lambda: row.update(delete_sent_at=timezone.now()))
    states = []
    for _ in range(2):
        monitor.run_pass()
        states.append(row.get().state)
        row.update(delete_sent_at=None)
    assert states == ["deleting", "warned"]


def test_a_pulse_users_limit_set_after_the_list_applies_to_an_unchanged_queue(amqp, monkeypatch):
    amqp.queue("queue/alice/builds", 3)
    once.run_once()
    once_after(monkeypatch, "the list", lambda: PulseUser.objects.update(warn_length=2))
    assert once.run_once().warned == 1


def test_an_unchanged_queue_registered_after_the_list_is_registered(amqp, monkeypatch, guarded, settings):
    settings.GUARDIAN_PULSE_VHOST = "/"
    owner = Owner.objects.create_user("agents@example.org")
    AgentVhost.objects.create(owner=owner, name=guarded, ready=True)
    subscription = EventSubscription.objects.create(owner=owner)
    offering = Offering.objects.create(uuid=uuid.uuid4())
    amqp.queue("stood-still", 1)
    once.run_once()
    assert not Queue.objects.get().registered

    def register():
        SubscriptionQueue.objects.create(
            subscription=subscription, offering=offering, object_type="order", vhost=guarded, queue_name="stood-still"
        )

    once_after(monkeypatch, "the list", register)
    once.run_once()
    assert Queue.objects.get().registered


@pytest.mark.parametrize(
    ("limits", "state"),
    [({"unbounded": True}, "warned"), ({"warn_length": 30, "max_length": 50}, "ok"), ({"max_length": 50}, "warned")],
)
def test_limits_set_during_a_pass_apply(amqp, monkeypatch, limits, state):
    amqp.queue("queue/alice/builds", 1)
    once.run_once()
    amqp.publish("queue/alice/builds", 19)
    once_before(monkeypatch, "the decision", lambda: Queue.objects.update(**limits))
    assert once.run_once().deleted == 0
    assert (Queue.objects.get().length, queue_events("queue/alice/builds")) == (1, [])
    assert not Notification.objects.exists()
    once.run_once()
    assert (Queue.objects.get().length, Queue.objects.get().state) == (20, state)


def test_queues_deleted_manually_after_the_list_are_not_a_short_list(amqp, alice, monkeypatch, settings):
    settings.GUARDIAN_DELETE_BRAKE = 1
    for number in range(6):
        amqp.queue(f"queue/alice/{number}")
    once.run_once()

    def delete_half():
        for queue in Queue.objects.order_by("name")[:3]:
            single.delete_queue(queue, alice)

    once_after(monkeypatch, "the list", delete_half)
    assert once.run_once().errors == []
    assert Queue.objects.filter(state="gone").count() == 3
    assert not Notification.objects.exists()


def test_a_queue_that_returns_while_its_row_is_pruned_is_new(amqp, monkeypatch):
    amqp.queue("queue/alice/builds", 3)
    once.run_once()
    Queue.objects.update(state="gone", last_seen=timezone.now() - timedelta(days=31))
    once_before(monkeypatch, "the decision", pruning.prune)
    once.run_once()
    assert not Queue.objects.exists()
    assert once.run_once().new == 1


def test_writing_lengths_is_a_hot_update():
    if connection.vendor != "postgresql":
        pytest.skip("Only PostgreSQL has HOT updates")
    Queue.objects.bulk_create(queue_row(f"q{number}", ready=1, unacknowledged=0) for number in range(200))
    ids = list(Queue.objects.order_by("id").values_list("id", flat=True)[::10])
    table = "'queues_queue'::regclass"
    updates = f"SELECT pg_stat_get_xact_tuples_updated({table}), pg_stat_get_xact_tuples_hot_updated({table})"
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(updates)
        all_before, hot_before = cursor.fetchone()  # of earlier tests, which PostgreSQL has not written yet
        bulk.update(Queue, ("ready", "unacknowledged", "last_seen"), [(id_, 2, 0, timezone.now()) for id_ in ids])
        cursor.execute(updates)
        all_after, hot_after = cursor.fetchone()
    assert (all_after - all_before, hot_after - hot_before) == (20, 20)


def test_statements_and_requests_of_a_pass_do_not_grow_with_the_queues(amqp, management, vhost):
    """First pass, steady passes, and passes with missing and gone queues; test_shape.py has warnings and deletions."""
    once.run_once()
    found = []
    for queues in (50, 300):
        names = [f"queue/alice/{queues}-{number}" for number in range(queues)]
        changing = names[::10]
        definitions = {
            "queues": [{"name": name, "durable": True, "auto_delete": False, "arguments": {}} for name in names]
        }
        management._exchange("POST", ("definitions", vhost), json=definitions)
        counts = [counted_pass(new=queues)]
        for name in changing:
            amqp.publish(name, 1)
        counts.append(counted_pass(changed=len(changing)))
        counts.append(counted_pass())
        for name in changing:
            amqp.channel.queue_delete(name)
        counts.append(counted_pass())
        counts.append(counted_pass(gone=len(changing)))
        found.append(counts)
    assert found[0] == found[1]
    assert [requests for _, requests in found[0]] == [4, 4, 4, 6, 6]


def counted_pass(*, new=0, changed=0, gone=0):
    """Run a pass, check its counts, and return the numbers of its statements and requests."""
    with CaptureQueriesContext(connection) as statements, counted_requests() as requests:
        report = once.run_once()
    assert (report.new, report.changed, report.gone, report.errors) == (new, changed, gone, [])
    return len(statements), len(requests)
