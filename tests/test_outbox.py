"""What is told: written with its cause, delivered once, in order, however long the mail server is away."""

import asyncio
import math
import signal
import socket
import threading
import time
import uuid
from datetime import UTC, timedelta

import pytest
from django.core.mail import EmailMultiAlternatives, get_connection
from django.core.management import call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from accounts.models import NotificationAddress, Owner, PulseUser
from core import bulk
from core.leases import lease
from notifications import audience, channel_sending, channels, claims, enqueue, mail_sending, mails, public_https
from notifications.audience import Ownership
from notifications.enqueue import Notice
from notifications.models import Channel, Notification
from notifications.sending import send_due
from queues import monitor
from queues.models import Queue
from tests.proxy import Proxy
from tests.toolbox import in_background, in_parallel, stored_queue, wait_until, wait_until_blocked, wait_until_equal
from tests.webhooks import Webhook
from tools.invariants import duplicate_mails, missing_notifications
from tools.mail import MailCatcher
from tools.processes import free_port

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("private_channels")]


@pytest.fixture(autouse=True)
def operators(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]


def tell(*errors):
    with transaction.atomic():
        enqueue.enqueue([Notice("outage", {"error": error}) for error in errors], timezone.now())


def write(state, number, to_channels=False):
    """Write so many notifications to one recipient, about 500 queues by turns."""
    now, to = timezone.now(), ("ops@example.org", "0123abcd" if to_channels else audience.EMAIL)
    told = (None, state, now, now, 0, "")
    rows = [(uuid.uuid4(), *to, "warning", f"queue {row % 500}", {}, *told) for row in range(number)]
    bulk.insert(Notification, enqueue.COLUMNS, rows)


def later(**delta):
    """Let so much time pass for everything in the outbox."""
    moved = timedelta(**delta)
    for notification in Notification.objects.all():
        notification.created -= moved
        notification.due_at -= moved
        notification.save()


def test_what_is_told_arrives(mailbox):
    tell("the broker burns")
    assert send_due().sent == 1
    (mail,) = mailbox.mails
    assert mail.recipients == ("ops@example.org",) or list(mail.recipients) == ["ops@example.org"]
    assert "the broker burns" in mail.text
    assert "the broker burns" in mail.html


def test_what_is_told_twice_to_one_person_is_one_mail_each(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org", "OPS@example.org"]
    tell("one")
    send_due()
    assert len(mailbox.mails) == 1


def test_nothing_is_told_of_what_was_rolled_back(mailbox):
    with transaction.atomic():
        enqueue.enqueue([Notice("outage", {"error": "x"})], timezone.now())
        transaction.set_rollback(True)
    assert send_due().sent == 0


def test_messages_about_one_thing_arrive_in_the_order_in_which_they_were_written(mailbox):
    tell("first")
    tell("second")
    tell("third")
    send_due()
    texts = [mail.text for mail in mailbox.mails]
    words = ["first", "second", "third"]
    assert [word for text in texts for word in words if word in text] == words


def test_a_later_message_waits_for_an_earlier_one_that_could_not_be_sent(mailbox):
    mailbox.refuse(True)
    tell("first")
    assert send_due().postponed == 1
    mailbox.refuse(False)
    tell("second")
    assert send_due().sent == 0
    later(seconds=20)
    assert send_due().sent == 2
    assert ["first" in mail.text for mail in mailbox.mails] == [True, False]
    assert missing_notifications() + duplicate_mails(mailbox.mails) == []


def test_a_mail_server_that_is_down_for_an_hour_loses_nothing_and_doubles_nothing(mailbox):
    mailbox.stop()
    tell("one")
    tell("two")
    for _ in range(12):
        assert send_due().sent == 0
        later(minutes=5)
    mailbox.start()
    later(minutes=15)
    send_due()
    later(minutes=15)
    send_due()
    assert len(mailbox.mails) == 2
    assert set(Notification.objects.values_list("state", flat=True)) == {"sent"}
    assert missing_notifications() + duplicate_mails(mailbox.mails) == []


def test_it_is_tried_for_a_day_before_it_is_given_up(mailbox):
    mailbox.refuse(True)
    tell("one")
    attempts = 0
    began = Notification.objects.get().created
    while not send_due().failed:
        attempts += 1
        assert attempts < 500, "it never ends"
        later(seconds=claims.retry_seconds(attempts))
    notification = Notification.objects.get()
    assert began - notification.created >= timedelta(hours=24)
    assert notification.state == "failed"
    assert "451" in notification.last_error


def test_a_clock_that_jumps_a_day_ahead_gives_nothing_up(mailbox):
    mailbox.refuse(True)
    tell("one")
    later(hours=25)
    assert send_due().postponed == 1


def test_one_recipient_that_is_rejected_does_not_hold_up_the_others(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["a@example.org", "b@example.org", "c@example.org"]
    mailbox.rejected.add("b@example.org")
    tell("one")
    delivery = send_due()
    assert (delivery.sent, delivery.postponed) == (2, 1)
    mailbox.rejected.clear()
    later(seconds=20)
    assert send_due().sent == 1
    assert missing_notifications() + duplicate_mails(mailbox.mails) == []


@pytest.mark.parametrize("sender", ["guardian@", "a@b@c"])
def test_a_sender_that_is_no_address_holds_mails_back_and_breaks_nothing(mailbox, settings, sender):
    settings.DEFAULT_FROM_EMAIL = sender
    tell("one")
    assert send_due().postponed == 1
    assert "Invalid address" in Notification.objects.get().last_error


def test_once_a_connection_failed_no_further_one_is_opened():
    first, second, third = (get_connection() for _ in range(3))
    usable = mail_sending.Connections(open=set(), unused={first, second, third})
    usable.record([first, second], [second])
    assert usable.first(3) == [first]


def test_a_mail_server_that_hangs_is_waited_for_once_and_not_once_for_each_mail(settings, mailbox):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(20)]
    settings.EMAIL_TIMEOUT = 0.5
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.EMAIL_HOST, settings.EMAIL_PORT = silent.getsockname()
        tell("one")
        began = time.monotonic()
        assert send_due().postponed == 20
    assert time.monotonic() - began < 5
    settings.EMAIL_PORT = mailbox.port
    later(seconds=20)
    assert send_due().sent == 20
    assert missing_notifications() + duplicate_mails(mailbox.mails) == []


class Slow(MailCatcher):
    """A mail server that takes a while for each mail, and counts how many it has at once."""

    at_once = most_at_once = 0

    async def handle_DATA(self, server, session, envelope):  # noqa: N802
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.1)
        self.at_once -= 1
        return await super().handle_DATA(server, session, envelope)


