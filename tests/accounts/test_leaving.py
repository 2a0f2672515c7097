"""An owner leaves by the documented steps: what remains in the database and on the broker."""

from datetime import timedelta

import pytest
from allauth.socialaccount.models import SocialAccount
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from accounts.access import vouching
from accounts.models import NotificationAddress, Owner, PulseUser
from accounts.pulse_users import withdrawal
from accounts.pulse_users.creation import create_pulse_user
from accounts.signing_in import links
from message_store.models import Application
from message_store.store import store
from notifications import channels, enqueue, sending
from notifications.enqueue import Notice
from notifications.models import Notification
from queues.guard import once
from queues.models import Queue
from tests.support.agents import RegisteredAgent
from tests.support.api import Program
from tests.support.toolbox import confirmed

ADDRESS = "leaving@example.org"


def tables_with(*texts):
    """Return the tables with one of these texts in any column."""
    found = set()
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT * FROM "{table}"')
            if any(text in str(row) for row in cursor.fetchall() for text in texts):
                found.add(table)
    return found


@pytest.fixture
def leaving(agents, guarded, operator, amqp, settings, name):
    """Return an owner with one of everything, alone and shared with another owner."""
    settings.GUARDIAN_OPERATOR_EMAILS = []
    registered = RegisteredAgent(agents, "leaving")
    owner = registered.owner
    Owner.objects.filter(pk=owner.pk).update(full_name="Lea Ving")
    owner.refresh_from_db()
    vouching.vouch(owner, operator, "Lea Ving builds things")
    links.create_link(owner)
    SocialAccount.objects.create(user=owner, provider="oidc", uid="lea", extra_data={"email": ADDRESS})
    other = agents.owner("other")
    registered.alone, registered.shared = f"{name}-alone", f"{name}-shared"
    create_pulse_user(registered.alone, [owner])
    shared, _ = create_pulse_user(registered.shared, [owner, other])
    NotificationAddress.objects.create(pulse_user=shared, email="team@example.org", added_by=owner)
    channels.create_channel(owner, "chat", "https://1.1.1.1/hooks/3kd8fj2")
    for username in (registered.alone, registered.shared):
        amqp.queue(f"queue/{username}/q", 7)
    once.run_once()
    return registered


def test_an_owner_who_left_leaves_only_what_the_documents_say(leaving, agents, operator, mailbox, guarded):
    owner, program, browser = leaving.owner, Program(leaving.owner), Client()
    browser.force_login(owner)
    assert browser.get("/queues/").status_code == 200
    assert len(tables_with(ADDRESS, owner.uuid.hex)) > 5

    confirmed(lambda confirm: withdrawal.withdraw(owner, operator, remove=True, confirm=confirm))
    admin = Client()
    admin.force_login(operator)
    deleting = admin.post(reverse("admin:accounts_owner_delete", args=[owner.pk]), {"post": "yes"})
    assert deleting.status_code == 302
    assert not Owner.objects.filter(email=ADDRESS).exists()

    assert program.get("me/").status_code == 401
    assert browser.get("/queues/").status_code == 302
    users = agents.users()
    assert leaving.alone not in users
    assert users.isdisjoint({leaving.subscription.rmq_username, leaving.consumer.rmq_username})
    assert leaving.vhost not in agents.vhosts()
    assert set(agents.queues(guarded)) == {f"queue/{leaving.shared}/q"}
    assert leaving.shared in users
    assert [one.email for one in PulseUser.objects.get(username=leaving.shared).owners.all()] == ["other@example.org"]
    assert not NotificationAddress.objects.exists()

    once.run_once()
    sending.send_due()
    assert {to for mail in mailbox.mails for to in mail.recipients} == {"other@example.org"}
    left = {"accounts_auditentry", "notifications_notification"}
    assert tables_with(ADDRESS, "Lea Ving", "3kd8fj2") <= left | {"django_admin_log"}
    assert Queue.objects.get(name=f"queue/{leaving.alone}/q").pulse_user is None


def test_texts_of_others_about_an_owner_who_left_stay(agents, operator, guarded):
    owner = agents.owner("leaving")
    pulse_user = PulseUser.objects.create(username="others", ready=True)
    pulse_user.owners.add(agents.owner("other"))
    NotificationAddress.objects.create(pulse_user=pulse_user, email=ADDRESS, confirmed_at=timezone.now())
    Application.objects.create(name="shop")
    store().register("shop", "theirs", principals=[f"bid:{ADDRESS}"])
    owner.delete()
    assert NotificationAddress.objects.get().email == ADDRESS
    assert store().find("shop", "theirs").principals == (f"bid:{ADDRESS}",)


@pytest.mark.parametrize("kind", ["weekly", "vouched"])
def test_pending_notifications_are_dropped_once_the_recipient_left(agents, mailbox, guarded, kind):
    owner = agents.owner("leaving")
    now = timezone.now()
    facts = {"longest": [], "unattended": [], "happened": [], "queues": 0, "accounts": 0}
    enqueue.enqueue([Notice(kind, facts, recipients=[ADDRESS], deferred_until=now - timedelta(seconds=1))], now)
    owner.delete()
    sending.send_due()
    assert mailbox.mails == []
    assert Notification.objects.get().last_error == "The recipient can no longer sign in."
