"""The outbox: notifications are written with their cause and delivered once, in order, through outages."""

import asyncio
import signal
import socket
import threading
import time
import uuid
from datetime import timedelta

import pytest
from django.core.mail import EmailMultiAlternatives
from django.core.management import call_command
from django.db import connection, transaction
from django.utils import timezone

from accounts.models import NotificationAddress, Owner, PulseUser
from core import bounded_requests, bulk
from core.leases import lease
from notifications import (
    audience,
    channel_sending,
    channels,
    claims,
    enqueue,
    kinds,
    mail_sending,
    mails,
    retries,
)
from notifications.audience import Ownership
from notifications.enqueue import Notice
from notifications.models import Channel, Notification
from notifications.sending import send_due
from queues.guard import once
from queues.models import Queue
from tests.support.toolbox import (
    in_background,
    stored_queue,
    wait_until,
    wait_until_blocked,
    wait_until_equal,
)
from tests.support.webhooks import Webhook
from tools.invariants import duplicate_mails, missing_notifications
from tools.mail import MailCatcher
from tools.processes import free_port

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("private_channels"), pytest.mark.sqlite]


@pytest.fixture(autouse=True)
def operators(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]


def notify(*notices):
    """Enqueue these notices in a transaction, and return the number of notifications."""
    with transaction.atomic():
        return enqueue.enqueue(notices, timezone.now())


def notify_operators(*errors):
    notify(*(Notice("outage", {"error": error}) for error in errors))


def insert_notifications(state, number, to_channels=False):
    """Insert this many notifications to one recipient, about 500 queues in turn."""
    now, to = timezone.now(), ("ops@example.org", "0123abcd" if to_channels else audience.EMAIL)
    fields = (None, state, now, now, 0, "", None)
    rows = [(uuid.uuid4(), *to, "warning", f"queue {row % 500}", {}, *fields) for row in range(number)]
    bulk.insert(Notification, enqueue.COLUMNS, rows)


def pass_time_in_outbox(**delta):
    """Make every notification older by this time."""
    moved = timedelta(**delta)
    for notification in Notification.objects.all():
        notification.created -= moved
        notification.due_at -= moved
        notification.save()


def test_a_notification_waits_for_an_earlier_one_that_failed(mailbox):
    mailbox.refuse(True)
    notify_operators("first")
    assert send_due().postponed == 1
    mailbox.refuse(False)
    notify_operators("second")
    assert send_due().sent == 0
    pass_time_in_outbox(seconds=20)
    assert send_due().sent == 2
    assert ["first" in mail.text for mail in mailbox.mails] == [True, False]
    assert missing_notifications() + duplicate_mails(mailbox.mails) == []


def test_a_rejected_recipient_does_not_delay_the_others(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["a@example.org", "b@example.org", "c@example.org"]
    mailbox.rejected.add("b@example.org")
    notify_operators("one")
    delivery = send_due()
    assert (delivery.sent, delivery.postponed) == (2, 1)
    mailbox.rejected.clear()
    pass_time_in_outbox(seconds=20)
    assert send_due().sent == 1
    assert missing_notifications() + duplicate_mails(mailbox.mails) == []


def test_a_notification_is_given_up_after_a_day_of_retries_and_not_when_the_clock_jumps(mailbox):
    mailbox.refuse(True)
    notify_operators("one")
    pass_time_in_outbox(hours=25)
    assert send_due().postponed == 1
    pass_time_in_outbox(minutes=15)
    Notification.objects.update(attempts=retries.MIN_ATTEMPTS - 1)
    assert send_due().failed == 1
    notification = Notification.objects.get()
    assert notification.state == "failed"
    assert "451" in notification.last_error


def test_the_least_attempts_take_about_a_day():
    seconds = sum(retries.retry_seconds(attempts) for attempts in range(1, retries.MIN_ATTEMPTS))
    assert timedelta(hours=22) < timedelta(seconds=seconds) < retries.RETRY_FOR


@pytest.mark.parametrize("sender", ["guardian@", "a@b@c"])
def test_an_invalid_sender_address_postpones_mails(mailbox, settings, sender):
    settings.DEFAULT_FROM_EMAIL = sender
    notify_operators("one")
    assert send_due().postponed == 1
    assert "Invalid address" in Notification.objects.get().last_error


def test_a_hanging_mail_server_costs_one_timeout(settings, mailbox):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(20)]
    settings.EMAIL_TIMEOUT = 0.5
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.EMAIL_HOST, settings.EMAIL_PORT = silent.getsockname()
        notify_operators("one")
        began = time.monotonic()
        assert send_due().postponed == 20
    assert time.monotonic() - began < 5
    settings.EMAIL_PORT = mailbox.port
    pass_time_in_outbox(seconds=20)
    assert send_due().sent == 20
    assert missing_notifications() + duplicate_mails(mailbox.mails) == []


