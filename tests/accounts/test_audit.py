"""The audit trail: actor, token and address, what is recorded and what is left out, and its cost."""

import io
import threading
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from django.contrib.contenttypes.models import ContentType
from django.core import serializers
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from accounts import audit
from accounts.access import tokens, vouching
from accounts.models import AuditEntry, Owner, PulseUser
from accounts.pulse_users import addresses, creation, ownership, passwords, thresholds, withdrawal
from accounts.signing_in.links import create_link
from accounts.signing_in.owners import prune_visitors
from agents.models import EventSubscription
from agents.removal import deletions
from core import locks
from core.tasks import finish_removals
from notifications import channels, preferences
from notifications.models import Channel
from queues.actions import single
from queues.guard.once import run_once
from queues.models import Queue
from rabbit.errors import BrokerUnavailable
from rabbit.fetching import Fetch
from rabbit.management import Management
from tests.site.test_commands import run
from tests.support.api import Program
from tests.support.toolbox import AWAY, AWAY_AMQP, amqp_answers_lost, mark_for_removal, raising, remove_as_a_person

pytestmark = pytest.mark.usefixtures("transactional_db")

PULSE_USER = "audited"


@pytest.fixture
def pulse_user(guarded, create_pulse_user, alice):
    """Return Alice's Pulse user, stored and on the broker."""
    created = PulseUser.objects.create(username=create_pulse_user(PULSE_USER, exactly=True), ready=True)
    created.owners.set([alice])
    return created


@pytest.fixture
def queue(amqp, pulse_user):
    """Return a queue of that Pulse user with 3 messages, as stored by a pass."""
    amqp.queue(f"queue/{PULSE_USER}/builds", 3)
    run_once()
    return Queue.objects.get()


def trail(**wanted):
    """Return actor, action, object and outcome of the entries, oldest first."""
    entries = AuditEntry.objects.filter(**wanted).order_by("id")
    return [(entry.actor_email, entry.event, entry.object_repr, entry.outcome) for entry in entries]


def all_entries():
    return serializers.serialize("json", AuditEntry.objects.all())


def clear_trail():
    AuditEntry.objects.all().delete()


# Actors


def test_an_entry_names_the_person_their_address_and_the_request(queue, alice):
    clear_trail()
    client = Client(REMOTE_ADDR="192.0.2.9")
    client.force_login(alice)
    answer = client.post(f"/queues/{queue.uuid}/purge/", {"typed": queue.name})
    assert answer.status_code == 302
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.actor_email, entry.event, entry.outcome) == (alice, alice.email, "purged", "done")
    assert (entry.object_repr, entry.object_id) == (str(queue), queue.pk)
    assert (entry.remote_addr, entry.cid) == ("192.0.2.9", answer["X-Request-ID"])


def test_an_entry_names_the_token_and_its_owner(queue, operator):
    program = Program(operator)
    token = operator.auth_token_set.get()
    token.name = "nightly"
    token.save()
    clear_trail()
    assert program.patch(f"queues/{queue.uuid.hex}/", {"warn_length": 6}).status_code == 200
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.event, entry.changes) == (operator, "changed", {"warn_length": ["None", "6"]})
    assert entry.additional_data == {"token": "nightly"}
    assert program.key not in all_entries()


def test_the_actor_is_set_for_the_request_and_its_thread_only(alice, monkeypatch):
    seen = []
    set_quiet_hours = preferences.set_weekly_summary

    def look(*arguments):
        seen.append(audit.actor())
        other = threading.Thread(target=lambda: seen.append(audit.actor()))
        other.start()
        other.join()
        return set_quiet_hours(*arguments)

    monkeypatch.setattr(preferences, "set_weekly_summary", look)
    program = Program(alice)
    assert program.patch("settings/", {"weekly_summary": False}).status_code == 200
    assert seen == [alice, None]
    assert audit.actor() is None


