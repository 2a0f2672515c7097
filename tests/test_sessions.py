"""Sessions of browsers: whoever reads the database can't use or read them."""

from contextlib import suppress

import pytest
from django.contrib.sessions.models import Session
from django.core import signing
from django.test import Client

from accounts.sessions import SessionStore

pytestmark = pytest.mark.django_db


def is_signed_in(client):
    return client.get("/queues/").status_code == 200


def with_cookie(value):
    client = Client()
    client.cookies["sessionid"] = value
    return client


def test_a_session_lasts_from_one_request_to_the_next(alice):
    client = Client()
    client.force_login(alice)
    assert is_signed_in(client)
    assert is_signed_in(with_cookie(client.cookies["sessionid"].value))


def test_nothing_in_its_row_signs_anybody_in(alice):
    client = Client()
    client.force_login(alice)
    key = client.cookies["sessionid"].value
    row = Session.objects.get()
    assert key not in (row.session_key, row.session_data)
    assert not is_signed_in(with_cookie(row.session_key))


def test_what_is_in_it_cannot_be_read_without_its_cookie(alice):
    session = SessionStore()
    session["code"] = "BCDF-GHJK"
    session.create()
    row = Session.objects.get()
    assert "BCDF-GHJK" not in row.session_data
    assert SessionStore(row.session_key).decode(row.session_data) == {}
    with suppress(signing.BadSignature):
        assert not signing.loads(row.session_data, salt=session.key_salt, serializer=session.serializer)
    assert SessionStore(session.session_key)["code"] == "BCDF-GHJK"


def test_a_row_that_was_written_for_another_session_is_empty(alice):
    one, other = SessionStore(), SessionStore()
    one["whose"] = "one's"
    for session in (one, other):
        session.create()
    of_one, of_other = (
        Session.objects.get(pk=session.create_model_instance({}).session_key) for session in (one, other)
    )
    of_other.session_data = of_one.session_data
    of_other.save()
    assert "whose" not in SessionStore(other.session_key)


def test_with_another_secret_key_everybody_is_signed_out(alice, settings):
    client = Client()
    client.force_login(alice)
    settings.SECRET_KEY = "another"
    assert not is_signed_in(client)


@pytest.mark.parametrize("cookie", ["", "x", "x" * 10_000, "\0" * 40, "é" * 40, "' OR 1=1 --", "0" * 40])
def test_a_cookie_that_is_none_of_ours_signs_nobody_in(alice, cookie):
    assert not is_signed_in(with_cookie(cookie))


def test_a_session_that_ended_is_over_for_whoever_kept_its_cookie(alice):
    client = Client()
    client.force_login(alice)
    kept = with_cookie(client.cookies["sessionid"].value)
    assert is_signed_in(kept)
    client.post("/signout/")
    assert not Session.objects.exists()
    assert not is_signed_in(kept)
