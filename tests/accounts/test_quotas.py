"""Quotas of owners: at most so many of each kind, also under concurrent requests."""

import re

import pytest
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from accounts.access import tokens
from accounts.models import AuthToken, Invitation, Owner, PulseUser
from accounts.pulse_users import creation, invitations
from agents.models import AgentIdentity, Consumer, EventSubscription, SubscriptionQueue
from agents.registration import queues
from agents.registration.identities import create_identity
from core.refusals import Refusal
from notifications import channels
from tests.support.api import Program, Visitor
from tests.support.toolbox import in_parallel

SLACK = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/"


@pytest.fixture
def two_of_each(settings):
    settings.GUARDIAN_MAX_PULSE_USERS = 2
    settings.GUARDIAN_MAX_TOKENS = 2
    settings.GUARDIAN_MAX_SUBSCRIPTIONS = 2
    settings.GUARDIAN_MAX_CHANNELS = 2


def own_pulse_users(owner, *names):
    for name in names:
        PulseUser.objects.create(username=name, ready=True).owners.add(owner)


def own_channels(owner, number):
    for one in range(number):
        channels.create_channel(owner, f"room {one}", SLACK)


def own_tokens(owner, number):
    for one in range(number):
        tokens.create_token(owner, f"token {one}")


# Pulse users


def test_an_owner_with_the_maximum_of_pulse_users_creates_no_more(alice, two_of_each, guarded):
    own_pulse_users(alice, "a", "b")
    refused = Program(alice).post("pulse-users/", {"username": "c"})
    assert (refused.status_code, list(refused.json())) == (400, ["non_field_errors"])
    assert "at most 2 Pulse users" in refused.text
    page = Visitor(alice).client.post("/pulse-users/", {"username": "c"})
    assert page.status_code == 200
    assert "at most 2 Pulse users" in page.text
    assert not PulseUser.objects.filter(username="c").exists()


def test_an_invitation_past_the_maximum_stays_open(alice, bob, two_of_each):
    own_pulse_users(bob, "a", "b")
    own_pulse_users(alice, "shared")
    with transaction.atomic():
        invitations.invite(PulseUser.objects.locked(alice.pulse_users.get()), [bob], by=alice)
    invitation = Invitation.objects.get()
    page = Visitor(bob).client.post(f"/invitations/{invitation.uuid}/", {"accept": ""})
    assert (page.status_code, "at most 2 Pulse users" in page.text) == (400, True)
    bob.pulse_users.get(username="a").delete()
    invitations.accept(invitation)


def test_an_unfinished_creation_can_be_finished_at_the_maximum(alice, two_of_each, agents, name):
    own_pulse_users(alice, "a")
    PulseUser.objects.create(username=name).owners.add(alice)  # a crash left it
    creation.create_pulse_user(name, [alice], by=alice)
    assert PulseUser.objects.get(username=name).ready


def test_operators_are_exempt_and_create_pulse_users_for_owners_with_the_maximum(
    alice, operator, two_of_each, agents, name
):
    own_pulse_users(operator, "a", "b")
    own_pulse_users(alice, "c", "d")
    own_channels(operator, 3)
    own_tokens(operator, 3)
    for owner in (operator, alice):
        creation.create_pulse_user(f"{name}-{owner.pk}", [owner], by=operator)
    offering = agents.offering()
    for number in range(3):
        create_identity(operator, offering, f"agent {number}")


def test_zero_is_no_limit(alice, settings):
    settings.GUARDIAN_MAX_TOKENS = settings.GUARDIAN_MAX_CHANNELS = 0
    own_channels(alice, 3)
    own_tokens(alice, 3)


# Tokens


def test_expired_and_revoked_tokens_do_not_count(alice, two_of_each):
    first, second = (tokens.create_token(alice, f"token {number}")[0] for number in range(2))
    AuthToken.objects.filter(pk=first.pk).update(expiry=timezone.now())
    tokens.revoke_token(second)
    for number in range(2):
        tokens.create_token(alice, f"new {number}")


# Channels


def test_an_owner_with_the_maximum_of_channels_creates_no_more(alice, as_alice, two_of_each):
    own_channels(alice, 2)
    with pytest.raises(Refusal, match="at most 2 channels"):
        own_channels(alice, 1)
    assert "the maximum number of channels" in as_alice.get("/settings/").text


# Agents


