"""API tokens: creation, storage as a digest, authentication and revocation."""

import re
from datetime import timedelta
from io import StringIO

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.utils import timezone
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.test import APIRequestFactory

from accounts.access.authentication import TokenAuthentication
from accounts.access.scopes import TokenScope
from accounts.access.tokens import create_token, revoke_token
from accounts.models import AuthToken, Owner, PulseUser
from guardian_site import api_urls
from queues.models import Archive, Queue
from tests.support.api import Program


def authenticate(header):
    return TokenAuthentication().authenticate(APIRequestFactory().get("/api/", HTTP_AUTHORIZATION=header))


def refusal(header):
    with pytest.raises(AuthenticationFailed) as error:
        authenticate(header)
    assert error.value.status_code == 401
    return str(error.value.detail)


def test_a_token_authenticates_its_owner_for_a_year(alice):
    token, key = create_token(alice, " nightly clean-up ")
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert token.name == "nightly clean-up"
    assert abs(token.expiry - timezone.now() - timedelta(days=365)) < timedelta(minutes=1)
    assert authenticate(f"Token {key}") == (alice, token)


@pytest.mark.parametrize("word", ["token", "TOKEN", "ToKeN"])
def test_the_keyword_token_is_case_insensitive(alice, word):
    assert authenticate(f"{word} {create_token(alice, 'a')[1]}")[0] == alice


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", ["", "  ", "x" * 101, "two\nlines", "NUL\0", "half \ud800", "a\u202eb", "a\u200bb", "a\u2066b"]),
        ("days", [-1, 0, 3651, 10**12]),
        ("scope", ["everything"]),
        ("pulse_user", ["alices", "nobodys"]),
    ],
)
def test_an_invalid_field_of_a_token_is_refused(alice, field, values):
    PulseUser.objects.create(username="alices").owners.add(alice)  # but a token that registers queues reads none
    for value in values:
        with pytest.raises(ValidationError) as error:
            create_token(alice, **{"name": "a", field: value})
        assert list(error.value.message_dict) == [field]
    assert not AuthToken.objects.exists()


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ((), "agent"),
        (("--scope", "agent"), "agent"),
        (("--scope", "all"), "all"),
        (("--scope", "read", "--pulse-user", "alices"), "read"),
    ],
)
def test_create_token_prints_only_a_token_with_the_scope_and_days_of_its_options(alice, options, scope):
    PulseUser.objects.create(username="alices").owners.add(alice)
    out = StringIO()
    call_command("create_token", "Alice@example.org", "--days", "7", *options, stdout=out)
    assert re.fullmatch(r"[0-9a-f]{64}\n", out.getvalue())
    owner, token = authenticate(f"Token {out.getvalue().strip()}")
    assert (owner, token.scope, str(token.pulse_user)) == (alice, scope, "alices" if len(options) > 2 else "None")
    assert abs(token.expiry - timezone.now() - timedelta(days=7)) < timedelta(minutes=1)


def test_a_token_that_an_older_release_inserts_gets_the_scope_of_agents(alice):
    create_token(alice, "a", scope="all")
    with connection.cursor() as cursor:
        columns = ", ".join(field.column for field in AuthToken._meta.concrete_fields if field.name != "scope")
        renamed = columns.replace("digest", "'d'").replace("uuid", "'8d9c5b7e-f0a1-4c5f-9e0a-4f6b6f7c8d9e'")
        cursor.execute(f"INSERT INTO accounts_authtoken ({columns}) SELECT {renamed} FROM accounts_authtoken")
    assert AuthToken.objects.get(digest="d").scope == "agent"


def test_every_endpoint_checks_the_scope_but_those_without_anything_to_protect():
    unchecked = {
        view.__name__
        for pattern in api_urls.urlpatterns
        if (view := getattr(pattern.callback, "cls", None)) and TokenScope not in view.permission_classes
    }
    assert unchecked == {"SchemaView", "UnknownAddress"}


def test_an_unknown_address_is_404_for_a_token_of_any_scope(alice):
    for scope in AuthToken.Scope.values:
        assert Program(alice, scope).get("marketplace-orders/").status_code == 404


def test_a_refused_request_says_which_scope_it_needs(alice):
    agent = Program(alice, "agent")
    assert agent.send("HEAD", "agent-identities/").status_code == 200  # as a GET
    refused = agent.get("queues/")
    assert refused.status_code == 403
    assert "scope 'agent'" in refused.json()["detail"]
    assert "scope 'all'" in refused.json()["detail"]
    refused = Program(alice, "all").post("tokens/", {"name": "another", "days": 3650})
    assert refused.status_code == 403
    assert "Sign in" in refused.json()["detail"]
    assert AuthToken.objects.count() == 2


