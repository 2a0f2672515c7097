"""The pages of access requests, Pulse users and tokens."""

import re
from datetime import timedelta
from urllib.parse import quote

import pytest
import time_machine
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from accounts.access import tokens, vouching
from accounts.models import AuthToken, NotificationAddress, Owner, PulseUser, Vouching
from accounts.pages import pulse_user_owners, pulse_users
from accounts.pulse_users import addresses, creation, passwords, withdrawal
from core import locks
from tests.conftest import Amqp
from tests.support.api import Visitor
from tests.support.toolbox import AWAY, can_log_in, stored_queue, url_for, wait_until

MARKUP = "<script>alert(1)</script>"
RIGHT_TO_LEFT = "a\u202eb"
LONG = "ä" * 127 + "x"  # 255 bytes
HOSTILE = [
    MARKUP,
    "\"'",
    "a\nb",
    RIGHT_TO_LEFT,
    LONG,
    "\x00",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
]


@pytest.fixture
def people(guarded):
    """Return owners by their relation to the Pulse user."""
    return {
        "owner": Owner.objects.create_user("alice@example.org", vouched=True, last_login=timezone.now()),
        "co-owner": Owner.objects.create_user("bob@example.org", vouched=True, last_login=timezone.now()),
        "other": Owner.objects.create_user("carol@example.org", vouched=True, last_login=timezone.now()),
        "not vouched": Owner.objects.create_user("dora@example.org", last_login=timezone.now()),
        "operator": Owner.objects.create_superuser("ops@example.org"),
    }


@pytest.fixture
def visit(people):
    return lambda who: Visitor(people[who]).client


@pytest.fixture
def pulse_user(people, name):
    """Return a Pulse user with two owners."""
    return creation.create_pulse_user(name, [people["owner"], people["co-owner"]])[0]


def secret_in(page, id_="password"):
    return re.search(rf'<code id="{id_}">([^<]+)</code>', page.text)[1]


def error_at(page, field):
    found = re.search(rf'<ul class="errorlist" id="{field}_error">(.*?)</ul>', page.text, re.DOTALL)
    return re.sub(r"<[^>]+>", "", found[1]) if found else ""


# Input


FORMS = [
    ("/pulse-users/", "username", "new-username"),
    ("/pulse-users/", "owners", "new-owners"),
    ("/pulse-users/", "notification_emails", "new-notification_emails"),
    ("/pulse-users/NAME/owners/", "email", "owner-email"),
    ("/pulse-users/NAME/addresses/", "email", "address-email"),
    ("/pulse-users/NAME/thresholds/", "warn_length", "thresholds-warn_length"),
    ("/pulse-users/NAME/thresholds/", "max_length", "thresholds-max_length"),
    ("/pulse-users/NAME/delete/", "typed", "id_typed"),
    ("/owners/", "email", "vouch-email"),
    ("/tokens/", "days", "token-days"),
    ("/tokens/", "scope", "token-scope"),
]


@pytest.mark.parametrize(("path", "field", "at"), FORMS)
def test_an_invalid_value_shows_an_error_at_its_field(pulse_user, visit, name, path, field, at):
    client = visit("operator")
    valid = {"username": f"{name}-new", "owners": "alice@example.org"} if path == "/pulse-users/" else {}
    for value in HOSTILE:
        page = client.post(path.replace("NAME", name), {**valid, field: value})
        assert page.status_code == 200
        assert error_at(page, at)
        assert MARKUP not in page.text
    assert PulseUser.objects.get() == pulse_user
    for model in (NotificationAddress, AuthToken, Vouching):
        assert not model.objects.exists()


@pytest.mark.parametrize(
    ("path", "field", "at"),
    [("/pulse-users/", "password", "new-password"), ("/pulse-users/NAME/password/", "password", "password-password")],
)
def test_an_invalid_password_shows_an_error_and_is_not_echoed(pulse_user, visit, name, path, field, at):
    page = visit("owner").post(path.replace("NAME", name), {"username": f"{name}-new", field: "sh0rt"})
    assert "too short" in error_at(page, at)
    assert "sh0rt" not in page.text
    assert PulseUser.objects.get() == pulse_user


