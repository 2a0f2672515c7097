"""What is told: written with its cause, delivered once, in order, however long the mail server is away."""

import socket
import threading
import time
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from queues import outbox
from queues.models import Notification
from queues.outbox import Telling, send_due

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def operators(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]


def tell(*errors):
    with transaction.atomic():
        outbox.tell([Telling(Notification.Kind.OUTAGE, {"error": error}) for error in errors], timezone.now())


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
        outbox.tell([Telling(Notification.Kind.OUTAGE, {"error": "x"})], timezone.now())
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


def test_it_is_tried_for_a_day_before_it_is_given_up(mailbox):
    mailbox.refuse(True)
    tell("one")
    attempts = 0
    began = Notification.objects.get().created
    while not send_due().failed:
        attempts += 1
        assert attempts < 500, "it never ends"
        later(seconds=outbox.retry_seconds(attempts))
    notification = Notification.objects.get()
    assert began - notification.created >= timedelta(hours=24)
    assert notification.state == "failed"
    assert "451" in notification.last_error


def test_a_clock_that_jumps_a_day_ahead_gives_nothing_up(mailbox):
    mailbox.refuse(True)
    tell("one")
    later(hours=25)
    assert send_due().postponed == 1


def test_a_clock_that_is_set_back_an_hour_holds_nothing_up(mailbox):
    tell("one")
    later(hours=-1)
    assert send_due().sent == 1


def test_one_recipient_that_is_rejected_does_not_hold_up_the_others(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["a@example.org", "b@example.org", "c@example.org"]
    mailbox.rejected.add("b@example.org")
    tell("one")
    delivery = send_due()
    assert (delivery.sent, delivery.postponed) == (2, 1)


@pytest.mark.parametrize("sender", ["guardian@", "a@b@c"])
def test_a_sender_that_is_no_address_holds_mails_back_and_breaks_nothing(mailbox, settings, sender):
    settings.DEFAULT_FROM_EMAIL = sender
    tell("one")
    assert send_due().postponed == 1
    assert "Invalid address" in Notification.objects.get().last_error


def test_a_mail_server_that_hangs_is_waited_for_once_and_not_once_for_each_mail(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(20)]
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_TIMEOUT = 0.5
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.EMAIL_HOST, settings.EMAIL_PORT = silent.getsockname()
        tell("one")
        began = time.monotonic()
        assert send_due().postponed == 20
    assert time.monotonic() - began < 5


def test_what_a_killed_sender_had_claimed_is_sent_by_the_next_once_the_claim_runs_out(mailbox):
    tell("one")
    assert len(outbox.claim(10)) == 1
    assert send_due().sent == 0
    later(seconds=outbox.CLAIM_SECONDS)
    assert send_due().sent == 1


def test_a_mail_that_has_to_go_out_again_has_the_same_message_id(mailbox):
    tell("one")
    send_due()
    Notification.objects.update(state="due", sent_at=None)
    send_due()
    assert len({mail.message["Message-ID"] for mail in mailbox.mails}) == 1


@pytest.mark.slow
def test_many_senders_at_once_send_each_row_once(mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = [f"op{number}@example.org" for number in range(60)]
    tell("one")
    begin = threading.Barrier(5)

    def send():
        begin.wait()
        try:
            send_due()
        finally:
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(mailbox.mails) == 60
    assert Notification.objects.filter(state="sent").count() == 60