def test_a_few_mails_at_once_are_on_their_way_and_no_more(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(12)]
    with Slow() as slow:
        settings.EMAIL_PORT = slow.port
        tell("one")
        assert send_due().sent == 12
        assert slow.most_at_once == mail_sending.MAX_CONNECTIONS
        assert missing_notifications() + duplicate_mails(slow.mails) == []


def test_where_a_pass_tells_more_than_one_claim_takes_another_worker_is_asked_to_help(
    amqp, guarded, settings, monkeypatch
):
    monkeypatch.setattr(claims, "MAX_CLAIMED", 4)
    asked = []
    monkeypatch.setattr(enqueue.current_app, "send_task", lambda name, **_: asked.append(name))
    monitor.run_pass()
    for number, times in ((4, 1), (5, 2)):
        settings.GUARDIAN_OPERATOR_EMAILS = [f"op{one}@example.org" for one in range(number)]
        amqp.queue(f"queue/nobody/{number}", 6)
        assert monitor.run_pass().told == number
        assert asked == ["notifications.tasks.send_notifications"] * times
        asked.clear()


@pytest.mark.parametrize("number", [mail_sending.MAIL_BATCH_SIZE, mail_sending.MAIL_BATCH_SIZE + 1])
def test_mails_that_were_sent_together_are_noted_in_one_statement(mailbox, settings, number):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{one}@example.org" for one in range(number)]
    tell("one")
    with CaptureQueriesContext(connection) as queries:
        assert send_due().sent == number
    noted = [query for query in queries if query["sql"].startswith("UPDATE") and '"sent_at"' in query["sql"]]
    assert len(noted) == math.ceil(number / mail_sending.MAIL_BATCH_SIZE)


def test_nobody_is_asked_to_help_with_a_mail_server_that_is_away(mailbox, settings, monkeypatch):
    monkeypatch.setattr(claims, "MAX_CLAIMED", 4)
    asked = []
    monkeypatch.setattr(enqueue, "nudge", asked.append)
    settings.EMAIL_PORT = free_port()
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{one}@example.org" for one in range(12)]
    tell("one")
    assert send_due().postponed == 4
    assert asked == []


def test_two_senders_at_once_share_the_mails_and_send_each_once(mailbox, settings, monkeypatch):
    monkeypatch.setattr(claims, "MAX_CLAIMED", 4)
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(24)]
    with Slow() as slow:
        settings.EMAIL_PORT = slow.port
        tell("one")
        claim, both_have_claimed, has_claimed = claims.claim, threading.Barrier(2, timeout=30), set()

        def claim_together(*arguments, **options):
            batch = claim(*arguments, **options)
            if (thread := threading.get_ident()) not in has_claimed:
                has_claimed.add(thread)
                both_have_claimed.wait()
            return batch

        monkeypatch.setattr(claims, "claim", claim_together)
        one, other = (delivery.sent for delivery in in_parallel(*[send_due] * 2))
        assert one + other == 24
        assert min(one, other) > 0
        assert missing_notifications() + duplicate_mails(slow.mails) == []