@pytest.mark.slow
def test_an_entry_names_the_command(environment):
    run(environment, "create_owner", "new@example.org", "--operator")
    entry = AuditEntry.objects.get(event="created")
    assert (entry.actor, entry.actor_email, entry.object_repr) == (None, "", "new@example.org")
    assert entry.additional_data == {"command": "create_owner"}
    assert entry.remote_addr is None


def test_an_entry_names_the_task(pulse_user):
    mark_for_removal(*PulseUser.objects.all())
    clear_trail()
    finish_removals.apply()
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.event, entry.object_repr) == (None, "deleted", PULSE_USER)
    assert entry.additional_data == {"task": "core.tasks.finish_removals"}


def test_visitors_who_never_signed_in_leave_no_entries(client, transactional_db, mailbox):
    for number in range(3):
        client.post("/signin/", {"email": f"nobody-{number}@example.org"})
    assert Owner.objects.count() == 3
    Owner.objects.update(date_joined=timezone.now() - timedelta(days=3))
    assert prune_visitors() == 3
    assert not AuditEntry.objects.exists()


def test_entries_outlive_the_deleted_owner(admin, alice, operator):
    vouching.vouch(alice, operator)
    audit.record(alice, "purged", None)
    path = f"/admin/accounts/owner/{alice.pk}/delete/"
    assert admin.post(path, {"post": "yes"}).status_code == 302
    entry = AuditEntry.objects.get(event="purged")
    assert (entry.actor, entry.actor_email) == (None, "alice@example.org")
    gone = AuditEntry.objects.get(event="deleted")
    assert (gone.actor, gone.object_repr) == (operator, "alice@example.org")
    assert "alice@example.org" in admin.get("/admin/accounts/auditentry/?q=alice").text


def test_an_owner_deleted_during_an_action_is_still_named(queue, operator, monkeypatch):
    leaving = Owner.objects.create_user("leaving@example.org", is_staff=True)
    clear_trail()
    set_limits, purge, destroy = single.set_limits, single.purge_queue, single.delete_queue

    def late(do):
        def removed_first(queue, by, **limits):
            Owner.objects.filter(pk=by.pk).delete()
            return do(queue, by, **limits)

        return removed_first

    for name, do in (("set_limits", set_limits), ("purge_queue", purge), ("delete_queue", destroy)):
        monkeypatch.setattr(single, name, late(do))
    client = Client()
    typed = {"typed": queue.name}
    for page, form in (("limits", {"warn_length": "6"}), ("purge", typed), ("delete", typed)):
        client.force_login(leaving)
        assert client.post(f"/queues/{queue.uuid}/{page}/", form).status_code == 302
        leaving.save(force_insert=True)  # for the next round
    by_leaving = [(entry.event, entry.outcome) for entry in AuditEntry.objects.filter(actor_email=leaving.email)]
    assert {event for event, _ in by_leaving} >= {"changed", "purged", "deleted on the broker"}
    assert {outcome for _, outcome in by_leaving} == {"done"}
    kinds = {"adjusted", "purged", "removing", "removed"}
    assert set(queue.events.filter(kind__in=kinds).values_list("kind", "by")) == {(kind, None) for kind in kinds}
    client.force_login(operator)
    assert client.get("/admin/accounts/auditentry/").status_code == 200
    assert client.get(f"/queues/{queue.uuid}/").status_code == 200


def test_an_entry_outlives_its_content_type(alice, operator):
    audit.record(operator, "purged", alice)
    ContentType.objects.get_for_model(Owner).delete()
    ContentType.objects.clear_cache()
    [entry] = AuditEntry.objects.filter(event="purged")
    assert (entry.content_type, entry.object_repr) == (None, alice.email)
    call_command("migrate", verbosity=0)  # which creates the content type again


# Actions on the broker