class Slow(MailCatcher):
    """A slow mail server that counts concurrent mails."""

    at_once = most_at_once = 0

    async def handle_DATA(self, server, session, envelope):  # noqa: N802
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.1)
        self.at_once -= 1
        return await super().handle_DATA(server, session, envelope)


def test_mails_are_sent_over_a_limited_number_of_connections(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(12)]
    with Slow() as slow:
        settings.EMAIL_PORT = slow.port
        notify_operators("one")
        assert send_due().sent == 12
        assert slow.most_at_once == mail_sending.MAX_CONNECTIONS
        assert missing_notifications() + duplicate_mails(slow.mails) == []


def test_a_pass_with_more_notifications_than_one_claim_starts_a_second_task(amqp, guarded, settings, monkeypatch):
    monkeypatch.setattr(claims, "MAX_CLAIMED", 4)
    asked = []
    monkeypatch.setattr(enqueue.current_app, "send_task", lambda name, **_: asked.append(name))
    once.run_once()
    for number, times in ((4, 1), (5, 2)):
        settings.GUARDIAN_OPERATOR_EMAILS = [f"op{one}@example.org" for one in range(number)]
        amqp.queue(f"queue/nobody/{number}", 6)
        assert once.run_once().notifications == number
        assert asked == ["notifications.tasks.send_notifications"] * times
        asked.clear()


def test_no_second_task_is_started_while_the_mail_server_is_unavailable(mailbox, settings, monkeypatch):
    monkeypatch.setattr(claims, "MAX_CLAIMED", 4)
    asked = []
    monkeypatch.setattr(enqueue, "wake", asked.append)
    settings.EMAIL_PORT = free_port()
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{one}@example.org" for one in range(12)]
    notify_operators("one")
    assert send_due().postponed == 4
    assert asked == []
    assert all("refused" in one.last_error for one in Notification.objects.filter(attempts=1))


def test_concurrent_claims_are_disjoint(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(4)]
    notify_operators("one")
    with transaction.atomic():
        mine = claims.claim(2)
        other = in_background(claims.claim, 2)
        wait_until_blocked(other)  # on SQLite it waits; on PostgreSQL it ends
    assert len({one.id for one in [*mine, *other.result()]}) == len(mine) + len(other.result()) == 4


class OneOnly(MailCatcher):
    """A mail server that accepts only the first connection."""

    first = None

    def wants(self, session):
        self.first = self.first or session
        return session is self.first

    async def handle_EHLO(self, server, session, envelope, hostname, responses):  # noqa: N802
        session.host_name = hostname
        return responses if self.wants(session) else ["421 Too many connections"]

    async def handle_HELO(self, server, session, envelope, hostname):  # noqa: N802
        return "421 Too many connections"


def test_a_mail_server_with_a_single_connection_gets_all_mails(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(12)]
    with OneOnly() as server:
        settings.EMAIL_PORT = server.port
        notify_operators("one")
        assert (send_due().sent, Notification.objects.filter(attempts__gt=0).count()) == (12, 0)
        assert missing_notifications() + duplicate_mails(server.mails) == []


class CutsOff(MailCatcher):
    """A mail server that cuts the connection at the mail to op4, the fifth."""

    async def handle_DATA(self, server, session, envelope):  # noqa: N802
        if "op4@example.org" in envelope.rcpt_tos:
            server.transport.abort()
        return await super().handle_DATA(server, session, envelope)


