"""The REST API of Pulse users, owners and tokens."""

import uuid
from datetime import timedelta
from urllib.parse import urlencode

import pytest
from django.utils import timezone
from pika.exceptions import AMQPConnectionError

from accounts.models import Owner, PulseUser
from accounts.pulse_users import thresholds, withdrawal
from rabbit.errors import NotOnBroker
from tests.conftest import Amqp
from tests.support.api import Program, Visitor
from tests.support.toolbox import calling_first, url_for, wait_until

# Pulse users


def test_a_pulse_user_is_created_shown_changed_and_deleted(alice, bob, name, management, guarded, settings):
    program = Program(alice)
    created = program.post("pulse-users/", {"username": name, "notification_emails": ["team@example.org"]})
    assert created.status_code == 201, created.text
    assert created["Cache-Control"] == "no-store"
    assert created["Location"] == f"{settings.GUARDIAN_BASE_URL}/api/pulse-users/{name}/"
    assert len(created.json()["password"]) >= 24
    assert created.json()["owners"] == ["alice@example.org"]
    assert management.user(name).name == name

    shown = program.get(f"pulse-users/{name}/").json()
    assert shown["notification_emails"] == ["team@example.org"]
    [address] = shown["notification_addresses"]
    assert (address["email"], address["added_by"], address["confirmed_at"]) == (
        "team@example.org", "alice@example.org", None,
    )  # fmt: skip
    [permissions] = shown["permissions"]
    assert permissions["vhost"] == guarded
    assert permissions["configure"].startswith("^(queue/alice")
    assert permissions["in_words"]
    assert "password" not in shown

    changed = program.patch(f"pulse-users/{name}/", {"owners": ["Bob@example.org", "alice@example.org"]})
    assert (changed.status_code, changed.json()["owners"]) == (200, ["alice@example.org"])
    assert changed.json()["invited"] == ["bob@example.org"]
    assert changed.json()["notification_emails"] == ["team@example.org"]

    own, own_user = {"password": "correct horse battery", "close_connections": True}, {"username": name}
    assert program.post(f"pulse-users/{name}/rotate-password/", own).json() == own_user
    later = program.post(f"pulse-users/{name}/rotate-password/", {"later": True}).json()
    assert len(later.pop("password")) == 32
    assert program.post(f"pulse-users/{name}/rotate-password/", {"prepared": later["prepared"]}).json() == own_user
    both = program.post(f"pulse-users/{name}/rotate-password/", {**own, **later})
    assert (both.status_code, list(both.json())) == (400, ["prepared"])
    forged = program.post(f"pulse-users/{name}/rotate-password/", {"prepared": "forged"})
    assert (forged.status_code, list(forged.json())) == (400, ["prepared"])
    weak = program.post(f"pulse-users/{name}/rotate-password/", {"password": "password"})
    assert (weak.status_code, list(weak.json())) == (400, ["password"])

    management.declare_queue(guarded, f"queue/{name}/q")
    goes = program.get(f"pulse-users/{name}/belongings/").json()
    assert goes == {"queues": [f"queue/{name}/q"], "exchanges": []}
    assert program.delete(f"pulse-users/{name}/").status_code == 204
    assert program.get(f"pulse-users/{name}/").status_code == 404
    with pytest.raises(NotOnBroker):
        management.user(name)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "username"),
        ({"username": "taken"}, "username"),
        ({"username": "a", "password": "12345678"}, "password"),
        ({"username": "a", "owners": []}, "owners"),
        ({"username": "a", "owners": "alice@example.org"}, "owners"),
        ({"username": "a", "owners": ["stranger@example.org"]}, "owners"),
        ({"username": "a", "notification_emails": ["x"]}, "notification_emails"),
    ],
)  # fmt: skip
def test_an_invalid_pulse_user_field_is_refused(alice, guarded, management, body, field):
    PulseUser.objects.create(username="taken", ready=True)
    before = management.users()
    answer = Program(alice).post("pulse-users/", body)
    assert (answer.status_code, list(answer.json())) == (400, [field])
    assert (PulseUser.objects.count(), management.users()) == (1, before)


@pytest.fixture
def shared_pulse_user(alice, bob):
    created = PulseUser.objects.create(username="alice", ready=True)
    created.owners.set([alice, bob])
    return created


def test_an_owner_who_leaves_a_pulse_user_sees_it_one_last_time(alice, shared_pulse_user, away):
    program = Program(alice)
    assert program.get("pulse-users/alice/").json()["permissions"] is None  # the broker is away
    answer = program.patch("pulse-users/alice/", {"owners": ["bob@example.org"]})
    assert (answer.status_code, answer.json()["owners"]) == (200, ["bob@example.org"])
    assert program.get("pulse-users/alice/").status_code == 404


def test_a_change_with_one_invalid_field_changes_nothing(alice, shared_pulse_user, away, settings):
    settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH = 100
    body = {"owners": ["alice@example.org"], "notification_emails": ["t@example.org"], "max_length": 10_000}
    answer = Program(alice).patch("pulse-users/alice/", body)
    assert answer.status_code == 400
    assert (shared_pulse_user.owners.count(), shared_pulse_user.notification_addresses.count()) == (2, 0)