def test_a_sender_that_claims_while_another_one_does_gets_others(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(4)]
    tell("one")
    with transaction.atomic():
        mine = claims.claim(2)
        other = in_background(claims.claim, 2)
        wait_until_blocked(other)  # on SQLite; on PostgreSQL it ends
    assert len({one.id for one in [*mine, *other.result()]}) == len(mine) + len(other.result()) == 4


class OneOnly(MailCatcher):
    """A mail server that serves the first who connects, and nobody else."""

    first = None

    def wants(self, session):
        self.first = self.first or session
        return session is self.first

    async def handle_EHLO(self, server, session, envelope, hostname, responses):  # noqa: N802
        session.host_name = hostname
        return responses if self.wants(session) else ["421 Too many connections"]

    async def handle_HELO(self, server, session, envelope, hostname):  # noqa: N802
        return "421 Too many connections"


def test_a_mail_server_that_wants_a_single_connection_gets_everything_over_that_one(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(12)]
    with OneOnly() as server:
        settings.EMAIL_PORT = server.port
        tell("one")
        assert (send_due().sent, Notification.objects.filter(attempts__gt=0).count()) == (12, 0)
        assert missing_notifications() + duplicate_mails(server.mails) == []


class CutsOff(MailCatcher):
    """A mail server that cuts the connection when it is given a mail to op4, the fifth."""

    async def handle_DATA(self, server, session, envelope):  # noqa: N802
        if "op4@example.org" in envelope.rcpt_tos:
            server.transport.abort()
        return await super().handle_DATA(server, session, envelope)


def test_the_mails_after_one_whose_connection_was_cut_go_over_those_that_stand(mailbox, settings, monkeypatch):
    monkeypatch.setattr(mail_sending, "MAIL_BATCH_SIZE", 4)
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(8)]
    monkeypatch.setattr(claims, "MAX_CLAIMED", 5)
    with CutsOff() as server:
        settings.EMAIL_PORT = server.port
        tell("one")
        delivery = send_due()
        assert (delivery.sent, delivery.postponed) == (7, 1)
        assert Notification.objects.get(state="due").recipient == "op4@example.org"


def test_a_mail_that_can_never_be_sent_keeps_no_other_from_being_sent(mailbox, settings, monkeypatch):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(12)]
    as_bytes = EmailMultiAlternatives.message

    def break_down(message, *args, **kwargs):
        if message.to == ["op3@example.org"]:
            raise LookupError("no such charset")
        return as_bytes(message, *args, **kwargs)

    monkeypatch.setattr(EmailMultiAlternatives, "message", break_down)
    tell("one")
    delivery = send_due()
    assert (delivery.sent, delivery.postponed) == (11, 1)
    assert Notification.objects.get(state="due").last_error == "no such charset"


def test_a_mail_server_that_goes_in_the_middle_has_what_is_on_its_way_tried_again_and_the_rest_wait(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(12)]
    with Slow() as slow, Proxy("127.0.0.1", slow.port) as between:
        settings.EMAIL_PORT = between.port
        tell("one")
        background = in_background(send_due)
        slow.wait_for(lambda mail: True)
        between.close_after(0)
        delivery = background.result()
        assert delivery.sent + delivery.postponed == 12
        assert delivery.postponed >= 12 - 2 * mail_sending.MAX_CONNECTIONS
        assert set(Notification.objects.filter(state="due").values_list("attempts", "claim")) == {(1, None)}
        between.forward()
        later(seconds=20)
        assert send_due().sent == delivery.postponed
        assert missing_notifications() == []


def test_what_a_killed_sender_had_claimed_is_sent_by_the_next_once_the_claim_runs_out(mailbox):
    tell("one")
    assert len(claims.claim(10)) == 1
    assert send_due().sent == 0
    later(seconds=claims.CLAIM_SECONDS)
    assert send_due().sent == 1


def test_a_mail_that_has_to_go_out_again_has_the_same_message_id(mailbox):
    tell("one")
    send_due()
    Notification.objects.update(state="due", sent_at=None)
    send_due()
    assert len({mail.message["Message-ID"] for mail in mailbox.mails}) == 1


def test_many_senders_at_once_send_each_row_once(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(60)]
    tell("one")
    in_parallel(*[send_due] * 5)
    assert len(mailbox.mails) == 60
    assert Notification.objects.filter(state="sent").count() == 60


@pytest.mark.parametrize("to_channels", [False, True])
def test_what_is_due_is_found_without_comparing_each_row_with_each(to_channels):
    write("sent", 9_000, to_channels)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE notifications_notification")
    write("due", 500, to_channels)
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
        (compared,) = [line for line in plan if " U0 " in f"{line} "]
        assert "USING INDEX notification_about (recipient=? AND about=?" in compared
    else:
        assert any("Anti Join" in line for line in plan)
        assert not any("Nested Loop" in line for line in plan)


