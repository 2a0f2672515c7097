"""Muting a queue for oneself, and acknowledging its warning for all: pages, REST API, and what a pass makes of it."""

from datetime import timedelta

import pytest
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.test import Client
from django.utils import timezone

from accounts.models import AuditEntry, PulseUser
from core.refusals import Refusal
from notifications.models import Notification, SubjectMute
from notifications.sending import send_due
from queues.actions import notices
from queues.guard import monitor, once, pruning
from queues.models import Queue, QueueEvent
from tests.support.api import Program
from tests.support.toolbox import calling_first, sent, stored_queue

pytestmark = pytest.mark.django_db

DAY = timedelta(days=1)


def signed_in(owner):
    client = Client()
    client.force_login(owner)
    return client


@pytest.fixture
def warned(pulse_user, bob):
    """Return a queue of Alice and Bob that has been over its warning threshold for two days."""
    pulse_user.owners.add(bob)
    return stored_queue(
        "queue/alice/builds", pulse_user=pulse_user, state="warned", notified_state="warned", ready=2100,
        unacknowledged=0, warned_since=timezone.now() - 2 * DAY,
    )  # fmt: skip


def in_a_week():
    return f"{timezone.now() + 7 * DAY:%Y-%m-%d}"


def test_an_owner_mutes_a_queue_on_its_page_and_only_they_see_it(warned, alice, bob):
    path = f"/queues/{warned.uuid}/"
    done = signed_in(alice).post(f"{path}mute/", {"set": "1", "until": in_a_week()}, follow=True)
    assert "Muted until" in done.text
    assert "You muted this queue until" in done.text
    assert "You muted it until" in signed_in(alice).get("/queues/").text
    assert "muted" not in signed_in(bob).get("/queues/").text
    unmuted = signed_in(alice).post(f"{path}mute/", {"unmute": "1"}, follow=True)
    assert "You get their notifications again." in unmuted.text
    assert not SubjectMute.objects.exists()


def test_the_page_refuses_a_day_that_is_over(warned, alice):
    page = signed_in(alice).post(f"/queues/{warned.uuid}/mute/", {"set": "1", "until": "2020-01-01"})
    assert "at most a year from now" in page.text
    assert not SubjectMute.objects.exists()


def test_several_queues_are_muted_from_the_list(warned, alice, pulse_user):
    other = stored_queue("queue/alice/other", pulse_user=pulse_user)
    client, body = signed_in(alice), {"action": "mute", "uuid": [warned.uuid.hex, other.uuid.hex], "list": "search=a"}
    assert "Mute 2 queues" in client.post("/queues/selected/", body).text
    done = client.post("/queues/selected/", {**body, "set": "1", "until": in_a_week()})
    assert done.url == "/queues/?search=a"
    assert SubjectMute.objects.count() == 2


def test_an_operator_cannot_mute_the_queue_of_others(warned, operator):
    with pytest.raises(PermissionDenied, match="only queues that you own"):
        notices.mute([warned], operator, timezone.now() + DAY)


def test_the_owner_of_agents_can_mute_their_queues(alice):
    queue = stored_queue("consumer_1", vhost=alice.uuid.hex, owner=alice, registered=True)
    notices.mute([queue], alice, timezone.now() + DAY)
    assert list(notices.muted_until([queue], alice)) == [queue.pk]


def test_a_queue_is_muted_through_the_api(warned, alice, bob):
    program, until = Program(alice), timezone.now() + DAY
    muted = program.put(f"queues/{warned.uuid}/mute/", {"until": until.isoformat()}).json()
    assert muted["muted_until"] == until.isoformat().replace("+00:00", "Z")
    assert program.get("queues/").json()[0]["muted_until"] == muted["muted_until"]
    assert Program(bob).get(f"queues/{warned.uuid}/").json()["muted_until"] is None
    assert program.delete(f"queues/{warned.uuid}/mute/").status_code == 204
    refused = program.put(f"queues/{warned.uuid}/mute/", {"until": (until - 2 * DAY).isoformat()})
    assert (refused.status_code, list(refused.json())) == (400, ["until"])


def test_mutes_that_are_over_are_pruned(warned, alice):
    notices.mute([warned], alice, timezone.now() + DAY)
    SubjectMute.objects.update(until=timezone.now() - DAY)
    pruning.prune()
    assert not SubjectMute.objects.exists()


