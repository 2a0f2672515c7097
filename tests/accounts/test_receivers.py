"""Notifications about addresses, access and Pulse users, written with their cause."""

import pytest
from django.db import transaction

from accounts import signals
from accounts.access import vouching
from accounts.models import Owner, PulseUser
from accounts.pulse_users import addresses
from notifications.models import Notification
from notifications.sending import send_due
from queues.models import Queue
from tests.support.toolbox import stored_queue

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def operators(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]


def test_an_added_address_gets_a_mail_with_its_confirmation_link(pulse_user, alice, mailbox):
    addresses.add_address(pulse_user, "team@example.org", alice)
    stored = str(list(Notification.objects.values()))
    assert send_due().sent == 1
    (mail,) = mailbox.to("team@example.org")
    assert "alice@example.org added this address to the Pulse user" in mail.text
    token = mail.text.partition("/addresses/")[2].partition("/")[0]
    assert token not in stored + str(list(Notification.objects.values()))
    assert addresses.confirm_address(token).confirmed_at is not None


def test_each_operator_gets_one_mail_about_an_access_request(mailbox):
    Owner.objects.create_superuser("ops@example.org")
    Owner.objects.create_superuser("second@example.org")
    Owner.objects.create_superuser("left@example.org", is_active=False)
    bob = Owner.objects.create_user("bob@example.org")
    vouching.request_vouching(bob, "I run the <b>nightly</b> builds.\nPlease help.")
    send_due()
    assert sorted(mail.recipients[0] for mail in mailbox.mails) == ["ops@example.org", "second@example.org"]
    mail = mailbox.mails[0]
    assert mail.subject == "[Guardian] bob@example.org asks for access to the broker"
    assert "I run the <b>nightly</b> builds." in mail.text
    assert "&lt;b&gt;nightly" in mail.html
    assert "/owners/" in mail.text


def test_an_access_request_without_operators_is_accepted(settings):
    settings.GUARDIAN_OPERATOR_EMAILS = []
    vouching.request_vouching(Owner.objects.create_user("bob@example.org"), "please")
    assert not Notification.objects.exists()


def test_a_vouched_owner_is_notified_by_whom_and_of_the_next_step(alice, mailbox):
    ops = Owner.objects.create_superuser("ops@example.org")
    vouching.vouch(Owner.objects.create_user("bob@example.org"), ops, "works here")
    send_due()
    (mail,) = mailbox.mails
    assert mail.recipients[0] == "bob@example.org"
    assert "ops@example.org approved your access to the broker" in mail.text
    assert "/pulse-users/" in mail.text


def test_the_queues_of_a_removed_pulse_user_are_gone(pulse_user):
    stored_queue("queue/alice/builds", pulse_user=pulse_user)
    with transaction.atomic():
        signals.pulse_user_removed.send(PulseUser, pulse_user=pulse_user)
    assert Queue.objects.get().state == "gone"