def test_an_owner_has_at_most_so_many_agents_subscriptions_and_queues_each(agents, two_of_each):
    owner = agents.owner()
    program, presented = Program(owner, "agent"), agents.token(owner)
    offering = agents.offering(owner)
    identities = [agents.identity(owner, offering) for _ in range(2)]
    registered = f"agent-identities/{identities[0].uuid.hex}"
    requests = {
        AgentIdentity: ("agent-identities/", {"offering": offering.uuid.hex, "name": "third"}, "agent identities"),
        EventSubscription: (
            f"{registered}/register_event_subscription/", {"observable_object_type": "call"}, "event subscriptions",
        ),
        SubscriptionQueue: (
            f"{registered}/create_queue/", {"offering_uuid": offering.uuid.hex, "object_type": "order"},
            "subscription queues",
        ),
    }  # fmt: skip
    for object_type in ("order", "resource"):
        queues.register_subscription(identities[0], object_type, presented)
    subscription = EventSubscription.objects.get(object_type="order")
    for object_type in ("proposal", "user_role"):
        queues.create_queue(subscription, offering, object_type, presented)
    for model, (path, body, things) in requests.items():
        refused = program.post(path, body)
        assert (refused.status_code, list(refused.json())) == (400, ["non_field_errors"]), path
        assert f"at most 2 {things}" in refused.text
        assert model.objects.count() == 2
    assert (
        program.post(f"{registered}/register_event_subscription/", {"observable_object_type": "order"}).status_code
        == 200
    )
    assert len(agents.queues(owner.uuid.hex)) == 3  # two, and the dead-letter queue


def test_an_owner_has_at_most_so_many_consumer_queues(agents, settings):
    owner = agents.owner()
    offering = agents.offering(owner)
    first, second = (agents.identity(owner, offering) for _ in range(2))
    settings.GUARDIAN_MAX_SUBSCRIPTIONS = 1
    program = Program(owner, "agent")
    assert program.post(f"agent-identities/{first.uuid.hex}/register_queue/", {}).status_code == 201
    refused = program.post(f"agent-identities/{second.uuid.hex}/register_queue/", {})
    assert (refused.status_code, "at most 1 consumers" in refused.text) == (400, True)
    assert program.post(f"agent-identities/{first.uuid.hex}/register_queue/", {}).status_code == 200
    assert Consumer.objects.count() == 1


def test_what_one_owner_has_does_not_count_for_another(agents, alice, two_of_each):
    other = agents.owner()
    offering = agents.offering(alice, other)
    for owner in (alice, other):
        own_channels(owner, 2)
        own_tokens(owner, 2)
        for number in range(2):
            create_identity(owner, offering, f"agent {number}")


# Concurrent requests


CREATE = {
    "tokens": lambda owner, number: tokens.create_token(owner, f"token {number}"),
    "channels": lambda owner, number: channels.create_channel(owner, f"room {number}", SLACK),
    "agents": lambda owner, number: create_identity(owner, owner.offerings.get(), f"agent {number}"),
}


@pytest.mark.parametrize("create", CREATE.values(), ids=CREATE)
def test_concurrent_requests_do_not_exceed_a_quota(transactional_db, two_of_each, create):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    owner.offerings.create(name="Compute")
    create(owner, 0)
    outcomes = in_parallel(*[lambda number=number: create(owner, number) for number in range(1, 7)])
    refused = [outcome for outcome in outcomes if isinstance(outcome, ValidationError)]
    assert len(refused) == 5, outcomes
    assert all(re.search("at most 2 ", str(outcome)) for outcome in refused)


def test_concurrent_creations_of_pulse_users_do_not_exceed_the_quota(transactional_db, guarded, settings, name):
    settings.GUARDIAN_MAX_PULSE_USERS = 2
    alice = Owner.objects.create_user("alice@example.org", vouched=True)
    program = Program(alice)
    answers = in_parallel(
        *[lambda one=one: program.post("pulse-users/", {"username": f"{name}-{one}"}) for one in range(5)]
    )
    assert sorted(answer.status_code for answer in answers) == [201] * 2 + [400] * 3
    assert alice.pulse_users.count() == 2


def test_two_invitations_accepted_at_once_do_not_exceed_the_quota(transactional_db, settings):
    settings.GUARDIAN_MAX_PULSE_USERS = 2
    alice, bob = (Owner.objects.create_user(f"{name}@example.org", vouched=True) for name in ("alice", "bob"))
    own_pulse_users(alice, "a", "b", "c")
    own_pulse_users(bob, "d")
    received = [
        Invitation.objects.create(pulse_user=one, invitee=bob, inviter=alice) for one in alice.pulse_users.all()
    ]
    outcomes = in_parallel(*[lambda one=one: invitations.accept(one) for one in received])
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "Refusal", "Refusal"]
    assert bob.pulse_users.count() == 2