def test_connections_are_listed_and_closed(alice, name, broker, guarded):
    program = Program(alice)
    password = program.post("pulse-users/", {"username": name}).json()["password"]
    opened = Amqp(url_for(broker, name, password), guarded).connection
    wait_until(lambda: program.get(f"pulse-users/{name}/connections/").json())
    answer = program.get(f"pulse-users/{name}/connections/")
    assert answer["X-Result-Count"] == "1"
    assert (answer.json()[0]["vhost"], answer.json()[0]["client_address"]) == (guarded, "127.0.0.1")
    assert program.delete(f"pulse-users/{name}/connections/?name=other").status_code == 404
    opened.process_data_events(time_limit=0.5)
    assert opened.is_open
    closing = f"pulse-users/{name}/connections/?{urlencode({'name': answer.json()[0]['name']})}"
    wait_until(lambda: program.delete(closing).status_code == 204)
    with pytest.raises(AMQPConnectionError):
        wait_until(lambda: opened.process_data_events(time_limit=0.2))


# Owners


def test_an_owner_who_may_vouch_sees_requests_and_vouches_by_address(operator, alice, settings):
    nina = Owner.objects.create_user("nina@example.org", last_login=timezone.now())
    assert Program(nina).post("vouching/ask/", {"reason": "to build things"}).status_code == 204
    again = Program(nina).post("vouching/ask/", {"reason": "please"})
    assert (again.status_code, again["Content-Type"]) == (409, "application/problem+json")
    program = Program(alice)
    assert program.post("owners/vouch/", {"email": "nina@example.org"}).status_code == 403
    settings.GUARDIAN_OWNERS_MAY_VOUCH = True
    assert [row["email"] for row in program.get("owners/").json()] == ["nina@example.org"]
    assert program.get(f"owners/{operator.uuid}/").status_code == 404
    assert program.post(f"owners/{nina.uuid}/withdraw/").status_code == 403
    assert program.post("owners/vouch/", {"email": "NINA@example.org"}).status_code == 204
    me = Program(nina).get("me/").json()
    assert (me["vouched"], me["vouching"]["by"]) == (True, "alice@example.org")


# Tokens


def test_a_token_is_created_used_listed_and_revoked(alice, bob):
    visitor = Visitor(alice)
    created = visitor.post("tokens/", {"name": "the agent", "days": 7, "scope": "all"})
    assert (created.status_code, created["Cache-Control"]) == (201, "no-store")
    token = created.json()
    life = timezone.datetime.fromisoformat(token["expires"]) - timezone.now()
    assert timedelta(days=6, hours=23) < life <= timedelta(days=7)
    mine = Program()
    mine.client.defaults["HTTP_AUTHORIZATION"] = f"Token {token['token']}"
    assert mine.get("me/").json()["email"] == "alice@example.org"
    shown = visitor.get(f"tokens/{token['uuid']}/").json()
    assert (shown["name"], shown["scope"]) == ("the agent", "all")
    assert shown["last_used"]
    assert "token" not in shown
    assert token["token"] not in visitor.get("tokens/").text
    assert Visitor(bob).delete(f"tokens/{token['uuid']}/").status_code == 404
    assert visitor.delete(f"tokens/{uuid.UUID(token['uuid'])}/").status_code == 204
    assert mine.get("me/").status_code == 401


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"), ({"name": "a", "scope": ""}, "scope"),
        ({"name": "a", "days": 0}, "days"), ({"name": "a", "days": ""}, "days"),
    ],
)  # fmt: skip
def test_an_invalid_token_field_is_refused(alice, body, field):
    answer = Visitor(alice).post("tokens/", body)
    assert (answer.status_code, list(answer.json())) == (400, [field])


# Confirmation mails and concurrent changes


def test_concurrent_changes_of_thresholds_are_both_kept(operator, shared_pulse_user, away):
    PulseUser.objects.update(warn_length=100, max_length=1000)
    with calling_first(thresholds, "set_thresholds", lambda: PulseUser.objects.update(warn_length=200)):
        data = Program(operator).patch("pulse-users/alice/", {"max_length": 5000}).json()
    shared_pulse_user.refresh_from_db()
    assert (
        (shared_pulse_user.warn_length, shared_pulse_user.max_length)
        == (data["warn_length"], data["max_length"])
        == (200, 5000)
    )


def test_vouching_by_address_does_not_reveal_who_has_signed_in(alice, bob, operator, settings):
    settings.GUARDIAN_OWNERS_MAY_VOUCH = True
    withdrawal.withdraw(bob, operator)
    new = Owner.objects.create_user("new@example.org", last_login=timezone.now())
    answers = [
        Program(alice).post("owners/vouch/", {"email": email})
        for email in ("new@example.org", "bob@example.org", "nobody@example.org")
    ]
    assert {(answer.status_code, answer.text) for answer in answers} == {(204, "")}
    refused = [
        Program(alice).post("owners/vouch/", {"email": email, "reason": "By rule: x"}).status_code
        for email in ("new@example.org", "nobody@example.org")
    ]
    assert refused == [400, 400]
    new.refresh_from_db()
    bob.refresh_from_db()
    assert (new.vouched, bob.vouched) == (True, False)
    unknown = Program(operator).post("owners/vouch/", {"email": "nobody@example.org"})
    assert (unknown.status_code, list(unknown.json())) == (400, ["email"])