def test_the_admin_shows_where_it_goes_and_until_when_it_is_held(client):
    client.force_login(Owner.objects.create_superuser("root@example.org"))
    tell("one")
    Notification.objects.update(channel="0123abcd", deferred_until=timezone.now())
    page = client.get(reverse("admin:notifications_notification_changelist")).content.decode()
    assert '<td class="field-channel">0123abcd</td>' in page
    assert "field-deferred_until" in page


# Who is told


WARNING = {
    "queue": "queue/alice/builds", "vhost": "/", "state": "warned", "length": 6, "ready": 6, "unacknowledged": 0,
    "warn": 5, "max": 10, "spared": False, "per_second": None, "seconds_to_max": None, "folded": 0, "consumers": None,
    "bindings": None, "more_bindings": 0,
}  # fmt: skip


def tell_of(account, *kinds, now=None):
    with transaction.atomic():
        notices = [Notice(kind, {**WARNING}, pulse_user_id=account.id) for kind in kinds]
        return enqueue.enqueue(notices, now or timezone.now())


def places():
    return sorted(Notification.objects.values_list("recipient", "channel"))


def test_owners_and_confirmed_addresses_are_told_and_each_mail_says_why(account, alice, mailbox):
    confirmed = timezone.now()
    NotificationAddress.objects.create(
        pulse_user=account, email="team@example.org", added_by=alice, confirmed_at=confirmed
    )
    NotificationAddress.objects.create(pulse_user=account, email="waiting@example.org", added_by=alice)
    tell_of(account, "warning")
    send_due()
    texts = {mail.recipients[0]: (mail.text, mail.html) for mail in mailbox.mails}
    assert sorted(texts) == ["alice@example.org", "ops@example.org", "team@example.org"]
    for text in texts["alice@example.org"]:
        assert "because the queue is yours" in text
        assert "/settings/" in text
    for text in texts["ops@example.org"]:
        assert "as an operator" in text
    for text in texts["team@example.org"]:
        assert "because alice@example.org added your address to the RabbitMQ account" in text
        assert "To be taken off, ask its owners: alice@example.org" in text