# Listing and creating


def test_all_errors_show_at_once_and_one_field_has_the_focus(people, visit):
    page = visit("owner").post("/pulse-users/", {"username": "1", "owners": "nobody@example.org"})
    assert error_at(page, "new-username")
    assert error_at(page, "new-owners")
    assert page.text.count("autofocus") == 1


def test_a_new_pulse_user_shows_its_password_once_and_can_log_in(people, visit, name, broker, guarded):
    client = visit("owner")
    created = client.post(
        "/pulse-users/", {"username": name, "owners": "bob@example.org", "notification_emails": "a@b.org"}
    )
    assert (created.status_code, created["Cache-Control"]) == (201, "no-store")
    password = secret_in(created)
    assert created.text.count(password) == 1
    assert 'data-copy="password"' in created.text
    for fact in (guarded, f"queue/{name}/", f"exchange/{name}/"):
        assert fact in created.text
    assert can_log_in(broker, guarded, name, password)
    pulse_user = PulseUser.objects.get(username=name)
    assert [owner.email for owner in pulse_user.owners.all()] == ["alice@example.org"]
    assert [invitation.invitee.email for invitation in pulse_user.invitations.open()] == ["bob@example.org"]
    assert [address.email for address in pulse_user.notification_addresses.all()] == ["a@b.org"]
    for path in ("/pulse-users/", f"/pulse-users/{name}/", f"/pulse-users/{name}/delete/"):
        assert password not in client.get(path).text


def test_the_list_shows_owners_and_states_of_pulse_users(people, visit):
    now = timezone.now()
    for username, fields in (
        ("in-use", {"ready": True}),
        ("half", {}),
        ("going", {"ready": True, "removing_since": now}),
    ):
        PulseUser.objects.create(username=username, **fields).owners.set([people["owner"], people["co-owner"]])
    for number, state in enumerate(("ok", "warned", "gone")):
        stored_queue(f"queue/in-use/{number}", state=state, pulse_user=PulseUser.objects.get(username="in-use"))
    page = visit("owner").get("/pulse-users/").text
    row = page[page.index("/pulse-users/in-use/") :]
    assert re.search(r'pulse_user=in-use">2</a>', row)
    for what in ("alice@example.org", "bob@example.org", "ready", "incomplete", "being deleted"):
        assert what in page
    assert "in-use" not in visit("other").get("/pulse-users/").text


def test_operators_search_pulse_users_by_name_and_owner(people, visit):
    PulseUser.objects.create(username="one", ready=True).owners.add(people["owner"])
    PulseUser.objects.create(username="two", ready=True).owners.add(people["owner"], people["other"])
    client = visit("operator")
    for search, found in (
        ("tw", {"two"}),
        ("CAROL@", {"two"}),
        ("alice", {"one", "two"}),
        (MARKUP, set()),
        ("\x00", {"one", "two"}),
    ):
        page = client.get("/pulse-users/", {"search": search})
        assert {name for name in ("one", "two") if f'href="/pulse-users/{name}/"' in page.text} == found
        assert MARKUP not in page.text


# Adopting


def test_an_operator_adopts_a_pulse_user_of_the_broker(people, visit, name, management, broker, guarded):
    management.put_user(name, "by-hand")
    assert "Adopt a RabbitMQ user" not in visit("owner").get("/pulse-users/?adopt=1").text
    client = visit("operator")
    assert "Adopt a RabbitMQ user that was created manually" in client.get("/pulse-users/").text
    assert f'<option value="{name}">' in client.get("/pulse-users/?adopt=1").text
    answer = client.post("/pulse-users/", {"adopt": "1", "username": name, "owners": "alice@example.org"})
    assert answer["Location"] == f"/pulse-users/{name}/"
    assert visit("owner").get(f"/pulse-users/{name}/").status_code == 200
    gone = client.post("/pulse-users/", {"adopt": "1", "username": name, "owners": "alice@example.org"})
    assert "be adopted any more. Choose another." in error_at(gone, "adopt-username")