def test_mails_after_a_cut_connection_use_the_open_ones(mailbox, settings, monkeypatch):
    monkeypatch.setattr(mail_sending, "MAIL_BATCH_SIZE", 4)
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(8)]
    monkeypatch.setattr(claims, "MAX_CLAIMED", 5)
    with CutsOff() as server:
        settings.EMAIL_PORT = server.port
        notify_operators("one")
        delivery = send_due()
        assert (delivery.sent, delivery.postponed) == (7, 1)
        assert Notification.objects.get(state="due").recipient == "op4@example.org"


def test_a_mail_that_cannot_be_built_does_not_stop_the_others(mailbox, settings, monkeypatch):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(12)]
    as_bytes = EmailMultiAlternatives.message

    def fail_for_one(message, *args, **kwargs):
        if message.to == ["op3@example.org"]:
            raise LookupError("no such charset")
        return as_bytes(message, *args, **kwargs)

    monkeypatch.setattr(EmailMultiAlternatives, "message", fail_for_one)
    notify_operators("one")
    delivery = send_due()
    assert (delivery.sent, delivery.postponed) == (11, 1)
    assert Notification.objects.get(state="due").last_error == "no such charset"


def test_a_kind_that_only_another_release_knows_waits_for_a_sender_of_that_release(mailbox, monkeypatch):
    notify_operators("one")
    with monkeypatch.context() as this_release:
        this_release.delitem(kinds._kinds, "outage")
        assert (send_due().postponed, Notification.objects.get().state) == (1, "due")
    pass_time_in_outbox(minutes=1)
    assert send_due().sent == 1


def test_the_claim_of_a_killed_sender_expires(mailbox):
    notify_operators("one")
    assert len(claims.claim(10)) == 1
    assert send_due().sent == 0
    pass_time_in_outbox(minutes=5)
    assert send_due().sent == 1


def test_a_resent_mail_has_the_same_message_id(mailbox):
    notify_operators("one")
    send_due()
    Notification.objects.update(state="due", sent_at=None)
    send_due()
    assert len({mail.message["Message-ID"] for mail in mailbox.mails}) == 1


@pytest.mark.parametrize("to_channels", [False, True])
def test_due_notifications_are_found_by_an_index_or_anti_join(to_channels):
    insert_notifications("sent", 9_000, to_channels)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE notifications_notification")
    insert_notifications("due", 500, to_channels)
    plan = []

    def explain(execute, sql, parameters, many, context):
        if sql.startswith("SELECT") and not plan:
            with connection.cursor() as cursor:
                cursor.execute(f"{'EXPLAIN QUERY PLAN' if is_sqlite else 'EXPLAIN'} {sql}", parameters)
                plan.extend(str(line[-1]) for line in cursor.fetchall())
        return execute(sql, parameters, many, context)

    is_sqlite = connection.vendor == "sqlite"
    with connection.execute_wrapper(explain):
        assert len(claims.claim(10, to_channels=to_channels)) == 10
    if is_sqlite:
        assert any("USING INDEX notification_about (recipient=? AND about=?" in line for line in plan)
    else:
        assert any("Anti Join" in line for line in plan)
        assert not any("Nested Loop" in line for line in plan)


# Recipients


WARNING = {
    "queue": "queue/alice/builds", "vhost": "/", "state": "warned", "length": 6, "ready": 6, "unacknowledged": 0,
    "warn": 5, "max": 10, "spared": False, "per_second": None, "seconds_to_max": None, "folded": 0, "consumers": None,
    "bindings": None, "more_bindings": 0,
}  # fmt: skip


def notify_owners(pulse_user, *kinds):
    return notify(*(Notice(kind, {**WARNING}, pulse_user_id=pulse_user.id) for kind in kinds))


def destinations():
    return sorted(Notification.objects.values_list("recipient", "channel"))