def test_an_address_that_stands_for_several_things_gets_one_mail(account, alice, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["alice@example.org", "team@example.org"]
    for email in ("alice@example.org", "team@example.org"):
        NotificationAddress.objects.create(pulse_user=account, email=email, confirmed_at=timezone.now())
    assert tell_of(account, "warning") == 2


def test_owners_who_may_not_sign_in_any_more_are_not_told(account, alice):
    Owner.objects.update(is_active=False)
    tell_of(account, "warning")
    assert places() == [("ops@example.org", "email")]


@pytest.mark.parametrize("many", [1, 30])
def test_telling_takes_as_many_statements_for_many_as_for_few(django_assert_num_queries, many, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(many)]
    accounts = []
    for number in range(many):
        owner = Owner.objects.create_user(f"o{number}@example.org")
        account = PulseUser.objects.create(username=f"u{number}")
        account.owners.add(owner)
        NotificationAddress.objects.create(pulse_user=account, email="a@example.org", confirmed_at=timezone.now())
        for name in "ab":
            Channel.objects.create(owner=owner, name=name, service="x", sealed_url="x")
        accounts.append(account)
    notices = [Notice("warning", {}, pulse_user_id=account.id) for account in accounts]
    with transaction.atomic(), django_assert_num_queries(3):
        assert enqueue.enqueue(notices, timezone.now()) == many * (4 + many)
    with transaction.atomic(), django_assert_num_queries(4):
        enqueue.enqueue([Notice("deletion", {}, pulse_user_id=account.id) for account in accounts], timezone.now())


def agents_queue(owner, **fields):
    return stored_queue("consumer_1", vhost=owner.uuid.hex, **{"owner": owner, "registered": True, **fields})


def tell_of_agents(queue, *kinds):
    with transaction.atomic():
        notices = [
            Notice(kind, {**WARNING, "agents": True}, f"queue {queue.id}", owner_id=queue.owner_id) for kind in kinds
        ]
        return enqueue.enqueue(notices, timezone.now())


def test_the_owner_of_agents_is_told_of_their_queues_by_mail_and_channels_and_nobody_else_is(account, alice, mailbox):
    NotificationAddress.objects.create(pulse_user=account, email="team@example.org", confirmed_at=timezone.now())
    channel = Channel.objects.create(owner=alice, name="chat", service="x", sealed_url="x")
    tell_of_agents(agents_queue(alice), "warning")
    assert places() == sorted(
        [
            ("alice@example.org", "email"),
            ("alice@example.org", channel.uuid.hex),
            ("ops@example.org", "email"),
        ]
    )
    send_due()
    (mail,) = mailbox.to("alice@example.org")
    assert "because the queue is your agents'" in mail.text


def test_the_owner_of_agents_has_quiet_hours_that_a_deletion_breaks(alice):
    now = timezone.now().astimezone(UTC)
    alice.quiet_from, alice.quiet_until = (now - timedelta(hours=1)).time(), (now + timedelta(hours=1)).time()
    alice.save()
    queue = agents_queue(alice)
    tell_of_agents(queue, "warning")
    hers = Notification.objects.filter(recipient="alice@example.org").order_by("id")
    assert hers.get().deferred_until is not None
    tell_of_agents(queue, "deletion")
    assert list(hers.values_list("deferred_until", flat=True)) == [None, None]


def test_an_owner_whose_agents_have_a_queue_no_longer_is_not_told_of_it_any_more(alice, mailbox):
    queue = agents_queue(alice)
    tell_of_agents(queue, "warning")
    Queue.objects.update(owner=Owner.objects.create_user("bob@example.org"))
    send_due()
    assert [mail.recipients for mail in mailbox.mails] == [("ops@example.org",)]


def test_a_queue_of_nobody_has_nobody_to_tell_but_operators(settings):
    assert audience.recipients_of([Ownership(), Ownership()]) == {}
    assert audience.has_recipients(Ownership(), {})
    settings.GUARDIAN_OPERATOR_EMAILS = []
    assert not audience.has_recipients(Ownership(), {})


@pytest.mark.parametrize("many", [1, 30])
def test_telling_the_owners_of_agents_takes_as_many_statements_for_many_as_for_few(django_assert_num_queries, many):
    queues = [agents_queue(Owner.objects.create_user(f"o{number}@example.org")) for number in range(many)]
    notices = [Notice("warning", {}, f"queue {one.id}", owner_id=one.owner_id) for one in queues]
    with transaction.atomic(), django_assert_num_queries(2):
        assert enqueue.enqueue(notices, timezone.now()) == 2 * many


def test_who_is_named_is_told_alone_and_once(account, mailbox):
    Owner.objects.create_user("bob@example.org")
    with transaction.atomic():
        recipients = ["bob@example.org", "bob@example.org"]
        assert enqueue.enqueue([Notice("vouched", {"by": ""}, recipients=recipients)], timezone.now()) == 1
    assert send_due().sent == 1
    assert [mail.recipients[0] for mail in mailbox.mails] == ["bob@example.org"]


# Who is not told any more when it is sent


@pytest.fixture
def queue(account):
    return stored_queue("queue/alice/builds", pulse_user=account)


def tell_of_queue(queue, *kinds):
    with transaction.atomic():
        notices = [Notice(kind, {**WARNING}, f"queue {queue.id}", queue.pulse_user_id) for kind in kinds]
        return enqueue.enqueue(notices, timezone.now())


def recipients(mailbox):
    return sorted(mail.recipients[0] for mail in mailbox.mails)


def obsolete():
    return sorted(Notification.objects.filter(state="failed").values_list("recipient", "last_error"))


def test_who_was_taken_off_an_account_in_between_is_not_told_and_the_others_are(
    account, alice, queue, webhook, mailbox
):
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    account.owners.add(bob)
    channels.create_channel(bob, "room", webhook.url("/bob"))
    NotificationAddress.objects.create(pulse_user=account, email="team@example.org", confirmed_at=timezone.now())
    tell_of_queue(queue, "warning")
    account.owners.remove(bob)
    NotificationAddress.objects.all().delete()
    delivery = send_due()
    assert (delivery.sent, delivery.failed) == (2, 0)
    assert recipients(mailbox) == ["alice@example.org", "ops@example.org"]
    assert webhook.received == []
    why = "The recipient is no longer notified about this subject."
    assert obsolete() == [("bob@example.org", why), ("bob@example.org", why), ("team@example.org", why)]


def test_a_deletion_is_told_where_the_account_is_gone_too_and_a_warning_is_not(account, queue, mailbox):
    tell_of_queue(queue, "warning", "deletion")
    account.delete()
    send_due()
    assert recipients(mailbox) == ["alice@example.org", "ops@example.org", "ops@example.org"]
    assert ["Deleted" in mail.subject for mail in mailbox.to("alice@example.org")] == [True]


def test_who_can_not_sign_in_any_more_is_told_nothing_even_of_a_deletion(account, alice, queue, room, webhook, mailbox):
    tell_of_queue(queue, "deletion")
    with transaction.atomic():
        weekly = Notice("vouched", {"by": ""}, recipients=["alice@example.org"])
        enqueue.enqueue([weekly], timezone.now())
    Owner.objects.update(is_active=False)
    account.delete()
    send_due()
    assert recipients(mailbox) == ["ops@example.org"]
    assert webhook.received == []
    assert obsolete() == [("alice@example.org", "The recipient can no longer sign in.")] * 3


def test_whether_people_are_still_to_be_told_takes_as_many_statements_for_many_as_for_few(
    queue, account, settings, django_assert_num_queries
):
    for number in range(30):
        owner = Owner.objects.create_user(f"o{number}@example.org")
        other = PulseUser.objects.create(username=f"u{number}")
        other.owners.add(owner)
        stored_queue(f"queue/u{number}/x", pulse_user=other)
    with transaction.atomic():
        notices = [Notice("warning", {**WARNING}, f"queue {one.id}", one.pulse_user_id) for one in Queue.objects.all()]
        enqueue.enqueue(notices, timezone.now())
    batch = claims.claim(100)
    assert len(batch) == 62
    for some in (batch[:2], batch):
        with django_assert_num_queries(4):
            assert claims.drop_outdated(some) == some


# Channels


@pytest.fixture
def room(alice, webhook):
    return channels.create_channel(alice, "room", webhook.url())


def test_a_message_goes_to_the_channels_of_each_owner_beside_the_mail(account, room, webhook, mailbox):
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    channels.create_channel(bob, "not told", webhook.url("/bob"))
    tell_of(account, "warning")
    assert places() == sorted(
        [("alice@example.org", "email"), ("alice@example.org", room.uuid.hex), ("ops@example.org", "email")]
    )
    assert send_due().sent == 3
    (request,) = webhook.received
    assert request.json["title"] == "[Guardian] Warning: queue/alice/builds has 6 messages"
    assert request.json["message"].strip() == mailbox.to("alice@example.org")[0].text.strip()
    room.refresh_from_db()
    assert room.last_sent_at is not None


def test_a_channel_that_fails_is_tried_again_in_order_and_mails_go_on(account, room, webhook, mailbox):
    webhook.status = 503
    tell_of(account, "warning")
    assert (send_due().sent, len(webhook.received)) == (2, 1)
    tell_of(account, "recovery")
    assert (send_due().sent, len(webhook.received)) == (2, 1)
    room.refresh_from_db()
    assert "it answered 503" in room.last_error
    assert "503" in Notification.objects.get(channel=room.uuid.hex, kind="warning").last_error
    webhook.status = 200
    later(seconds=30)
    assert send_due().sent == 2
    assert ["Warning" in request.json["title"] for request in webhook.received] == [True, True, False]
    assert set(Notification.objects.values_list("state", flat=True)) == {"sent"}


def test_the_first_failure_of_a_channel_is_the_last_that_is_tried_for_now(account, alice, room, webhook, mailbox):
    webhook.status = 503
    with transaction.atomic():
        notices = [Notice("warning", WARNING, pulse_user_id=account.id)] * 3
        enqueue.enqueue(notices, timezone.now())
    for number, row in enumerate(Notification.objects.filter(channel=room.uuid.hex)):
        Notification.objects.filter(id=row.id).update(about=f"queue {number}")
    assert send_due().postponed == 3
    assert len(webhook.received) == 1


def test_what_waits_for_a_removed_channel_is_given_up_quietly(account, room, webhook, mailbox, caplog):
    tell_of(account, "warning")
    channels.delete_channel(room)
    delivery = send_due()
    assert (delivery.sent, delivery.failed) == (2, 0)
    row = Notification.objects.get(channel=room.uuid.hex)
    assert (row.state, row.last_error) == ("failed", "The channel was removed.")
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


def test_a_sender_that_is_killed_sends_to_a_channel_again(account, room, webhook, mailbox):
    tell_of(account, "warning")
    assert len(claims.claim(10, to_channels=True)) == 1
    assert send_due().sent == 2
    later(seconds=claims.CLAIM_SECONDS)
    assert send_due().sent == 1
    assert len(webhook.received) == 1


def test_channels_that_hang_hold_up_neither_mails_nor_each_other_for_long(
    account, alice, webhook, mailbox, certificate, monkeypatch
):
    monkeypatch.setattr(public_https, "READ_SECONDS", 2)
    with Webhook(certificate) as stuck:
        stuck.slowly = lambda write: time.sleep(60)
        for number in range(5):
            channels.create_channel(alice, f"stuck {number}", stuck.url())
        channels.create_channel(alice, "room", webhook.url())
        tell_of(account, "warning")
        began = time.monotonic()
        background = in_background(send_due)
        mailbox.wait_for(lambda mail: "alice@example.org" in mail.recipients, timeout=3)
        wait_until(lambda: webhook.received, seconds=3)
        background.result()
        assert time.monotonic() - began < 9
        assert Notification.objects.filter(state="due", attempts=1).count() == 5


class Clock:
    """The time of the sender: it passes only as a test says."""

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


def test_what_takes_longer_than_the_time_for_channels_is_left_to_the_next_call(
    account, alice, webhook, mailbox, monkeypatch, clock
):
    monkeypatch.setattr(channel_sending, "MAX_SENDING_SECONDS", 2)
    monkeypatch.setattr(channel_sending, "MAX_CONCURRENT_CHANNELS", 1)
    webhook.slowly = lambda write: (clock.sleep(1), write(b"HTTP/1.0 200 OK\r\n\r\n"))
    for number in range(4):
        channels.create_channel(alice, f"room {number}", webhook.url())
    tell_of(account, "warning")
    assert [send_due().sent for _ in range(3)] == [2 + 2, 2, 0]  # two mails, and two of the channels each time
    assert set(Notification.objects.values_list("state", "attempts")) == {("sent", 0)}
    assert len(webhook.received) == 4


def test_a_call_sends_mails_for_a_time_and_leaves_the_rest_to_the_next(mailbox, settings, monkeypatch, clock):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(10)]
    monkeypatch.setattr(mail_sending, "MAX_SENDING_SECONDS", 3)
    compose = mails.compose
    monkeypatch.setattr(mails, "compose", lambda *args: (clock.sleep(1), compose(*args))[1])
    tell("one")
    assert send_due().sent == 3
    assert Notification.objects.filter(state="due", attempts=0, claim=None).count() == 7
    assert send_due().sent == 3


