"""The weekly summary: recipients, time and content."""

from datetime import UTC, datetime, timedelta

import pytest
import time_machine
from django.utils import timezone

from accounts.models import Owner, PulseUser
from notifications.models import Notification
from notifications.sending import send_due
from queues.mails.weekly import enqueue_weekly_summaries, last_monday
from queues.models import Queue, QueueEvent
from tests.support.toolbox import in_parallel, stored_queue

pytestmark = pytest.mark.django_db(transaction=True)

FOUR_WEEKS = timedelta(days=30)


@pytest.fixture(autouse=True)
def operators(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]


def owner_of(name, **fields):
    owner = Owner.objects.create_user(f"{name}@example.org", **{"date_joined": timezone.now() - FOUR_WEEKS, **fields})
    pulse_user = PulseUser.objects.create(username=name)
    pulse_user.owners.add(owner)
    return owner, pulse_user


def queue(owned_by, name, **fields):
    defaults = {"ready": 0, "unacknowledged": 0, "pulse_user": owned_by}
    return stored_queue(f"queue/{owned_by.username}/{name}", **{**defaults, **fields})


def event(of, kind, days=1):
    at = timezone.now() - timedelta(days=days)
    QueueEvent.objects.create(queue=of, vhost=of.vhost, queue_name=of.name, kind=kind, at=at)


def recipients():
    return sorted(Notification.objects.filter(kind="weekly").values_list("recipient", flat=True))


def facts():
    return Notification.objects.get(kind="weekly").facts


def test_each_owner_with_queues_gets_one_summary_a_week_and_operators_none(mailbox):
    _, pulse_user = owner_of("alice")
    pulse_user.owners.add(owner_of("bob")[0])
    queue(pulse_user, "builds")
    assert enqueue_weekly_summaries() == 2
    assert enqueue_weekly_summaries() == 0
    assert recipients() == ["alice@example.org", "bob@example.org"]
    assert send_due().sent == 2
    assert "Your week: 1 queue" in mailbox.mails[0].subject
    Owner.objects.update(weekly_summary_at=timezone.now() - timedelta(days=8))
    assert enqueue_weekly_summaries() == 2


def test_a_summary_has_states_events_and_the_longest_queues():
    _, pulse_user = owner_of("alice")
    long = queue(pulse_user, "long", ready=900, unacknowledged=100, state="warned", consumers=0)
    short = queue(pulse_user, "short", ready=3, consumers=2)
    queue(pulse_user, "unknown", ready=None, unacknowledged=None)
    gone = queue(pulse_user, "gone", state="gone", ready=5000, consumers=0)
    for kind in ("warned", "warned", "recovered"):
        event(long, kind)
    event(short, "warned", days=8)
    event(gone, "deleted")
    enqueue_weekly_summaries()
    week = facts()
    assert (week["queues"], week["ok"], week["warned"], week["deleted"]) == (3, 2, 1, 1)
    assert week["happened"] == [
        {"queue": "queue/alice/gone", "warnings": 0, "deletions": 1},
        {"queue": "queue/alice/long", "warnings": 2, "deletions": 0},
    ]
    assert week["longest"] == [
        {"queue": "queue/alice/long", "length": 1000}, {"queue": "queue/alice/short", "length": 3},
    ]  # fmt: skip
    assert [line["queue"] for line in week["unattended"]] == ["queue/alice/long"]
    assert week["more_unattended"] == 0


def test_a_summary_includes_queues_of_agents():
    alice, pulse_user = owner_of("alice")
    bob, _ = owner_of("bob")
    queue(pulse_user, "builds", ready=1)
    agents = {"pulse_user": None, "registered": True, "consumers": 0}
    hers = queue(pulse_user, "x", vhost=alice.uuid.hex, owner=alice, ready=2100, state="warned", **agents)
    lost = queue(pulse_user, "y", vhost=alice.uuid.hex, owner=alice, state="gone", **agents)
    queue(pulse_user, "z", vhost=bob.uuid.hex, owner=bob, **agents)
    dead_letters = queue(pulse_user, "w", vhost=alice.uuid.hex, owner=alice, ready=3, **agents)
    Queue.objects.filter(pk=dead_letters.pk).update(name="guardian.dlq")
    event(hers, "warned")
    event(lost, "deleted")
    assert enqueue_weekly_summaries() == 2
    week = Notification.objects.get(recipient="alice@example.org").facts
    assert (week["queues"], week["ok"], week["warned"], week["deleted"]) == (3, 2, 1, 1)
    assert [(line["queue"], line["length"]) for line in week["longest"]] == [
        ("queue/alice/x", 2100), ("guardian.dlq", 3), ("queue/alice/builds", 1),
    ]  # fmt: skip
    assert [line["queue"] for line in week["happened"]] == ["queue/alice/y", "queue/alice/x"]
    assert ([line["queue"] for line in week["unattended"]], week["more_unattended"]) == (["queue/alice/x"], 0)