# One Pulse user


def test_a_pulse_users_page_shows_its_permissions_owners_and_consumers(pulse_user, visit, name, broker, guarded):
    password = passwords.rotate_password(pulse_user)
    live = Amqp(url_for(broker, name, password), guarded)
    live.channel.queue_declare(f"queue/{name}/builds")
    live.channel.basic_consume(f"queue/{name}/builds", lambda *_: None, consumer_tag="builder-7")
    client = visit("owner")
    wait_until(lambda: "builder-7" in client.get(f"/pulse-users/{name}/").text, seconds=10)
    page = client.get(f"/pulse-users/{name}/").text
    for what in (
        f"queues whose names start with queue/{name}/", "alice@example.org (you)", "bob@example.org", "the default",
        f"/queues/?pulse_user={name}", f"/pulse-users/{name}/delete/", f"queue/{name}/builds</bdi>",
        '1 open connection:</strong> 1 from <bdi class="name">127.0.0.1</bdi>',
    ):  # fmt: skip
        assert what in page
    assert re.search(r'<th scope="row"><span class="name">127\.0\.0\.1:\d+ -&gt; ', page)
    assert 'data-label="Connected">unknown' not in page
    live.connection.close()


def test_without_the_broker_a_pulse_users_page_says_so(pulse_user, visit, name, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    page = visit("owner").get(f"/pulse-users/{name}/")
    assert page.status_code == 200
    assert "RabbitMQ does not answer" in page.text
    assert "The broker did not answer." in page.text
    assert "bob@example.org" in page.text
    assert "127.0.0.1:1" not in page.text
    assert "127.0.0.1:1" in visit("operator").get(f"/pulse-users/{name}/").text


def test_a_pulse_user_being_deleted_offers_no_actions(pulse_user, visit, name):
    PulseUser.objects.update(removing_since=timezone.now())
    client = visit("owner")
    page = client.get(f"/pulse-users/{name}/").text
    assert "Guardian has been deleting this Pulse user" in page
    assert page.count("<form") == 1  # to sign out
    assert client.get(f"/pulse-users/{name}/delete/")["Location"] == f"/pulse-users/{name}/"


# Owners of a Pulse user


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("owners", {"email": "carol@example.org"}),
        ("delete", None),
    ],
)
def test_an_action_on_a_pulse_user_deleted_meanwhile_shows_a_message(
    pulse_user, visit, name, monkeypatch, action, fields
):
    """The Pulse user is deleted between the access check and the action."""
    real = pulse_users.get_object_or_404

    def find_and_delete(*arguments, **options):
        found = real(*arguments, **options)
        PulseUser.objects.all().delete()
        return found

    for module in (pulse_users, pulse_user_owners):
        monkeypatch.setattr(module, "get_object_or_404", find_and_delete)
    answer = visit("operator").post(
        f"/pulse-users/{name}/{action}/", {"typed": name} if fields is None else fields, follow=True
    )
    assert answer.status_code == 200
    assert re.search("no longer exists|is being removed|was deleted", answer.text)


# Further addresses


def test_an_address_of_this_pulse_user_is_added_and_removed(pulse_user, people, visit, name):
    path = f"/pulse-users/{name}/addresses/"
    client = visit("owner")
    other = PulseUser.objects.create(username="theirs", ready=True)
    theirs = addresses.add_address(other, "team@example.org", people["other"])
    page = client.post(path, {"email": "team@example.org"}, follow=True)
    assert "We sent team@example.org a mail" in page.text
    assert "not confirmed yet" in page.text
    address = pulse_user.notification_addresses.get()
    page = client.post(path, {"again": str(address.uuid)}, follow=True)
    assert "less than an hour ago" in page.text
    page = client.post(path, {"remove": str(address.uuid)}, follow=True)
    assert f"team@example.org gets no more notifications about {name}." in page.text
    for what in ("remove", "again"):
        for missing in (address, theirs):
            page = client.post(path, {what: str(missing.uuid)}, follow=True)
            assert "This address no longer exists." in page.text
    assert NotificationAddress.objects.get() == theirs