def test_an_acknowledgement_is_shown_to_co_owners_and_operators(warned, alice, bob, operator):
    done = signed_in(alice).post(f"/queues/{warned.uuid}/acknowledge/", follow=True)
    assert "nobody is reminded until the queue is back to normal" in done.text
    for other in (bob, operator):
        for page in (f"/queues/{warned.uuid}/", "/queues/", "/"):
            assert "alice@example.org is on it" in signed_in(other).get(page).text
    event = QueueEvent.objects.get(kind="acked")
    assert (event.by, AuditEntry.objects.latest("id").event) == (alice, "acknowledged a warning")


def test_a_warning_is_acknowledged_through_the_api(warned, alice, bob):
    shown = Program(bob).post(f"queues/{warned.uuid}/acknowledge/").json()
    assert shown["acknowledged_by"] == "bob@example.org"
    assert Program(alice).get(f"queues/{warned.uuid}/").json() == shown
    assert Program(bob).post(f"queues/{warned.uuid}/acknowledge/").json() == shown
    Queue.objects.update(warned_since=timezone.now())  # it was back to normal in between
    later = Program(alice).get(f"queues/{warned.uuid}/").json()
    assert (later["acknowledged_at"], later["acknowledged_by"]) == (None, None)


def test_only_a_warning_can_be_acknowledged(alice, pulse_user):
    queue = stored_queue("queue/alice/builds", pulse_user=pulse_user)
    with pytest.raises(Refusal, match="not over its warning threshold") as refused:
        notices.acknowledge(queue, alice)
    assert refused.value.status == 409


def test_an_acknowledgement_outlives_its_owner(warned, alice, bob):
    notices.acknowledge(warned, bob)
    get_user_model().objects.get(pk=bob.pk).delete()
    assert "A former owner is on it" in signed_in(alice).get("/queues/").text


@pytest.fixture
def over(guarded, pulse_user, amqp):
    """Return Alice's queue, which a pass warned about a day ago."""
    amqp.queue("queue/alice/builds", 6)
    once.run_once()
    Queue.objects.update(warned_since=timezone.now() - DAY, quiet_until=None)
    return Queue.objects.get()


def test_a_pass_reminds_owners_and_operators_once(over, mailbox):
    for _ in range(3):
        once.run_once()
    assert sent("alice@example.org") == sent("ops@example.org") == ["warning", "reminder"]
    send_due()
    mail = mailbox.to("alice@example.org")[-1]
    assert mail.subject == "[Guardian] Still over its threshold: queue/alice/builds has 6 messages"
    assert "for 24 hours. It has 6 messages." in mail.text
    assert "acknowledge the warning on the queue's page" in " ".join(mail.text.split())


def test_without_reminders_a_pass_sends_none(over, settings):
    settings.GUARDIAN_REMINDER_HOURS = 0
    once.run_once()
    assert sent("alice@example.org") == ["warning"]


def test_a_muted_queue_is_not_reminded_of_and_an_acknowledged_one_to_nobody(over, alice, bob):
    over.pulse_user.owners.add(bob)
    notices.mute([over], alice, timezone.now() + DAY)
    once.run_once()
    assert (sent("alice@example.org"), sent("bob@example.org")) == (["warning"], ["reminder"])
    Queue.objects.update(warned_since=timezone.now() - DAY, reminded_at=None)
    notices.acknowledge(over, bob)
    once.run_once()
    assert Notification.objects.filter(kind="reminder").count() == 2  # to Bob and the operator


def test_an_acknowledgement_during_a_pass_stops_its_reminder(over, alice):
    with calling_first(monitor, "write", lambda: notices.acknowledge(over, alice)):
        once.run_once()
    once.run_once()
    assert sent("alice@example.org") == ["warning"]
    assert Queue.objects.get().acknowledged_by == alice


def test_a_pass_lets_a_warning_wait_for_the_hold_off(guarded, pulse_user, amqp, as_alice):
    as_alice.post("/pulse-users/alice/hold-off/", {"hold_off_minutes": "10"})
    amqp.queue("queue/alice/builds", 6)
    once.run_once()
    assert (Queue.objects.get().state, sent("alice@example.org")) == ("warned", [])
    Queue.objects.update(warned_since=timezone.now() - timedelta(minutes=10))
    once.run_once()
    assert sent("alice@example.org") == ["warning"]


def test_the_hold_off_is_set_by_page_and_api_up_to_an_hour(pulse_user, alice, as_alice):
    assert (
        "Enter 0 to 60 minutes."
        in as_alice.post("/pulse-users/alice/hold-off/", {"hold_off_minutes": "61"}, follow=True).text
    )
    program = Program(alice)
    assert program.patch("pulse-users/alice/", {"hold_off_minutes": 60}).json()["hold_off_minutes"] == 60
    assert program.patch("pulse-users/alice/", {"hold_off_minutes": 61}).status_code == 400
    assert PulseUser.objects.get().hold_off_minutes == 60