def test_the_command_sends_all_that_is_due_however_many_calls_it_takes(mailbox, settings, monkeypatch, capsys, clock):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(5)]
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(mail_sending, "MAX_SENDING_SECONDS", 1)
    compose = mails.compose
    monkeypatch.setattr(mails, "compose", lambda *args: (clock.sleep(1), compose(*args))[1])
    tell("one")
    call_command("send_notifications", "--once")
    assert len(mailbox.mails) == 5
    assert capsys.readouterr().out == "5 sent, 0 to be retried, 0 given up.\n"


def test_channels_have_one_sender_at_a_time_and_mails_any_number(account, room, webhook, mailbox):
    tell_of(account, "warning")
    with lease("channels"):
        began = time.monotonic()
        assert send_due().sent == 2
        assert time.monotonic() - began < 2
    assert webhook.received == []
    assert send_due().sent == 1
    assert send_due().claimed == 0


def test_channels_that_hang_hold_one_worker_and_not_for_long(account, mailbox, monkeypatch, clock):
    hanging, time_out = [], threading.Event()

    def hang(channel, title, body):
        hanging.append(channel)
        assert time_out.wait(30)
        raise channels.ChannelFailed("it hangs")

    monkeypatch.setattr(channels, "post", hang)
    owners = [Owner.objects.create_user(f"o{number}@example.org", vouched=True) for number in range(60)]
    account.owners.add(*owners)
    for owner in owners:
        Channel.objects.create(owner=owner, name="room", service="x", sealed_url="x")
    tell_of(account, "warning")
    Notification.objects.filter(channel="email").delete()
    first = in_background(send_due)
    wait_until_equal(lambda: len(hanging), channel_sending.MAX_CONCURRENT_CHANNELS)
    assert send_due().claimed == 0
    clock.sleep(channel_sending.MAX_SENDING_SECONDS)
    time_out.set()
    assert first.result().postponed == channel_sending.MAX_CONCURRENT_CHANNELS
    assert Notification.objects.filter(state="due", attempts=0).count() == 60 - channel_sending.MAX_CONCURRENT_CHANNELS