@pytest.mark.parametrize("is_operator", [False, True])
def test_a_token_of_one_pulse_user_reads_only_its_rows_and_is_deleted_with_it(alice, is_operator):
    Owner.objects.update(is_staff=is_operator)
    of_name, now = {}, timezone.now()
    for name in ("builds", "tests"):
        of_name[name] = PulseUser.objects.create(username=name)
        of_name[name].owners.add(alice)
        queue = Queue.objects.create(
            vhost="/", name=f"queue/{name}/q", type="classic", durable=True, auto_delete=False, exclusive=False,
            pulse_user=of_name[name], owner=alice, first_seen=now, last_seen=now,
        )  # fmt: skip
        Archive.objects.create(
            queue=queue, vhost="/", queue_name=queue.name, pulse_user=of_name[name], reason="length", state="kept",
            created=now, expires=now + timedelta(days=1),
        )  # fmt: skip
    _, key = create_token(alice, "a dashboard", scope="read", pulse_user="builds")
    client = Client(headers={"Authorization": f"Token {key}"})
    shown = {path: client.get(f"/api/{path}/").json() for path in ("pulse-users", "queues", "archives")}
    assert [row["username"] for row in shown["pulse-users"]] == ["builds"]
    assert [row["name"] for row in shown["queues"]] == ["queue/builds/q"]
    assert [row["queue"] for row in shown["archives"]] == ["queue/builds/q"]
    assert client.get(f"/api/queues/{Queue.objects.get(name='queue/tests/q').uuid}/").status_code == 404
    assert client.get("/api/event-subscriptions/").status_code == 403
    of_name["builds"].delete()
    assert client.get("/api/queues/").status_code == 401


@pytest.mark.parametrize("header", ["", "   ", "Bearer abc", "Basic YTpi"])
def test_a_header_of_another_scheme_is_ignored(alice, header):
    assert authenticate(header) is None


@pytest.mark.parametrize(
    "header",
    [
        "Token",
        "Token \xff\xfe\x80",
        "Token " + "\u0663" * 64,
        "Token " + "0" * 32 + " " + "0" * 32,
        "Token " + "0" * 10_240,
        "Token \0" + "0" * 63,
    ],
)
def test_a_malformed_token_is_refused_without_a_query(alice, header, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert "64 hex digits" in refusal(header)


def test_an_unknown_token_takes_one_query(alice, django_assert_num_queries):
    for number in range(20):
        create_token(alice, f"number {number}")
    with django_assert_num_queries(1):
        assert "Invalid token" in refusal("Token " + "0" * 64)


def test_an_expired_token_is_refused_and_its_row_kept(alice):
    token, key = create_token(alice, "a")
    AuthToken.objects.update(expiry=timezone.now())
    other = create_token(alice, "b")[1]
    assert "expired on" in refusal(f"Token {key}")
    authenticate(f"Token {other}")
    assert AuthToken.objects.filter(pk=token.pk).exists()


def test_a_revoked_token_is_refused_and_other_tokens_work(alice):
    token, key = create_token(alice, "a")
    other = create_token(alice, "b")[1]
    revoke_token(token)
    revoke_token(token)
    assert "Invalid token" in refusal(f"Token {key}")
    assert authenticate(f"Token {other}")[0] == alice


def test_a_token_of_a_deactivated_owner_is_refused(alice):
    _, key = create_token(alice, "a")
    Owner.objects.update(is_active=False)
    assert "is deactivated" in refusal(f"Token {key}")


def test_the_last_use_is_recorded_once_a_minute(alice, django_assert_num_queries):
    _, key = create_token(alice, "a")
    with django_assert_num_queries(2):
        authenticate(f"Token {key}")
    first = AuthToken.objects.get().last_used
    assert first is not None
    with django_assert_num_queries(1):
        authenticate(f"Token {key}")
    AuthToken.objects.update(last_used=first - timedelta(seconds=61))
    with django_assert_num_queries(2):
        authenticate(f"Token {key}")
    assert AuthToken.objects.get().last_used >= first


@pytest.mark.parametrize(
    ("arguments", "error_text"),
    [
        (["nobody@example.org"], "no owner"),
        (["bob@example.org"], "has no access to the broker yet"),
        (["alice@example.org", "--days", "0"], "valid for 1 to 3650 days"),
        (["alice@example.org", "--scope", "read", "--pulse-user", "bobs"], "You have no Pulse user of this name"),
    ],
)
def test_create_token_says_what_is_wrong(alice, arguments, error_text):
    PulseUser.objects.create(username="bobs").owners.add(Owner.objects.create_user("bob@example.org"))
    out = StringIO()
    with pytest.raises(CommandError, match=error_text):
        call_command("create_token", *arguments, stdout=out)
    assert out.getvalue() == ""
    assert not AuthToken.objects.exists()
