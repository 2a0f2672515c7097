"""Browser sessions: readers of the database can neither use nor read them."""

from contextlib import suppress

import pytest
from django.contrib.sessions.backends.base import UpdateError
from django.contrib.sessions.models import Session
from django.core import signing
from django.db import OperationalError
from django.test import Client

from accounts.signing_in.sessions import SessionStore
from tests.support.toolbox import raising

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


def test_the_row_of_a_session_cannot_be_used_to_sign_in(alice):
    client = Client()
    client.force_login(alice)
    key = client.cookies["sessionid"].value
    row = Session.objects.get()
    assert key not in (row.session_key, row.session_data)
    assert not is_signed_in(with_cookie(row.session_key))


def test_session_data_cannot_be_read_without_the_cookie(alice):
    session = SessionStore()
    session["code"] = "BCDF-GHJK"
    session.create()
    row = Session.objects.get()
    assert "BCDF-GHJK" not in row.session_data
    assert SessionStore(row.session_key).decode(row.session_data) == {}
    with suppress(signing.BadSignature):
        assert not signing.loads(row.session_data, salt=session.key_salt, serializer=session.serializer)
    assert SessionStore(session.session_key)["code"] == "BCDF-GHJK"


def test_data_copied_from_another_session_is_ignored(alice):
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


def test_a_changed_secret_key_ends_all_sessions(alice, settings):
    client = Client()
    client.force_login(alice)
    settings.SECRET_KEY = "another"
    assert not is_signed_in(client)


@pytest.mark.parametrize("cookie", ["", "x", "x" * 10_000, "\0" * 40, "é" * 40, "' OR 1=1 --", "0" * 40])
def test_an_invalid_cookie_signs_nobody_in(alice, cookie):
    assert not is_signed_in(with_cookie(cookie))


def test_a_kept_cookie_of_an_ended_session_is_invalid(alice):
    client = Client()
    client.force_login(alice)
    kept = with_cookie(client.cookies["sessionid"].value)
    assert is_signed_in(kept)
    client.get("/signout/")
    assert is_signed_in(kept)
    client.post("/signout/")
    assert not Session.objects.exists()
    assert not is_signed_in(kept)


def test_a_session_that_the_database_cannot_save_is_not_taken_for_a_deleted_one(alice):
    store = SessionStore()
    store.create()
    with raising(Session, "save", OperationalError("the connection was closed")), pytest.raises(OperationalError):
        store.save()
    Session.objects.all().delete()
    with pytest.raises(UpdateError):
        store.save()