def test_a_channel_that_breaks_the_sending_itself_keeps_nothing_from_the_others(
    account, alice, room, webhook, mailbox, monkeypatch, caplog
):
    bad = channels.create_channel(alice, "bad", webhook.url("/bad"))
    post = channels.post

    def break_down(channel, title, body):
        if channel == bad:
            raise RuntimeError("can't start new thread for https://example.org/s3cr3t")
        post(channel, title, body)

    monkeypatch.setattr(channels, "post", break_down)
    tell_of(account, "warning")
    delivery = send_due()
    assert (delivery.sent, delivery.postponed) == (3, 1)
    bad.refresh_from_db()
    row = Notification.objects.get(channel=bad.uuid.hex)
    assert bad.last_error == row.last_error == "it could not be sent"
    assert (row.state, row.attempts) == ("due", 1)
    assert f"{bad.uuid} can't be sent to: RuntimeError" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_what_arrived_is_noted_while_the_next_message_to_the_channel_is_on_its_way(account, room, mailbox, monkeypatch):
    seen, arrives = [], threading.Event()
    monkeypatch.setattr(channels, "post", lambda *_: seen.append(1) or (arrives.wait(30) if len(seen) == 2 else None))
    tell_of(account, "warning")
    tell_of(account, "warning")
    for number, row in enumerate(Notification.objects.filter(channel=room.uuid.hex)):
        Notification.objects.filter(id=row.id).update(about=f"thing {number}")
    states = Notification.objects.filter(channel=room.uuid.hex).values_list("state", flat=True)
    background = in_background(send_due)
    wait_until_equal(lambda: len(seen), 2)
    wait_until_equal(lambda: sorted(states.all()), ["sending", "sent"])
    arrives.set()
    background.result()