def test_long_lists_of_a_summary_are_cut_with_a_count():
    owner, pulse_user = owner_of("alice")
    second = PulseUser.objects.create(username="alice-2")
    second.owners.add(owner)
    for number in range(15):
        for of in (pulse_user, second):
            event(queue(of, f"{number}", ready=number, consumers=0), "warned")
    enqueue_weekly_summaries()
    week = facts()
    assert week["queues"] == 30
    assert [line["length"] for line in week["longest"]] == [14, 14, 13, 13, 12]
    assert (len(week["unattended"]), week["more_unattended"]) == (10, 20)
    assert (len(week["happened"]), week["more_happened"]) == (20, 10)


def test_an_owner_without_queues_or_events_gets_no_summary():
    owner_of("empty")
    _, pulse_user = owner_of("lost")
    event(queue(pulse_user, "gone", state="gone"), "deleted")
    assert enqueue_weekly_summaries() == 1
    assert recipients() == ["lost@example.org"]


@pytest.mark.parametrize(
    "fields", [{"weekly_summary": False}, {"is_active": False}, {"date_joined": timezone.now() + timedelta(minutes=1)}]
)
def test_disabled_deactivated_and_new_owners_get_no_summary(fields):
    _, pulse_user = owner_of("alice", **fields)
    queue(pulse_user, "builds")
    assert enqueue_weekly_summaries() == 0


@pytest.mark.parametrize(
    ("now", "zone", "monday"),
    [
        ("2026-11-18T12:00:00+00:00", "UTC", "2026-11-16T08:00:00+00:00"),
        ("2026-11-16T08:00:00+00:00", "UTC", "2026-11-16T08:00:00+00:00"),
        ("2026-11-16T07:59:00+00:00", "UTC", "2026-11-09T08:00:00+00:00"),
        ("2026-11-16T07:00:00+00:00", "Europe/Berlin", "2026-11-16T07:00:00+00:00"),
        ("2026-11-16T06:59:00+00:00", "Europe/Berlin", "2026-11-09T07:00:00+00:00"),
        ("2026-11-15T19:00:00+00:00", "Pacific/Auckland", "2026-11-15T19:00:00+00:00"),
        ("2026-11-16T15:59:00+00:00", "America/Los_Angeles", "2026-11-09T16:00:00+00:00"),
        ("2026-11-16T16:00:00+00:00", "America/Los_Angeles", "2026-11-16T16:00:00+00:00"),
        ("2026-11-16T12:00:00+00:00", "Mars/Olympus", "2026-11-16T08:00:00+00:00"),
    ],
)
def test_a_summary_is_due_on_monday_at_eight_in_the_owners_zone(now, zone, monday):
    assert last_monday(datetime.fromisoformat(now), zone) == datetime.fromisoformat(monday)


def test_a_summary_is_deferred_in_quiet_hours():
    now = datetime.now(UTC)
    _, pulse_user = owner_of(
        "alice", quiet_from=(now - timedelta(hours=1)).time(), quiet_until=(now + timedelta(hours=1)).time()
    )
    queue(pulse_user, "builds")
    enqueue_weekly_summaries()
    assert Notification.objects.get().deferred_until is not None


def test_concurrent_runs_enqueue_each_summary_once():
    for number in range(5):
        queue(owner_of(f"o{number}")[1], "builds")
    assert sum(in_parallel(*[enqueue_weekly_summaries] * 3)) == len(recipients()) == 5


@pytest.mark.parametrize(("days", "expected_count"), [(3.9, 0), (4.1, 1)])
def test_a_changed_time_zone_causes_no_second_summary(days, expected_count):
    moment = datetime(2026, 6, 8, 8, 30, tzinfo=UTC)
    with time_machine.travel(moment, tick=False):
        _, pulse_user = owner_of("alice", weekly_summary_at=moment - timedelta(days=days))
        queue(pulse_user, "builds")
        assert enqueue_weekly_summaries() == expected_count
