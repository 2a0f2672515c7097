"""One message with a table, of what one pass has to say to one recipient about many queues."""

import json
from datetime import UTC, timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import NotificationAddress, Owner, PulseUser
from core import leases
from notifications import channels, claims, enqueue, grouping, kinds
from notifications.enqueue import Notice
from notifications.models import Notification
from notifications.sending import send_due
from queues.guard import consumer_health, once
from queues.models import Queue
from tests.support.proxy import http_answer
from tests.support.toolbox import in_background, in_parallel, stored_queue, wait_until_blocked
from tools.invariants import mail_breaches, undelivered_mails

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("private_channels"), pytest.mark.sqlite]

MANY = grouping.MAX_SEPARATE + 1


@pytest.fixture(autouse=True)
def operators(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]


@pytest.fixture
def fill(amqp, guarded, pulse_user, settings):
    """Return a function that declares this number of Alice's queues, with this number of messages in each."""
    settings.GUARDIAN_DELETE_BRAKE = 1000

    def fill(number, messages, prefix="q"):
        for one in range(number):
            amqp.queue(f"queue/alice/{prefix}{one}", messages)

    return fill


def run_and_send():
    report = once.run_once()
    assert report.errors == []
    send_due()


def subjects(mailbox, address="alice@example.org"):
    return [mail.subject for mail in mailbox.to(address)]


def test_a_pass_that_warns_about_many_queues_sends_one_mail_to_each_recipient(fill, mailbox):
    fill(MANY, 6)
    run_and_send()
    assert sorted(mail.recipients for mail in mailbox.mails) == [("alice@example.org",), ("ops@example.org",)]
    for mail in mailbox.mails:
        assert mail.subject == "[Guardian] 4 queues: 4 over the warning threshold"
        for text in (mail.text, mail.html):
            for number in range(MANY):
                assert f"queue/alice/q{number}" in text
    (mail,) = mailbox.to("alice@example.org")
    lines = [line.split() for line in mail.text.splitlines()]
    assert ["over", "the", "warning", "threshold", "6", "10", "queue/alice/q0"] in lines
    assert mail_breaches(mailbox.mails) == []


def test_the_deletions_of_one_run_are_one_message(fill, mailbox):
    fill(MANY, 12)
    run_and_send()
    assert subjects(mailbox) == ["[Guardian] 4 queues: 4 deleted"]
    (mail,) = mailbox.to("alice@example.org")
    for text in (mail.text, mail.html):
        assert text.count("deleted, 12 messages archived") == MANY


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"archived": 8000, "dropped": 0, "held": 0}, "deleted, 8,000 messages archived"),
        ({"archived": 5000, "dropped": 2000, "held": 1}, "deleted, 5,000 messages archived, 2,001 messages lost"),
        ({"archived": 0, "dropped": 0, "held": 0}, "deleted, 0 messages lost"),
        ({"length": 1}, "deleted, 1 message lost"),
        ({"length": None}, "deleted"),
    ],
)
def test_the_line_of_a_deletion_says_how_many_messages_were_lost(facts, text):
    assert kinds.get("deletion").brief(facts) == (text, "deleted")


def test_a_table_says_which_deletions_are_blocked(pulse_user, mailbox):
    write(queues_of(pulse_user, MANY), length=30, blocked=True)
    send_due()
    (mail,) = mailbox.to("alice@example.org")
    assert mail.text.count("10, blocked") == MANY
    assert "waits for an operator's decision" in mail.text
    assert "is deleted" not in mail.text


def test_many_queues_without_a_consumer_are_one_message(fill, mailbox, settings, broker_proxy, guarded):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    fill(MANY, 1)
    run_and_send()
    rows = [{"vhost": guarded, "name": f"queue/alice/q{one}", "consumers": 0} for one in range(MANY)]
    # The broker's own count of new queues lags.
    broker_proxy.answer(http_answer("200 OK", json.dumps(rows).encode(), "Content-Type: application/json"))
    consumer_health.count_consumers()
    Queue.objects.update(unattended_since=timezone.now() - timedelta(minutes=6))
    consumer_health.count_consumers()
    send_due()
    assert subjects(mailbox) == ["[Guardian] 4 queues: 4 without a consumer"]
    assert "no consumer for 6 minutes" in mailbox.to("alice@example.org")[0].text


def test_a_table_shows_the_brokers_limit(amqp, guarded, pulse_user, mailbox):
    for number in range(MANY):
        amqp.queue(f"queue/alice/{number}", 6, arguments={"x-max-length": 7})
    run_and_send()
    (mail,) = mailbox.to("alice@example.org")
    assert mail.text.count("7 by the broker") == MANY
    assert "is deleted" not in mail.text


# From here on, without a broker.


def queues_of(pulse_user, number):
    names = [f"queue/{pulse_user.username}/{one}" for one in range(number)]
    return [stored_queue(name, pulse_user=pulse_user, state="warned") for name in names]