def test_many_senders_at_once_send_each_row_to_its_channel_once(account, alice, webhook, mailbox):
    for number in range(10):
        channels.create_channel(alice, f"room {number}", webhook.url(f"/{number}"))
    tell_of(account, "warning")
    in_parallel(*[send_due] * 4)
    assert sorted(request.path for request in webhook.received) == [f"/{number}" for number in range(10)]


# Quiet hours


@pytest.fixture
def quiet(alice):
    """Let it be quiet for Alice for the next hour."""
    now = timezone.now()
    alice.quiet_from, alice.quiet_until = (now - timedelta(hours=1)).time(), (now + timedelta(hours=1)).time()
    alice.save()


def pass_time(**delta):
    """Let so much time pass for everything in the outbox, and the quiet hours with it."""
    moved = timedelta(**delta)
    later(**delta)
    for row in Notification.objects.filter(deferred_until__isnull=False):
        row.deferred_until -= moved
        row.save()


def test_what_is_told_in_quiet_hours_is_held_in_mail_and_channels_and_operators_hear_of_it(
    account, quiet, room, webhook, mailbox
):
    tell_of(account, "warning")
    assert send_due().sent == 1
    assert mailbox.mails[0].recipients[0] == "ops@example.org"
    assert webhook.received == []
    pass_time(minutes=61)
    assert send_due().sent == 2
    assert len(webhook.received) == 1


def test_an_operators_copy_is_not_held_when_the_operator_owns_the_queue(account, quiet, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["alice@example.org"]
    tell_of(account, "warning")
    assert list(Notification.objects.values_list("deferred_until", flat=True)) == [None]


def test_a_deletion_is_never_held_and_brings_forward_what_came_before_it(account, quiet, room, webhook, mailbox):
    tell_of(account, "warning")
    tell_of(account, "recovery")
    assert send_due().sent == 2
    tell_of(account, "deletion")
    send_due()
    subjects = [mail.subject for mail in mailbox.to("alice@example.org")]
    assert [subject.split(":")[0] for subject in subjects] == [
        "[Guardian] Warning", "[Guardian] Back to normal", "[Guardian] Deleted",
    ]  # fmt: skip
    assert [request.json["title"] for request in webhook.received] == subjects


def test_a_deletion_does_not_wait_for_what_was_committed_after_it_and_makes_it_obsolete(
    account, quiet, room, webhook, mailbox
):
    tell_of(account, "warning")
    held = Notification.objects.filter(deferred_until__isnull=False).values_list("deferred_until", flat=True)[0]
    tell_of(account, "deletion")
    # Another process wrote it before, and committed it after the deletion had released what it saw.
    Notification.objects.filter(recipient="alice@example.org", kind="warning").update(deferred_until=held)
    other = Notification.objects.filter(recipient="alice@example.org", kind="warning")[0]
    other.pk, other.uuid, other.about = None, uuid.uuid4(), "queue 7"
    other.save()
    send_due()
    assert ["Deleted" in mail.subject for mail in mailbox.to("alice@example.org")] == [True]
    assert ["Deleted" in request.json["title"] for request in webhook.received] == [True]
    left = Notification.objects.filter(recipient="alice@example.org", kind="warning").order_by("id")
    assert list(left.values_list("state", flat=True)) == ["failed", "failed", "due"]
    assert left[0].last_error == "The queue was deleted in the meantime."


def test_what_is_no_deletion_waits_for_what_is_held_before_it(account, quiet, mailbox):
    tell_of(account, "warning")
    tell_of(account, "recovery")
    Notification.objects.filter(kind="recovery").update(deferred_until=None)
    send_due()
    assert mailbox.to("alice@example.org") == []


def test_a_deletion_brings_forward_nothing_about_other_things(account, quiet):
    tell_of(account, "warning")
    Notification.objects.update(about="queue 7")
    tell_of(account, "deletion")
    assert Notification.objects.get(recipient="alice@example.org", kind="warning").deferred_until is not None


def test_what_is_told_after_the_quiet_hours_waits_for_what_was_held(account, alice, quiet, mailbox):
    tell_of(account, "warning")
    Owner.objects.update(quiet_from=None, quiet_until=None)
    tell_of(account, "recovery")
    send_due()
    assert mailbox.to("alice@example.org") == []
    pass_time(minutes=61)
    send_due()
    send_due()
    assert ["Warning" in mail.subject for mail in mailbox.to("alice@example.org")] == [True, False]