def test_an_address_is_confirmed_by_a_post_without_sign_in_and_not_by_a_get(pulse_user, people, name):
    address = addresses.add_address(pulse_user, "team@example.org", people["owner"])
    path = reverse("confirm_address", args=[addresses.confirmation_token(address)])
    nobody = Client()
    page = nobody.get(path)
    for what in ("team@example.org", name, "alice@example.org"):
        assert what in page.text
    address.refresh_from_db()
    assert address.confirmed_at is None
    for _ in range(2):
        assert "The address is confirmed" in nobody.post(path).text
    address.refresh_from_db()
    assert address.confirmed_at is not None
    assert "The address is confirmed" in nobody.get(path).text


def test_an_expired_or_invalid_confirmation_link_says_what_to_do(pulse_user, people, visit):
    address = addresses.add_address(pulse_user, "team@example.org", people["owner"])
    path = reverse("confirm_address", args=[addresses.confirmation_token(address)])
    with time_machine.travel(timezone.now() + timedelta(days=8)):
        for answer in (Client().get(path), Client().post(path)):
            assert answer.status_code == 410
            assert "Send again" in answer.text
    addresses.remove_address(address)
    for bad in (path, path[:-3] + "/", "/addresses/%00/", f"/addresses/{quote(MARKUP.replace('/', ''))}/"):
        for answer in (Client().get(bad), Client().post(bad)):
            assert answer.status_code == 404
            assert "ask an owner" in answer.text


# Thresholds


def test_operators_set_thresholds_and_owners_see_their_maximum(pulse_user, visit, name, settings):
    path = f"/pulse-users/{name}/thresholds/"
    assert 'name="max_length"' not in visit("owner").get(f"/pulse-users/{name}/").text
    assert visit("operator").post(path, {"warn_length": "3", "max_length": "9"}).status_code == 302
    pulse_user.refresh_from_db()
    assert (pulse_user.warn_length, pulse_user.max_length) == (3, 9)
    settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH = 20
    client = visit("owner")
    assert "You can set up to 20 messages" in client.get(f"/pulse-users/{name}/").text
    assert "deletion limit of at most" in error_at(client.post(path, {"max_length": "21"}), "thresholds-max_length")


# The password


def test_a_generated_password_is_shown_once_and_a_chosen_one_is_not(
    pulse_user, visit, name, management, broker, guarded
):
    before = management.permissions_of(name)
    client = visit("co-owner")
    page = client.post(f"/pulse-users/{name}/password/")
    assert (page.status_code, page["Cache-Control"]) == (200, "no-store")
    password = secret_in(page)
    assert "Open connections stay open" in page.text
    assert can_log_in(broker, guarded, name, password)
    assert management.permissions_of(name) == before
    assert password not in client.get(f"/pulse-users/{name}/").text
    page = client.post(
        f"/pulse-users/{name}/password/", {"password": "correct horse battery", "close_connections": "on"}
    )
    assert "battery" not in page.text
    assert "Its open connections were closed" in page.text


def test_a_new_password_is_shown_before_and_set_when_its_owner_says_so(pulse_user, visit, name, broker, guarded):
    client, path = visit("co-owner"), f"/pulse-users/{name}/password/"
    now = secret_in(client.post(path))
    page = client.post(path, {"later": "1"})
    later, prepared = secret_in(page), re.search(r'name="prepared" value="([^"]+)"', page.text)[1]
    assert (page["Cache-Control"], later in prepared) == ("no-store", False)
    assert (can_log_in(broker, guarded, name, now), can_log_in(broker, guarded, name, later)) == (True, False)
    assert "is not valid any more" in visit("operator").post(path, {"prepared": prepared}).text
    page = client.post(path, {"prepared": prepared})
    assert "It has the password that you were shown" in page.text
    assert later not in page.text
    assert (can_log_in(broker, guarded, name, now), can_log_in(broker, guarded, name, later)) == (False, True)