FACTS = {
    "state": "warned", "length": 6, "ready": 6, "unacknowledged": 0, "warn": 5, "max": 10, "spared": False,
    "per_second": None, "seconds_to_max": None, "folded": 1, "consumers": None, "bindings": None, "more_bindings": 0,
}  # fmt: skip


def notices(queues, kind, **facts):
    return [
        Notice(kind, {**FACTS, "queue": one.name, "vhost": one.vhost, **facts}, f"queue {one.id}", one.pulse_user_id)
        for one in queues
    ]


def write(queues, kind="warning", lease="pass", **facts):
    """Write a notification about each of these queues, as a pass does."""
    with leases.lease(lease) as held, transaction.atomic():
        enqueue.enqueue(notices(queues, kind, **facts), timezone.now(), held)


def pass_time(**delta):
    for row in Notification.objects.filter(claims.Unsent):
        row.due_at -= timedelta(**delta)
        if row.deferred_until:
            row.deferred_until -= timedelta(**delta)
        row.save()


def test_a_group_is_not_sent_before_its_pass_ends(pulse_user, mailbox):
    queues = queues_of(pulse_user, MANY)
    with leases.lease("pass") as held:
        for some in (queues[:2], queues[2:]):
            with transaction.atomic():
                enqueue.enqueue(notices(some, "warning"), timezone.now(), held)
            assert send_due().claimed == 0
    send_due()
    assert len(mailbox.mails) == 2


def test_queues_whose_state_moved_on_are_left_out(pulse_user, mailbox):
    queues = queues_of(pulse_user, MANY + 3)
    write(queues)
    write(queues[:1], "recovery", state="ok")
    write(queues[1:2], "deletion")
    Queue.objects.filter(pk=queues[2].pk).update(state="gone")
    send_due()
    sent = [mail.message["X-Guardian-Kind"] for mail in mailbox.to("alice@example.org")]
    assert sorted(sent) == ["deletion", "group", "recovery"]
    (group,) = [mail for mail in mailbox.to("alice@example.org") if mail.message["X-Guardian-Kind"] == "group"]
    assert group.subject == "[Guardian] 4 queues: 4 over the warning threshold"
    for number in range(MANY + 3):
        assert (f"queue/alice/{number}" in group.text) == (number >= 3)


def test_if_few_queues_of_a_group_are_left_each_gets_a_mail_and_if_none_is_no_mail_is_sent(pulse_user, mailbox):
    queues = queues_of(pulse_user, MANY)
    write(queues)
    Queue.objects.filter(pk=queues[0].pk).update(state="gone")
    send_due()
    assert {mail.message["X-Guardian-Kind"] for mail in mailbox.mails} == {"warning"}
    assert len(mailbox.to("alice@example.org")) == 3
    mailbox.clear()
    write(queues)
    Queue.objects.update(state="gone")
    assert send_due().sent == 0
    assert mailbox.mails == []


def test_passes_are_separate_groups(pulse_user, mailbox):
    write(queues_of(pulse_user, 3))
    other = PulseUser.objects.create(username="other")
    other.owners.set(pulse_user.owners.all())
    write(queues_of(other, 3))
    send_due()
    assert len(mailbox.to("alice@example.org")) == 6


def test_a_refused_group_is_sent_again_with_the_same_message_id(pulse_user, mailbox):
    write(queues_of(pulse_user, MANY))
    mailbox.refuse(True)
    assert send_due().postponed == 2 * MANY
    mailbox.refuse(False)
    Notification.objects.update(due_at=timezone.now())
    assert send_due().sent == 2 * MANY
    ids = {mail.message["Message-ID"] for mail in mailbox.to("alice@example.org")}
    Notification.objects.update(state="due", sent_at=None)
    send_due()
    assert {mail.message["Message-ID"] for mail in mailbox.to("alice@example.org")} == ids
    assert len(ids) == 1


def test_concurrent_senders_send_a_group_as_one_message(pulse_user, mailbox, monkeypatch):
    monkeypatch.setattr(claims, "MAX_CLAIMED", 2)
    write(queues_of(pulse_user, 30))
    in_parallel(*[send_due] * 4)
    assert len(mailbox.mails) == 2


def test_a_group_is_claimed_with_its_first_notification(pulse_user):
    write(queues_of(pulse_user, 30))
    with transaction.atomic():
        first = claims.claim(1)
        other = in_background(claims.claim, 1)
        wait_until_blocked(other)  # on SQLite it waits; on PostgreSQL it ends
    assert {len({one.recipient for one in found}) for found in (first, other.result())} == {1}
    assert len(first) == len(other.result()) == 30


@pytest.mark.parametrize("server", ["works", "refuses", "is away"])
def test_sending_a_group_takes_constant_statements(pulse_user, mailbox, server):
    mailbox.refuse(server == "refuses")
    if server == "is away":
        mailbox.stop()
    send_due()  # the first run creates the lease
    taken = []
    for number in (10, 60):
        queues = queues_of(PulseUser.objects.create(username=f"u{number}"), number)
        write(queues)
        write(queues[:2], "recovery", lease="consumers")
        Queue.objects.filter(pk=queues[2].pk).update(state="gone")
        with CaptureQueriesContext(connection) as statements:
            send_due()
        taken.append(len(statements))
        Notification.objects.all().delete()
        Queue.objects.all().delete()
    assert taken[0] == taken[1]


