"""Tokens: shown once, kept as a digest, and what a request is answered that shows one."""

import logging
import re
from datetime import timedelta
from io import StringIO

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.utils import timezone
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.test import APIRequestFactory

from accounts.authentication import TokenAuthentication
from accounts.models import AuthToken, Owner
from accounts.tokens import create_token, revoke_token
from accounts.vouching import NotVouched


def asked(header):
    return TokenAuthentication().authenticate(APIRequestFactory().get("/api/", HTTP_AUTHORIZATION=header))


def refused(header):
    """Return the reason of the 401 that is answered."""
    with pytest.raises(AuthenticationFailed) as error:
        asked(header)
    assert error.value.status_code == 401
    return str(error.value.detail)


def test_a_token_speaks_for_its_owner_for_a_year(alice):
    token, key = create_token(alice, " nightly clean-up ")
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert token.name == "nightly clean-up"
    assert abs(token.expiry - timezone.now() - timedelta(days=365)) < timedelta(minutes=1)
    assert asked(f"Token {key}") == (alice, token)


@pytest.mark.parametrize("word", ["token", "TOKEN", "ToKeN"])
def test_the_word_is_known_in_any_case(alice, word):
    assert asked(f"{word} {create_token(alice, 'a')[1]}")[0] == alice


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, "two\nlines", "NUL\0", "half \ud800"])
def test_a_name_that_cant_be_one_is_refused(alice, name):
    with pytest.raises(ValidationError) as error:
        create_token(alice, name)
    assert list(error.value.message_dict) == ["name"]
    assert not AuthToken.objects.exists()


@pytest.mark.parametrize("days", [-1, 0, 3651, 10**12])
def test_a_life_that_cant_be_one_is_refused(alice, days):
    with pytest.raises(ValidationError) as error:
        create_token(alice, "a", days)
    assert list(error.value.message_dict) == ["days"]


def test_who_isnt_vouched_for_gets_none(db):
    with pytest.raises(NotVouched):
        create_token(Owner.objects.create_user("bob@example.org"), "a")


def test_a_token_is_in_no_table_and_no_log(alice, caplog):
    caplog.set_level(logging.DEBUG)
    _, key = create_token(alice, "a")
    asked(f"Token {key}")
    dump = StringIO()
    call_command("dumpdata", stdout=dump)
    assert "alice@example.org" in dump.getvalue()
    for text in (dump.getvalue(), caplog.text):
        assert key not in text


@pytest.mark.parametrize("header", ["", "   ", "Bearer abc", "Basic YTpi"])
def test_a_header_of_another_kind_is_left_to_others(alice, header):
    assert asked(header) is None


@pytest.mark.parametrize(
    "header",
    [
        "Token",
        "Token  ",
        "Token \xff\xfe\x80",
        "Token " + "é" * 64,
        "Token " + "\u0663" * 64,
        "Token a b",
        "Token " + "0" * 32 + " " + "0" * 32,
        "Token " + "0" * 10_240,
        "Token " + "A" * 64,
        "Token \0" + "0" * 63,
    ],
)
def test_what_is_no_token_is_refused_without_a_query(alice, header, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert "64 hex digits" in refused(header)


def test_bytes_that_arent_utf_8_get_a_401_that_says_how_to_sign_in(client, alice):
    from django.test import RequestFactory
    from rest_framework.response import Response
    from rest_framework.views import APIView

    class View(APIView):
        def get(self, request):
            return Response(request.user.email)

    answer = View.as_view()(RequestFactory().get("/", HTTP_AUTHORIZATION="Token \xff\xfe"))
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Token")
    answer = View.as_view()(RequestFactory().get("/", HTTP_AUTHORIZATION=f"Token {create_token(alice, 'a')[1]}"))
    assert (answer.status_code, answer.data) == (200, "alice@example.org")


def test_an_unknown_token_takes_one_query(alice, django_assert_num_queries):
    for number in range(20):
        create_token(alice, f"number {number}")
    with django_assert_num_queries(1):
        assert "Invalid token" in refused("Token " + "0" * 64)


def test_an_expired_token_is_refused_and_its_row_stays(alice):
    token, key = create_token(alice, "a")
    AuthToken.objects.update(expiry=timezone.now())
    other = create_token(alice, "b")[1]
    assert "expired on" in refused(f"Token {key}")
    asked(f"Token {other}")
    assert AuthToken.objects.filter(pk=token.pk).exists()


def test_a_revoked_token_is_refused_and_the_others_stay(alice):
    token, key = create_token(alice, "a")
    other = create_token(alice, "b")[1]
    revoke_token(token)
    revoke_token(token)
    assert "Invalid token" in refused(f"Token {key}")
    assert asked(f"Token {other}")[0] == alice


def test_the_token_of_somebody_who_cant_sign_in_is_refused(alice):
    _, key = create_token(alice, "a")
    Owner.objects.update(is_active=False)
    assert "can't sign in" in refused(f"Token {key}")


def test_the_last_use_is_noted_once_a_minute(alice, django_assert_num_queries):
    _, key = create_token(alice, "a")
    with django_assert_num_queries(2):
        asked(f"Token {key}")
    first = AuthToken.objects.get().last_used
    assert first is not None
    with django_assert_num_queries(1):
        asked(f"Token {key}")
    AuthToken.objects.update(last_used=first - timedelta(seconds=61))
    with django_assert_num_queries(2):
        asked(f"Token {key}")
    assert AuthToken.objects.get().last_used >= first


def test_the_command_prints_the_token_and_nothing_else(alice):
    out = StringIO()
    call_command("create_token", "Alice@example.org", "--days", "7", stdout=out)
    assert re.fullmatch(r"[0-9a-f]{64}\n", out.getvalue())
    owner, token = asked(f"Token {out.getvalue().strip()}")
    assert owner == alice
    assert abs(token.expiry - timezone.now() - timedelta(days=7)) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody@example.org"], "no owner"),
        (["bob@example.org"], "Nobody has vouched"),
        (["alice@example.org", "--days", "0"], "valid for 1 to 3650 days"),
    ],
)
def test_the_command_says_what_is_wrong(alice, arguments, said):
    Owner.objects.create_user("bob@example.org")
    out = StringIO()
    with pytest.raises(CommandError, match=said):
        call_command("create_token", *arguments, stdout=out)
    assert out.getvalue() == ""
    assert not AuthToken.objects.exists()