@pytest.mark.parametrize(
    ("do", "lost", "event"),
    [(single.delete_queue, "queue_delete", "deleted on the broker"), (single.purge_queue, "queue_purge", "purged")],
)
def test_broker_actions_are_recorded_with_their_outcome(
    queue, alice, broker, settings, amqp, monkeypatch, do, lost, event
):
    clear_trail()
    settings.RABBIT_URL = AWAY_AMQP
    with pytest.raises(BrokerUnavailable):
        do(queue, alice)
    with amqp_answers_lost(broker, settings, monkeypatch, lost), pytest.raises(BrokerUnavailable):
        do(queue, alice)
    settings.RABBIT_URL = broker.amqp_url
    amqp.queue(queue.name)
    do(queue, alice)
    name = f"queue/{PULSE_USER}/builds in {queue.vhost}"
    assert trail() == [
        ("alice@example.org", event, name, "not-done"),
        ("alice@example.org", event, name, "unknown"),
        ("alice@example.org", event, name, "done"),
    ]
    why = AuditEntry.objects.get(outcome="unknown").additional_data["why"]
    assert "no answer over AMQP" in why


def test_an_action_that_lost_its_lock_is_recorded_as_not_done(pulse_user, monkeypatch):
    clear_trail()
    renew, times = locks.Lock.renew, []

    def late(self):
        times.append(self)
        if len(times) == 2:  # the first is for its tags
            raise locks.LockTaken("too slow")
        renew(self)

    monkeypatch.setattr(locks.Lock, "renew", late)
    with pytest.raises(ValidationError):
        passwords.rotate_password(pulse_user)
    assert [entry[1:] for entry in trail()] == [("changed the password", PULSE_USER, "not-done")]


def test_an_action_cut_by_a_killed_process_has_an_unknown_outcome(queue, alice):
    clear_trail()
    with raising(Fetch, "delete_queue", SystemExit), pytest.raises(SystemExit):
        single.delete_queue(queue, alice)
    assert [entry[3] for entry in trail()] == ["unknown"]


def test_a_password_rotation_is_recorded_without_the_password(pulse_user):
    clear_trail()
    password = passwords.rotate_password(pulse_user)
    lost = BrokerUnavailable("no answer came")
    with raising(Management, "put_user", lost, after=True), pytest.raises(BrokerUnavailable):
        passwords.rotate_password(pulse_user, "a password of my own 7")
    assert [entry[1:] for entry in trail()] == [
        ("changed the password", PULSE_USER, "done"),
        ("changed the password", PULSE_USER, "unknown"),
    ]
    assert password not in all_entries()
    assert "a password of my own 7" not in all_entries()


# Recorded changes


def test_changes_of_a_pulse_user_are_recorded(pulse_user, alice, operator, guarded):
    bob = Owner.objects.create_user("bob@example.org", vouched=True, last_login=timezone.now())
    clear_trail()
    ownership.add_owner(pulse_user, bob, operator)
    ownership.remove_owner(pulse_user, bob, alice)
    thresholds.set_thresholds(pulse_user, 6, 9, operator)
    address = addresses.add_address(pulse_user, "team@example.org", alice)
    addresses.confirm_address(addresses.confirmation_token(address))
    addresses.remove_address(address)
    remove_as_a_person(pulse_user)
    assert [(event, thing) for _, event, thing, _ in trail()] == [
        ("changed", PULSE_USER),
        ("changed", PULSE_USER),
        ("changed", PULSE_USER),
        ("created", f"team@example.org for {PULSE_USER}"),
        ("confirmed", f"team@example.org for {PULSE_USER}"),
        ("deleted", f"team@example.org for {PULSE_USER}"),
        ("started the removal", PULSE_USER),
        ("deleted", PULSE_USER),
    ]
    first, second, third = AuditEntry.objects.order_by("id")[:3]
    assert first.changes == {"owners": {"type": "m2m", "operation": "add", "objects": ["bob@example.org"]}}
    assert second.changes == {"owners": {"type": "m2m", "operation": "delete", "objects": ["bob@example.org"]}}
    assert third.changes == {"warn_length": ["None", "6"], "max_length": ["None", "9"]}