def test_a_chat_gets_the_first_lines_of_a_table_and_a_webhook_each_notification(
    pulse_user, alice, webhook, mailbox, settings
):
    channels.create_channel(alice, "chat", f"mmosts://localhost:{webhook.port}/abcdefghijklmnopqrstuvwxyz")
    channels.create_channel(alice, "program", webhook.url())
    write(queues_of(pulse_user, 25))
    send_due()
    [chat] = [request.json["text"] for request in webhook.received if "text" in request.json]
    assert chat.splitlines()[-3:] == [
        "queue/alice/0: over the warning threshold, 6 messages",
        "queue/alice/1: over the warning threshold, 6 messages",
        f"… and 23 more: {settings.GUARDIAN_BASE_URL}/queues/",
    ]
    assert "25 queues: 25 over the warning threshold" in chat
    names = [request.json["queue"] for request in webhook.received if "queue" in request.json]
    assert sorted(names) == sorted(f"queue/alice/{number}" for number in range(25))


def test_a_long_table_is_cut_off(pulse_user, mailbox):
    write(queues_of(pulse_user, grouping.MAX_LINES + 5))
    send_due()
    for text in (mailbox.mails[0].text, mailbox.mails[0].html):
        assert text.count("queue/alice/") == grouping.MAX_LINES
        assert "… and 5 more" in text
        assert len(text.encode()) < 100_000


def test_an_operators_table_names_the_owners(pulse_user, mailbox):
    write([*queues_of(pulse_user, 3), stored_queue("lonely", state="warned")])
    send_due()
    (copy,) = mailbox.to("ops@example.org")
    assert "queue/alice/0 (alice@example.org)" in copy.text
    assert "lonely (no owner)" in copy.text
    assert "as an operator" in copy.text
    assert len(mailbox.to("alice@example.org")) == 3


def test_an_added_address_gets_a_table_without_links(pulse_user, alice, mailbox):
    NotificationAddress.objects.create(
        pulse_user=pulse_user, email="team@example.org", added_by=alice, confirmed_at=timezone.now()
    )
    write(queues_of(pulse_user, MANY))
    send_due()
    (mail,) = mailbox.to("team@example.org")
    assert "because alice@example.org added your address to the Pulse user alice" in mail.text
    assert "/queues/" not in mail.html
    assert "/queues/" in mailbox.to("alice@example.org")[0].html


def test_quiet_hours_defer_the_warnings_of_a_group_but_not_its_deletions(pulse_user, alice, mailbox):
    now = timezone.now().astimezone(UTC)
    Owner.objects.update(quiet_from=(now - timedelta(hours=1)).time(), quiet_until=(now + timedelta(hours=1)).time())
    queues = queues_of(pulse_user, 2 * MANY)
    with leases.lease("pass") as held, transaction.atomic():
        for kind, some in (("warning", queues[:MANY]), ("deletion", queues[MANY:])):
            enqueue.enqueue(notices(some, kind), timezone.now(), held)
    send_due()
    assert subjects(mailbox) == ["[Guardian] 4 queues: 4 deleted"]
    pass_time(minutes=61)
    send_due()
    assert subjects(mailbox)[1:] == ["[Guardian] 4 queues: 4 over the warning threshold"]
    assert len(mailbox.to("ops@example.org")) == 1
    # Mail programs show one mail of those with the same id.
    assert len({mail.message["Message-ID"] for mail in mailbox.mails}) == 3
    assert undelivered_mails(mailbox.mails) == []


def threads(mailbox, address="alice@example.org"):
    """Return the thread of each mail to this address, by its subject."""
    for mail in mailbox.to(address):
        assert mail.message["References"] == mail.message["In-Reply-To"]
    return {mail.subject: mail.message["References"] for mail in mailbox.to(address)}


def test_mails_about_one_queue_to_one_recipient_share_a_thread(pulse_user, mailbox):
    queues = queues_of(pulse_user, 2)
    write(queues[:1])
    send_due()
    write(queues[:1], "recovery", state="ok")
    write(queues[1:])
    send_due()
    hers, copies = threads(mailbox), threads(mailbox, "ops@example.org")
    warning = "[Guardian] Warning: queue/alice/0 has 6 messages"
    assert hers[warning] == hers["[Guardian] Back to normal: queue/alice/0 has 6 messages"] is not None
    assert hers[warning] != hers["[Guardian] Warning: queue/alice/1 has 6 messages"]
    assert copies.keys() == hers.keys()
    assert not set(copies.values()) & set(hers.values())


def test_a_table_has_a_thread_of_its_own(pulse_user, mailbox):
    write(queues_of(pulse_user, MANY))
    send_due()
    assert list(threads(mailbox).values()) == [None]