def test_where_passwords_are_generated_the_form_says_why_none_was_set(pulse_user, visit, name, settings):
    settings.GUARDIAN_REQUIRE_GENERATED_PASSWORDS = True
    with locks.lock(name):
        assert "Another request is changing" in visit("owner").post(f"/pulse-users/{name}/password/").text


# Deleting


def test_the_deletion_page_lists_queues_and_asks_for_the_name(pulse_user, visit, name, management, guarded):
    for number in range(12):
        management.declare_queue(guarded, f"queue/{name}/{number}")
    management.declare_exchange(guarded, f"exchange/{name}/{MARKUP}\u202e")
    page = visit("owner").get(f"/pulse-users/{name}/delete/")
    for what in ("<summary>12 queues</summary>", f"queue/{name}/11", "1 exchange", "bob@example.org"):
        assert what in page.text
    assert MARKUP not in page.text
    assert "\u202e" not in page.text
    assert "\\u202e" in page.text


# Access requests


def test_an_owner_without_access_sees_the_rules_and_requests_access(people, visit, settings):
    settings.GUARDIAN_VOUCHED_DOMAINS = ["mozilla.example"]
    settings.OIDC_ISSUER, settings.OIDC_VOUCHED_GROUPS = "https://login.example.org", ["builders"]
    client = visit("not vouched")
    page = client.get("/vouching/").text
    for what in ("mozilla.example", "builders", "An operator", "What do you need RabbitMQ for?"):
        assert what in page
    page = client.post("/vouching/", {"reason": MARKUP}, follow=True)
    assert "You get a mail when it is approved" in page.text
    assert "You requested access <time" in page.text
    assert MARKUP not in page.text
    again = client.post("/vouching/", {"reason": "Please."})
    assert "Request again tomorrow" in error_at(again, "request-reason")


def test_an_owner_sees_who_approved_or_withdrew_their_access(people, visit):
    vouching.vouch(people["not vouched"], people["operator"], "Works with alice.")
    page = visit("not vouched").get("/vouching/").text
    for what in ("You have had access since", "ops@example.org", "Works with alice."):
        assert what in page
    assert "You have access." in visit("owner").get("/vouching/").text
    withdrawal.withdraw(people["not vouched"], people["operator"], reason="Left the team.")
    page = visit("not vouched").get("/vouching/").text
    assert "was withdrawn <time" in page
    assert "Left the team." in page


def test_an_operator_sees_requests_first_and_approves_one(people, visit):
    vouching.request_vouching(people["not vouched"], MARKUP)
    client = visit("operator")
    page = client.get("/owners/").text
    assert MARKUP not in page
    assert page.index("dora@example.org") < page.index("alice@example.org")
    page = client.post("/owners/", {"email": "dora@example.org"}, follow=True)
    assert "dora@example.org has access to RabbitMQ now." in page.text
    assert "No open requests for access." in page.text
    record = people["not vouched"].vouchings.get()
    assert (record.vouched, record.by) == (True, people["operator"])


def test_an_operator_declines_a_request_with_a_reason_that_its_owner_reads(people, visit):
    newcomer = people["not vouched"]
    vouching.request_vouching(newcomer, "I build things.")
    client, path = visit("operator"), f"/owners/{newcomer.uuid}/"
    assert f'href="{path}#decline"' in client.get("/owners/").text
    assert "Decline the request" in client.get(path).text
    page = client.post(path, {"reason": "Ask your team first."}, follow=True)
    assert "The request of dora@example.org is declined." in page.text
    assert "No open requests for access." in client.get("/owners/").text
    page = visit("not vouched").get("/vouching/").text
    assert "Your request was declined <time" in page
    assert "Ask your team first." in page


def test_an_address_that_never_signed_in_is_neither_listed_nor_approved(people, visit):
    Client().post("/signin/", {"email": "typed@example.org"})
    assert Owner.objects.filter(email="typed@example.org").exists()
    client = visit("operator")
    page = client.get("/owners/").text
    assert "dora@example.org" in page
    assert "typed@example.org" not in page
    page = client.post("/owners/", {"email": "typed@example.org"})
    assert (page.status_code, "Nobody has signed in with this address yet" in page.text) == (200, True)
    Owner.objects.filter(email="typed@example.org").update(vouched=True)
    assert "typed@example.org" in client.get("/owners/").text