def test_creating_and_adopting_pulse_users_is_recorded(guarded, name, alice, operator, create_pulse_user, settings):
    creation.create_pulse_user(name, [alice])
    found = create_pulse_user("found")
    creation.adopt_pulse_user(found, [alice], operator)
    assert [(event, thing) for _, event, thing, _ in trail(content_type__model="pulseuser")] == [
        ("created", name),
        ("changed", name),
        ("created", found),
        ("changed", found),
        ("adopted", found),
    ]
    assert AuditEntry.objects.get(event="adopted").actor == operator
    clear_trail()
    settings.GUARDIAN_PULSE_VHOST = "no-such-vhost"
    with pytest.raises(BrokerUnavailable):
        creation.create_pulse_user("audited-failed", [alice])
    assert [entry[1] for entry in trail()] == ["created", "changed", "deleted"]


def test_vouching_and_withdrawing_are_recorded(pulse_user, alice, operator, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    bob = Owner.objects.create_user("bob@example.org", last_login=timezone.now())
    shared = PulseUser.objects.create(username="shared", ready=True)
    shared.owners.set([alice, bob])
    tokens.create_token(alice, "nightly")
    clear_trail()
    vouching.vouch(bob, operator)
    withdrawal.withdraw(alice, operator, remove=True)
    assert [(event, thing) for _, event, thing, _ in trail()] == [
        ("changed", "bob@example.org"),
        ("changed", "alice@example.org"),
        ("revoked", "nightly"),
        ("started the removal", PULSE_USER),
        ("removed an owner", "shared"),
    ]
    assert AuditEntry.objects.get(event="removed an owner").additional_data == {"owner": "alice@example.org"}


def test_vouching_that_changes_no_row_is_recorded(alice, operator):
    bob = Owner.objects.create_user("bob@example.org", last_login=timezone.now())
    vouching.unvouch(alice, None, vouching.NO_LONGER_IN_GROUP)
    clear_trail()
    withdrawal.withdraw(alice, operator, reason="has left")
    withdrawal.withdraw(alice, operator, reason="has left")
    vouching.request_vouching(bob, "for builds")
    vouching.vouch(bob, None, f"{vouching.BY_DOMAIN}example.org")
    vouching.vouch(bob, operator, "known to us")
    assert trail() == [
        (operator.email, "refused access", alice.email, "done"),
        (bob.email, "requested access", bob.email, "done"),
        ("", "changed", bob.email, "done"),
        (operator.email, "approved access, too", bob.email, "done"),
    ]
    assert AuditEntry.objects.latest("id").additional_data == {"reason": "known to us"}


def test_a_sign_in_is_recorded_and_works_if_recording_fails(client, alice):
    clear_trail()
    client.post(urlsplit(create_link(alice)).path)
    assert client.get("/tokens/").status_code == 200
    assert trail(event="signed in") == [(alice.email, "signed in", alice.email, "done")]

    link = urlsplit(create_link(alice)).path
    clear_trail()
    other = Client()
    with raising(AuditEntry, "save", OperationalError("the disk is full")):
        other.post(link)
    assert other.get("/tokens/").status_code == 200
    assert trail() == []


@pytest.mark.parametrize(
    ("command", "event"),
    [
        ("monitor_queues", "requested a pass"),
        ("cleanup_orphan_queues", "requested a sweep of orphans"),
        ("cleanup_stale_subscriptions", "requested a clean-up of stale subscriptions"),
    ],
)
def test_a_command_that_overrides_the_brake_is_recorded(guarded, transactional_db, command, event):
    clear_trail()
    for options in ({"force": True, "dry_run": True}, {"force": False}, {"force": True}):
        with pytest.raises(SystemExit):
            call_command(command, once=True, stdout=io.StringIO(), **options)
    assert [entry[1] for entry in trail()] == [event]
    assert AuditEntry.objects.get().additional_data == {"force": True}


def test_tokens_and_links_are_recorded_without_their_secrets(alice):
    token, key = tokens.create_token(alice, "nightly", 30)
    link = create_link(alice)
    tokens.revoke_token(token)
    tokens.revoke_token(token)
    tokens.revoke_tokens_of(alice)
    assert [(event, thing) for _, event, thing, _ in trail(event__in=["revoked", "created a sign-in link"])] == [
        ("created a sign-in link", "alice@example.org"),
        ("revoked", "nightly"),
    ]
    created = AuditEntry.objects.get(event="created", content_type__model="authtoken")
    assert (created.object_pk, created.additional_data) == (str(token.uuid), {
        "owner": "alice@example.org", "days": 30, "scope": "agent",
    })  # fmt: skip
    for secret in (key, token.digest, token.token_key, link.rstrip("/").rpartition("/")[2]):
        assert secret not in all_entries()


def test_preferences_and_channels_are_recorded_without_urls(alice):
    clear_trail()
    preferences.set_weekly_summary(alice, False)
    channel = channels.create_channel(
        alice, "chat", "https://hooks.slack.com/services/T00000000/B00000000/s3cretmarker"
    )
    channels.record_result(channel, "it answered 500")
    channel.delete()
    assert [(event, thing) for _, event, thing, _ in trail()] == [
        ("changed", "alice@example.org"),
        ("created", "chat"),
        ("deleted", "chat"),
    ]
    assert AuditEntry.objects.get(event="created").changes["owner"] == ["None", "alice@example.org"]
    assert "s3cretmarker" not in all_entries()
    assert not Channel.objects.exists()


def test_membership_of_offerings_is_recorded(agents, alice):
    offering = agents.offering(name="Compute")
    clear_trail()
    offering.members.add(alice)
    offering.publishers.set([alice])
    offering.members.remove(alice)
    assert [entry.changes for entry in AuditEntry.objects.order_by("id")] == [
        {name: {"type": "m2m", "operation": operation, "objects": ["alice@example.org"]}}
        for name, operation in (("members", "add"), ("publishers", "add"), ("members", "delete"))
    ]


def test_registrations_deleted_by_a_person_are_recorded(admin, agents, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    owner = agents.owner()
    identity = agents.identity(owner)
    subscriptions = [
        EventSubscription.objects.create(owner=owner, identity=identity, object_type=kind)
        for kind in ("order", "resource", "call")
    ]
    clear_trail()
    deletions.delete(subscriptions[0])
    assert not AuditEntry.objects.exists()
    page = "/admin/agents/eventsubscription/"
    assert admin.post(f"{page}{subscriptions[1].pk}/delete/", {"post": "yes"}).status_code == 302
    program = Program(owner)
    assert program.delete(f"agent-identities/{identity.uuid.hex}/").status_code == 204
    assert trail() == [
        ("ops@example.org", "deleted", subscriptions[1].uuid.hex, "done"),
        (owner.email, "deleted", identity.name, "done"),
    ]
    last = AuditEntry.objects.latest("id")
    assert last.additional_data["went"] == {"agents.AgentIdentity": 1, "agents.EventSubscription": 1}


# The page of the audit trail


def test_the_page_says_in_words_who_did_what(admin, alice, operator):
    pulse_user = PulseUser.objects.create(username="team", ready=True)
    pulse_user.owners.set([alice])
    thresholds.set_thresholds(pulse_user, 6, 9, operator)
    audit.record(operator, "requested a sweep of orphans", None, agreed_to=5, force=True)
    odd = Queue(pk=1, name="queue/<script>\u202e", vhost="/")
    with audit.audited(alice, "purged", odd):
        pass
    tokens.revoke_token(tokens.create_token(alice, "nightly")[0])
    page = admin.get("/admin/accounts/auditentry/").text
    for words in (
        "warning threshold: none → 6", "with the owners alice@example.org", "agreed_to: 5",
        "requested a sweep of orphans", "queue/&lt;script&gt;", "nightly",
        f'<a href="/admin/accounts/pulseuser/{pulse_user.pk}/change/">team</a>',
        "Guardian",
    ):  # fmt: skip
        assert words in page, words
    assert "<script>\u202e" not in page
    history = admin.get(f"/admin/accounts/pulseuser/{pulse_user.pk}/history/", follow=True)
    assert {entry.object_repr for entry in history.context["cl"].queryset} == {"team"}
