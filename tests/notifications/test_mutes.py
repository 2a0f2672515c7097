"""Owners choose which notifications about a Pulse user's queues they get, and in which channels."""

from dataclasses import replace
from datetime import time, timedelta

import pytest
import time_machine
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import NotificationAddress
from core.refusals import Refusal
from notifications import kinds, mutes
from notifications.enqueue import Notice, enqueue
from notifications.models import Channel, Mute, Notification
from queues.mails.kinds import DELETION, LAST_CALL, NO_CONSUMERS, OUTAGE, REMINDER, WARNING
from tests.support.api import Program

pytestmark = pytest.mark.django_db


@pytest.fixture
def chat(alice):
    return Channel.objects.create(owner=alice, name="chat", service="Slack", sealed_url="")


def sent_to(pulse_user, kind):
    Notification.objects.all().delete()
    enqueue([Notice(kind, {}, subject="queue 1", pulse_user_id=pulse_user.pk)], timezone.now())
    return set(Notification.objects.values_list("recipient", "channel"))


def test_a_muted_topic_is_not_sent_to_that_owner_in_that_channel(pulse_user, alice, bob, chat):
    pulse_user.owners.add(bob)
    mutes.set_muted(alice, pulse_user, {("length", "email")})
    chat_of_alice = (alice.email, chat.uuid.hex)
    assert sent_to(pulse_user, WARNING) == {(bob.email, "email"), chat_of_alice}
    everybody = {(alice.email, "email"), chat_of_alice, (bob.email, "email")}
    assert sent_to(pulse_user, DELETION) == sent_to(pulse_user, LAST_CALL) == everybody
    assert sent_to(pulse_user, NO_CONSUMERS) == everybody


def test_operators_and_added_addresses_get_what_an_owner_muted(pulse_user, alice, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org", alice.email]
    NotificationAddress.objects.create(
        pulse_user=pulse_user, email="team@example.org", added_by=alice, confirmed_at=timezone.now()
    )
    mutes.set_muted(alice, pulse_user, {("length", "email")})
    addresses = {address for address, _ in sent_to(pulse_user, WARNING)}
    assert addresses == {"ops@example.org", "team@example.org", alice.email}


def test_every_topic_is_one_of_a_kind_and_news_of_the_broker_cannot_be_muted():
    assert {mutes.topic_of(kinds.get(name)) for name in kinds.names()} - {""} == set(mutes.TOPICS)
    assert mutes.topic_of(kinds.get(OUTAGE)) == ""


def test_the_page_shows_and_saves_the_choices(pulse_user, alice, as_alice, chat):
    path = "/pulse-users/alice/notifications/"
    assert as_alice.get(path).text.count(" checked>") == 2 * len(mutes.TOPICS)
    as_alice.post(path, {"wanted": ["deletion email", f"length {chat.uuid.hex}", "nonsense", "length"]})
    assert as_alice.get(path).text.count(" checked>") == 2
    assert mutes.muted(alice, pulse_user).isdisjoint({("deletion", "email"), ("length", chat.uuid.hex)})
    assert path in as_alice.get("/settings/").text
    as_alice.post(path, {"nothing": "1", "wanted": ["deletion email"]})
    assert as_alice.get(path).text.count(" checked>") == 0


def test_an_owner_chooses_through_the_api(pulse_user, alice, bob, chat):
    program, path = Program(alice), "pulse-users/alice/notifications/"
    muted = [{"topic": "deletion", "channel": "email"}, {"topic": "length", "channel": chat.uuid.hex}]
    assert program.put(path, {"muted": muted}).json() == program.get(path).json() == {"muted": muted}
    assert sent_to(pulse_user, DELETION) == {(alice.email, chat.uuid.hex)}
    chat.delete()
    assert program.get(path).json() == {"muted": muted[:1]}
    assert Program(bob).get(path).status_code == 404


@pytest.mark.parametrize("choice", [{"topic": "weather", "channel": "email"}, {"topic": "length", "channel": "pigeon"}])
def test_the_api_refuses_unknown_topics_and_channels(pulse_user, alice, choice):
    answer = Program(alice).put("pulse-users/alice/notifications/", {"muted": [choice]})
    assert (answer.status_code, list(answer.json())) == (400, ["muted"])
    assert not Mute.objects.exists()


# One queue, until a time


@pytest.mark.parametrize("kind", [WARNING, REMINDER, NO_CONSUMERS])
def test_a_muted_queue_is_not_notified_to_that_owner_in_any_channel(pulse_user, alice, bob, chat, kind):
    pulse_user.owners.add(bob)
    mutes.mute(alice, ["queue 1"], timezone.now() + timedelta(days=1))
    assert sent_to(pulse_user, kind) == {(bob.email, "email")}


def test_the_deletion_of_a_muted_queue_is_notified(pulse_user, alice):
    mutes.mute(alice, ["queue 1"], timezone.now() + timedelta(days=1))
    assert sent_to(pulse_user, DELETION) == {(alice.email, "email")}


def test_what_is_critical_about_a_muted_queue_is_sent_and_waits_for_no_quiet_hours(pulse_user, alice, monkeypatch):
    critical = replace(kinds.get(WARNING), severity=kinds.Severity.CRITICAL)
    monkeypatch.setitem(kinds._kinds, WARNING, critical)
    alice.quiet_from, alice.quiet_until = time(0), time(23, 59, 59, 999_999)
    alice.save()
    mutes.mute(alice, ["queue 1"], timezone.now() + timedelta(days=1))
    mutes.set_muted(alice, pulse_user, {("length", "email")})
    assert sent_to(pulse_user, WARNING) == {(alice.email, "email")}
    assert Notification.objects.get().deferred_until is None


def test_a_mute_ends_at_its_time_or_when_it_is_taken_back(pulse_user, alice):
    for minutes in (10, 5):
        mutes.mute(alice, ["queue 1", "queue 2"], timezone.now() + timedelta(minutes=minutes))
    mutes.unmute(alice, ["queue 2"])
    assert list(mutes.muted_until(alice, ["queue 1", "queue 2"])) == ["queue 1"]
    with time_machine.travel(timezone.now() + timedelta(minutes=6)):
        assert mutes.muted_until(alice, ["queue 1"]) == {}
        assert sent_to(pulse_user, WARNING) == {(alice.email, "email")}


@pytest.mark.parametrize("until", [timedelta(0), timedelta(days=367)])
def test_a_mute_ends_within_a_year(alice, until):
    with pytest.raises(Refusal, match="at most a year"):
        mutes.mute(alice, ["queue 1"], timezone.now() + until)


def test_the_statements_do_not_grow_with_the_muted_queues(pulse_user, alice):
    def statements(number):
        subjects = [f"queue {one}" for one in range(number)]
        mutes.mute(alice, subjects, timezone.now() + timedelta(days=1))
        with CaptureQueriesContext(connection) as queries:
            enqueue([Notice(WARNING, {}, one, pulse_user.pk) for one in subjects], timezone.now())
        return len(queries)

    assert statements(2) == statements(200)