def test_owners_operators_and_confirmed_addresses_are_notified(pulse_user, alice, mailbox):
    confirmed = timezone.now()
    NotificationAddress.objects.create(
        pulse_user=pulse_user, email="team@example.org", added_by=alice, confirmed_at=confirmed
    )
    NotificationAddress.objects.create(pulse_user=pulse_user, email="waiting@example.org", added_by=alice)
    notify_owners(pulse_user, "warning")
    send_due()
    texts = {mail.recipients[0]: (mail.text, mail.html) for mail in mailbox.mails}
    assert sorted(texts) == ["alice@example.org", "ops@example.org", "team@example.org"]
    for text in texts["alice@example.org"]:
        assert "because the queue belongs to your Pulse user" in text
        assert "/settings/" in text
    for text in texts["ops@example.org"]:
        assert "as an operator" in text
    for text in texts["team@example.org"]:
        assert "because alice@example.org added your address to the Pulse user" in text
        assert "To be removed, ask its owners: alice@example.org" in text


def test_an_address_with_several_roles_gets_one_mail(pulse_user, alice, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["alice@example.org", "ALICE@example.org", "team@example.org"]
    for email in ("alice@example.org", "team@example.org"):
        NotificationAddress.objects.create(pulse_user=pulse_user, email=email, confirmed_at=timezone.now())
    assert notify_owners(pulse_user, "warning") == 2


@pytest.mark.parametrize("many", [1, 8])
def test_the_statements_of_enqueue_do_not_grow_with_the_notices(django_assert_num_queries, many, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(many)]
    pulse_users = []
    for number in range(many):
        owner = Owner.objects.create_user(f"o{number}@example.org")
        pulse_user = PulseUser.objects.create(username=f"u{number}")
        pulse_user.owners.add(owner)
        NotificationAddress.objects.create(pulse_user=pulse_user, email="a@example.org", confirmed_at=timezone.now())
        for name in "ab":
            Channel.objects.create(owner=owner, name=name, service="x", sealed_url="x")
        pulse_users.append(pulse_user)
    notices = [Notice("warning", {}, pulse_user_id=pulse_user.id) for pulse_user in pulse_users]
    with transaction.atomic(), django_assert_num_queries(4):
        assert enqueue.enqueue(notices, timezone.now()) == many * (4 + many)
    with transaction.atomic(), django_assert_num_queries(4):
        enqueue.enqueue(
            [Notice("deletion", {}, pulse_user_id=pulse_user.id) for pulse_user in pulse_users], timezone.now()
        )


def agents_queue(owner, **fields):
    return stored_queue("consumer_1", vhost=owner.uuid.hex, **{"owner": owner, "registered": True, **fields})


def notify_agents_owner(queue, *kinds):
    facts = {**WARNING, "agents": True}
    notify(*(Notice(kind, facts, f"queue {queue.id}", owner_id=queue.owner_id) for kind in kinds))


def test_a_queue_of_agents_notifies_their_present_owner_and_operators_only(pulse_user, alice, mailbox):
    NotificationAddress.objects.create(pulse_user=pulse_user, email="team@example.org", confirmed_at=timezone.now())
    channel = Channel.objects.create(owner=alice, name="chat", service="x", sealed_url="x")
    notify_agents_owner(agents_queue(alice), "warning")
    assert destinations() == sorted(
        [
            ("alice@example.org", "email"),
            ("alice@example.org", channel.uuid.hex),
            ("ops@example.org", "email"),
        ]
    )
    send_due()
    (mail,) = mailbox.to("alice@example.org")
    assert "because the queue belongs to your agents" in mail.text
    mailbox.clear()
    notify_agents_owner(Queue.objects.get(), "warning")
    Queue.objects.update(owner=Owner.objects.create_user("bob@example.org"))
    send_due()
    assert [mail.recipients for mail in mailbox.mails] == [("ops@example.org",)]


def test_an_unowned_queue_notifies_operators_only(settings):
    assert audience.recipients_of([Ownership(), Ownership()]) == {}
    assert audience.has_recipients(Ownership(), {})
    settings.GUARDIAN_OPERATOR_EMAILS = []
    assert not audience.has_recipients(Ownership(), {})


def test_named_recipients_are_notified_once_and_alone(pulse_user, mailbox):
    Owner.objects.create_user("bob@example.org")
    assert notify(Notice("vouched", {"by": ""}, recipients=["bob@example.org", "bob@example.org"])) == 1
    assert send_due().sent == 1
    assert [mail.recipients[0] for mail in mailbox.mails] == ["bob@example.org"]


# Recipients that changed before sending


@pytest.fixture
def queue(pulse_user):
    return stored_queue("queue/alice/builds", pulse_user=pulse_user)


def notify_about_queue(queue, *kinds):
    notify(*(Notice(kind, {**WARNING}, f"queue {queue.id}", queue.pulse_user_id) for kind in kinds))


def recipients(mailbox):
    return sorted(mail.recipients[0] for mail in mailbox.mails)


def obsolete():
    return sorted(Notification.objects.filter(state="failed").values_list("recipient", "last_error"))


def test_a_removed_owner_or_address_is_not_notified(pulse_user, alice, queue, webhook, mailbox):
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    pulse_user.owners.add(bob)
    channels.create_channel(bob, "room", webhook.url("/bob"))
    NotificationAddress.objects.create(pulse_user=pulse_user, email="team@example.org", confirmed_at=timezone.now())
    notify_about_queue(queue, "warning")
    pulse_user.owners.remove(bob)
    NotificationAddress.objects.all().delete()
    delivery = send_due()
    assert (delivery.sent, delivery.failed) == (2, 0)
    assert recipients(mailbox) == ["alice@example.org", "ops@example.org"]
    assert webhook.received == []
    why = "The recipient is no longer notified about this subject."
    assert obsolete() == [("bob@example.org", why), ("bob@example.org", why), ("team@example.org", why)]


def test_a_deletion_is_notified_after_its_pulse_user_is_deleted(pulse_user, queue, mailbox):
    notify_about_queue(queue, "warning", "deletion")
    pulse_user.delete()
    send_due()
    assert recipients(mailbox) == ["alice@example.org", "ops@example.org"]
    assert ["Deleted" in mail.subject for mail in mailbox.mails] == [True, True]


def test_a_deactivated_owner_is_not_notified_even_of_a_deletion(pulse_user, alice, queue, room, webhook, mailbox):
    notify_about_queue(queue, "deletion")
    notify(Notice("vouched", {"by": ""}, recipients=["alice@example.org"]))
    Owner.objects.update(is_active=False)
    notify_about_queue(queue, "warning")  # to operators only
    pulse_user.delete()
    send_due()
    assert set(recipients(mailbox)) == {"ops@example.org"}
    assert webhook.received == []
    assert obsolete() == [("alice@example.org", "The recipient can no longer sign in.")] * 3


def test_the_statements_of_drop_outdated_do_not_grow_with_the_batch(queue, pulse_user, django_assert_num_queries):
    for number in range(8):
        owner = Owner.objects.create_user(f"o{number}@example.org")
        other = PulseUser.objects.create(username=f"u{number}")
        other.owners.add(owner)
        notify_about_queue(stored_queue(f"queue/u{number}/x", pulse_user=other), "warning")
    notify_about_queue(queue, "warning")
    batch = claims.claim(100)
    assert len(batch) == 18
    for some in (batch[:2], batch):
        with django_assert_num_queries(5):
            assert claims.drop_outdated(some) == some


# Channels


@pytest.fixture
def room(alice, webhook):
    return channels.create_channel(alice, "room", webhook.url())


def test_a_notification_goes_to_mail_and_channels_of_each_owner(pulse_user, room, webhook, mailbox):
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    channels.create_channel(bob, "not an owner's", webhook.url("/bob"))
    notify_owners(pulse_user, "warning")
    assert destinations() == sorted(
        [("alice@example.org", "email"), ("alice@example.org", room.uuid.hex), ("ops@example.org", "email")]
    )
    assert send_due().sent == 3
    (request,) = webhook.received
    assert request.json["title"] == "[Guardian] Warning: queue/alice/builds has 6 messages"
    assert request.json["message"].splitlines() == [
        "The queue queue/alice/builds has 6 messages. Its warning threshold is 5.",
        "Next: If it grows past 10 messages, Guardian deletes it with all its messages.",
        "http://127.0.0.1:8000",
    ]
    room.refresh_from_db()
    assert room.last_sent_at is not None


def test_a_failed_channel_is_retried_in_order(pulse_user, room, webhook, mailbox):
    webhook.status = 503
    notify_owners(pulse_user, "warning")
    assert (send_due().sent, len(webhook.received)) == (2, 1)
    notify_owners(pulse_user, "no-consumers")
    assert (send_due().sent, len(webhook.received)) == (2, 1)
    room.refresh_from_db()
    assert "it answered 503" in room.last_error
    assert "503" in Notification.objects.get(channel=room.uuid.hex, kind="warning").last_error
    webhook.status = 200
    pass_time_in_outbox(seconds=30)
    assert send_due().sent == 2
    assert ["Warning" in request.json["title"] for request in webhook.received] == [True, True, False]
    assert set(Notification.objects.values_list("state", flat=True)) == {"sent"}


def test_a_channel_is_tried_once_per_run_after_a_failure(pulse_user, alice, room, webhook, mailbox):
    webhook.status = 503
    notify_owners(pulse_user, "warning", "warning", "warning")
    for number, row in enumerate(Notification.objects.filter(channel=room.uuid.hex)):
        Notification.objects.filter(id=row.id).update(about=f"queue {number}")
    assert send_due().postponed == 3
    assert len(webhook.received) == 1


def test_notifications_to_a_removed_channel_are_given_up(pulse_user, room, webhook, mailbox, caplog):
    notify_owners(pulse_user, "warning")
    room.delete()
    delivery = send_due()
    assert (delivery.sent, delivery.failed) == (2, 0)
    row = Notification.objects.get(channel=room.uuid.hex)
    assert (row.state, row.last_error) == ("failed", "The channel was removed.")
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


def test_hanging_channels_delay_neither_mails_nor_other_channels(
    pulse_user, alice, webhook, mailbox, certificate, monkeypatch
):
    monkeypatch.setattr(bounded_requests, "SECONDS", 1)
    with Webhook(certificate) as stuck:
        stuck.slowly = lambda write: time.sleep(60)
        for number in range(5):
            channels.create_channel(alice, f"stuck {number}", stuck.url())
        channels.create_channel(alice, "room", webhook.url())
        notify_owners(pulse_user, "warning")
        began = time.monotonic()
        background = in_background(send_due)
        mailbox.wait_for(lambda mail: "alice@example.org" in mail.recipients, timeout=3)
        wait_until(lambda: webhook.received, seconds=3)
        background.result()
        assert time.monotonic() - began < 9
        assert Notification.objects.filter(state="due", attempts=1).count() == 5


class Clock:
    """A clock that only a test moves."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(mail_sending, "time", clock)
    monkeypatch.setattr(channel_sending, "time", clock)
    return clock


def test_channels_beyond_the_time_limit_wait_for_the_next_call(pulse_user, alice, webhook, mailbox, monkeypatch, clock):
    monkeypatch.setattr(channel_sending, "MAX_SENDING_SECONDS", 2)
    monkeypatch.setattr(channel_sending, "MAX_CONCURRENT_CHANNELS", 1)
    webhook.slowly = lambda write: (clock.sleep(1), write(b"HTTP/1.0 200 OK\r\n\r\n"))
    for number in range(4):
        channels.create_channel(alice, f"room {number}", webhook.url())
    notify_owners(pulse_user, "warning")
    assert [send_due().sent for _ in range(3)] == [2 + 2, 2, 0]  # two mails first, and two channels per call
    assert set(Notification.objects.values_list("state", "attempts")) == {("sent", 0)}
    assert len(webhook.received) == 4


def test_mails_beyond_the_time_limit_wait_for_the_next_call_and_the_command_sends_all(
    mailbox, settings, monkeypatch, capsys, clock
):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(10)]
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(mail_sending, "MAX_SENDING_SECONDS", 3)
    compose = mails.compose
    monkeypatch.setattr(mails, "compose", lambda *args: (clock.sleep(1), compose(*args))[1])
    notify_operators("one")
    assert send_due().sent == 3
    assert Notification.objects.filter(state="due", attempts=0, claim=None).count() == 7
    call_command("send_notifications", "--once")
    assert len(mailbox.mails) == 10
    assert capsys.readouterr().out == "7 sent, 0 to be retried, 0 given up.\n"


def test_channels_have_one_sender_at_a_time(pulse_user, room, webhook, mailbox):
    notify_owners(pulse_user, "warning")
    with lease("channels"):
        began = time.monotonic()
        assert send_due().sent == 2
        assert time.monotonic() - began < 2
    assert webhook.received == []
    assert send_due().sent == 1
    assert send_due().claimed == 0


def test_an_unexpected_error_of_a_channel_does_not_stop_the_others(
    pulse_user, alice, room, webhook, mailbox, monkeypatch, caplog
):
    bad = channels.create_channel(alice, "bad", webhook.url("/bad"))
    post = channels.post

    def fail_for_one(channel, *message):
        if channel == bad:
            raise RuntimeError("can't start new thread for https://example.org/s3cr3t")
        post(channel, *message)

    monkeypatch.setattr(channels, "post", fail_for_one)
    notify_owners(pulse_user, "warning")
    delivery = send_due()
    assert (delivery.sent, delivery.postponed) == (3, 1)
    bad.refresh_from_db()
    row = Notification.objects.get(channel=bad.uuid.hex)
    assert bad.last_error == row.last_error == "it could not be sent"
    assert (row.state, row.attempts) == ("due", 1)
    assert f"Could not send to channel {bad.uuid}: RuntimeError" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_a_delivery_is_recorded_before_the_next_one_ends(pulse_user, room, mailbox, monkeypatch):
    seen, may_arrive = [], threading.Event()
    monkeypatch.setattr(
        channels, "post", lambda *_, **__: seen.append(1) or (may_arrive.wait(30) if len(seen) == 2 else None)
    )
    notify_owners(pulse_user, "warning")
    notify_owners(pulse_user, "warning")
    for number, row in enumerate(Notification.objects.filter(channel=room.uuid.hex)):
        Notification.objects.filter(id=row.id).update(about=f"thing {number}")
    states = Notification.objects.filter(channel=room.uuid.hex).values_list("state", flat=True)
    background = in_background(send_due)
    wait_until_equal(lambda: len(seen), 2)
    wait_until_equal(lambda: sorted(states.all()), ["sending", "sent"])
    may_arrive.set()
    background.result()


# Quiet hours


@pytest.fixture
def quiet(alice):
    """Give Alice quiet hours that end in an hour."""
    now = timezone.now()
    alice.quiet_from, alice.quiet_until = (now - timedelta(hours=1)).time(), (now + timedelta(hours=1)).time()
    alice.save()


def pass_time(**delta):
    """Make every notification older by this time, and move its deferral too."""
    moved = timedelta(**delta)
    pass_time_in_outbox(**delta)
    for row in Notification.objects.filter(deferred_until__isnull=False):
        row.deferred_until -= moved
        row.save()


def test_quiet_hours_defer_mails_and_channels_but_not_operators(pulse_user, quiet, room, webhook, mailbox):
    notify_owners(pulse_user, "warning")
    assert send_due().sent == 1
    assert mailbox.mails[0].recipients[0] == "ops@example.org"
    assert webhook.received == []
    pass_time(minutes=61)
    assert send_due().sent == 2
    assert len(webhook.received) == 1


def test_an_operators_copy_is_not_deferred_for_an_owner(pulse_user, quiet, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["alice@example.org"]
    notify_owners(pulse_user, "warning")
    assert list(Notification.objects.values_list("deferred_until", flat=True)) == [None]


def left(**about):
    """Return the kinds of unsent notifications to Alice, and why the others were not sent."""
    rows = Notification.objects.filter(recipient="alice@example.org", **about).exclude(state="sent").order_by("id")
    return [(one.kind, one.state, one.last_error) for one in rows]


def test_a_deletion_of_an_agents_queue_is_not_deferred(alice, quiet):
    notify_agents_owner(agents_queue(alice), "warning", "deletion")
    hers = Notification.objects.filter(recipient="alice@example.org").order_by("id")
    assert [(one.kind, one.deferred_until is None) for one in hers] == [("warning", False), ("deletion", True)]


def test_a_deletion_is_not_deferred_and_replaces_deferred_notifications(pulse_user, quiet, room, webhook, mailbox):
    notify_owners(pulse_user, "warning", "recovery", "no-consumers")
    assert send_due().sent == 2  # the operator's recovery, and the missing consumer
    notify_owners(pulse_user, "deletion")
    send_due()
    subjects = [mail.subject for mail in mailbox.to("alice@example.org")]
    assert [subject.split(":")[0] for subject in subjects] == ["[Guardian] Deleted"]
    assert [request.json["title"] for request in webhook.received] == subjects
    pass_time(minutes=61)
    assert send_due().sent == 0
    assert left(channel="email") == [
        (kind, "failed", "A later notification replaces it.") for kind in ("warning", "recovery", "no-consumers")
    ]


def test_a_last_call_is_sent_in_quiet_hours_before_deferred_notifications_and_is_critical_in_channels(
    pulse_user, quiet, room, webhook, mailbox
):
    notify_owners(pulse_user, "warning", "no-consumers", "last-call")
    send_due()
    assert [mail.message["X-Guardian-Kind"] for mail in mailbox.to("alice@example.org")] == ["last-call"]
    assert [request.json["type"] for request in webhook.received] == ["failure"]
    pass_time(minutes=61)
    send_due()
    assert left(channel="email") == [("warning", "failed", "A later notification replaces it.")]
    assert [request.json["type"] for request in webhook.received] == ["failure", "warning"]


def test_a_notification_is_not_replaced_by_one_of_another_topic(pulse_user, mailbox):
    notify_owners(pulse_user, "warning", "no-consumers", "stalled")
    send_due()
    send_due()
    kinds = [mail.message["X-Guardian-Kind"] for mail in mailbox.to("alice@example.org")]
    assert kinds == ["warning", "no-consumers", "stalled"]


def test_a_notification_is_not_replaced_by_one_about_another_queue_or_to_another_channel(pulse_user, room, mailbox):
    notify_owners(pulse_user, "warning")
    Notification.objects.update(about="queue 7")
    notify_owners(pulse_user, "recovery")
    Notification.objects.filter(kind="recovery", channel="email").delete()
    send_due()
    assert ["Warning" in mail.subject for mail in mailbox.to("alice@example.org")] == [True]


def test_each_deletion_of_a_queue_is_notified(pulse_user, mailbox):
    notify_owners(pulse_user, "deletion", "deletion")
    send_due()
    assert ["Deleted" in mail.subject for mail in mailbox.to("alice@example.org")] == [True, True]


def test_a_notification_waits_for_one_being_sent_even_if_it_replaces_it(pulse_user, mailbox):
    notify_owners(pulse_user, "warning")
    assert len(claims.claim(10)) == 2
    notify_owners(pulse_user, "recovery")
    assert send_due().sent == 0
    pass_time(seconds=claims.CLAIM_SECONDS)
    send_due()
    assert ["Back to normal" in mail.subject for mail in mailbox.to("alice@example.org")] == [True]


def test_a_warning_about_a_queue_that_is_gone_is_not_sent(queue, mailbox):
    notify_about_queue(queue, "warning", "no-consumers")
    Queue.objects.update(state="gone")
    send_due()
    assert mailbox.mails == []
    assert left() == [("warning", "failed", "The queue is gone."), ("no-consumers", "failed", "The queue is gone.")]


def test_an_unreplaced_notification_after_quiet_hours_waits_for_deferred_ones(pulse_user, alice, quiet, mailbox):
    notify_owners(pulse_user, "warning")
    Owner.objects.update(quiet_from=None, quiet_until=None)
    notify_owners(pulse_user, "no-consumers")
    send_due()
    assert mailbox.to("alice@example.org") == []
    pass_time(minutes=61)
    send_due()
    send_due()
    assert ["Warning" in mail.subject for mail in mailbox.to("alice@example.org")] == [True, False]