def test_owners_who_may_vouch_see_only_requests(people, visit, settings):
    settings.GUARDIAN_OWNERS_MAY_VOUCH = True
    vouching.request_vouching(people["not vouched"], "For the builds.")
    client = visit("owner")
    page = client.get("/owners/?search=carol").text
    assert "dora@example.org" in page
    assert "carol@example.org" not in page
    assert "All owners" not in page
    assert client.post("/owners/", {"email": "dora@example.org"}).status_code == 302
    people["not vouched"].refresh_from_db()
    assert people["not vouched"].vouched
    assert client.post(f"/owners/{people['not vouched'].uuid}/", {}).status_code == 403


@pytest.mark.parametrize("remove", [False, True])
def test_a_withdrawal_lists_its_effects_and_removes_what_was_chosen(
    pulse_user, people, visit, name, management, remove
):
    tokens.create_token(people["owner"], "builds")
    creation.create_pulse_user(f"{name}-alone", [people["owner"]])
    path = f"/owners/{people['owner'].uuid}/"
    client = visit("operator")
    page = client.get(path).text
    for what in ("1 token", "1 Pulse user without other owners", "1 shared Pulse user stays"):
        assert what in " ".join(page.split())
    page = client.post(path, {"reason": "Left the team.", **({"remove": "on"} if remove else {})}, follow=True)
    assert "create anything on RabbitMQ any more" in page.text
    assert "Left the team." in page.text
    people["owner"].refresh_from_db()
    assert not people["owner"].vouched
    assert AuthToken.objects.filter(user=people["owner"]).exists() is not remove
    assert PulseUser.objects.filter(username=f"{name}-alone").exists() is not remove
    assert PulseUser.objects.filter(username=name).exists()
    assert visit("owner").post("/tokens/", {"name": "x", "days": "1"}).status_code == 403


# Tokens


def test_a_token_is_shown_once_and_listed_beside_the_owners_expired_ones(people, visit, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    client = visit("owner")
    assert "Create your first token" in client.get("/tokens/").text
    created = client.post("/tokens/", {"name": "nightly clean-up", "days": "30", "scope": "all"})
    assert (created.status_code, created["Cache-Control"]) == (201, "no-store")
    key = secret_in(created, "token")
    assert created.text.count(key) == 1
    assert 'data-copy="token"' in created.text
    assert "https://guardian.example.org/api/queues/" in created.text
    expired = tokens.create_token(people["owner"], "old")[0]
    AuthToken.objects.filter(pk=expired.pk).update(expiry=timezone.now() - timedelta(days=1))
    tokens.create_token(people["other"], "carols")
    page = client.get("/tokens/").text
    assert ">expired<" in page
    assert "carols" not in page
    assert key not in page
    assert "nightly clean-up" in page
    assert "never" in page
    token = AuthToken.objects.get(name="nightly clean-up")
    assert token.scope == "all"
    assert "do everything" in page
    assert abs(token.expiry - timezone.now() - timedelta(days=30)) < timedelta(minutes=1)


def test_a_token_is_an_agents_unless_the_form_says_otherwise(people, visit):
    created = visit("owner").post("/tokens/", {"name": "cellar", "days": "30", "scope": ""})
    assert created.status_code == 201
    assert AuthToken.objects.get().scope == "agent"
    assert "/api/agent-identities/" in created.text
    assert "register queues" in visit("owner").get("/tokens/").text


def test_a_token_is_revoked_once_after_a_confirmation(people, visit):
    token = tokens.create_token(people["owner"], MARKUP)[0]
    path = f"/tokens/{token.uuid}/revoke/"
    client = visit("owner")
    page = client.get(path)
    assert "&lt;script&gt;" in page.text
    assert AuthToken.objects.exists()
    assert visit("other").post(path).status_code == 404
    page = client.post(path, follow=True)
    assert "The token is revoked." in page.text
    assert not AuthToken.objects.exists()
    assert client.post(path).status_code == 404
