"""The front page, the health checks and the admin."""

import socket
import time
from io import BytesIO

import pytest

from accounts.models import Owner
from queues.rules.states import Level
from tests.support.api import answer_to


def test_static_files_are_served_without_collectstatic(client):
    sheet = client.get("/static/guardian.css")
    assert sheet.status_code == 200
    assert sheet["Content-Type"].startswith("text/css")


@pytest.mark.parametrize("host", ["10.42.0.17", "10.42.0.17:8000", "web", "no such host", ""])
@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_are_answered_on_any_host_and_nothing_is_logged(guarded, client, caplog, path, host):
    answer = client.get(path, headers={"Host": host})
    assert (answer.status_code, caplog.text) == (200, "")


def test_probes_are_answered_over_plain_http(client, settings):
    settings.SECURE_SSL_REDIRECT = True
    assert client.get("/healthz", headers={"Host": "10.42.0.17"}).status_code == 200
    assert client.get("/signin/").status_code == 301


@pytest.mark.parametrize(
    "parameter",
    ["charset=rot13", "charset=idna", "charset=undefined", "charset=utf-16", "charset*=no'en'x", "a*=x; a*0=y"],
)
def test_requests_are_read_as_utf_8_regardless_of_their_charset(parameter):
    kind = f"multipart/form-data; boundary=x; {parameter}"
    answer = answer_to(PATH_INFO="/healthz", QUERY_STRING="a=%ff%ed", CONTENT_TYPE=kind)
    assert answer.content == b'{"status": "ok"}'


@pytest.mark.django_db
def test_headers_with_unreadable_parameters_are_ignored_or_refused(client):
    assert client.get("/api/version/", headers={"Accept": "application/json; a*=x; a*0=y"}).status_code == 401
    form = b'--x\r\nContent-Disposition: form-data; name="email"; a*=x; a*0=y\r\n\r\n1\r\n--x--\r\n'
    answer = answer_to(
        REQUEST_METHOD="POST",
        PATH_INFO="/signin/",
        CONTENT_TYPE="multipart/form-data; boundary=x",
        CONTENT_LENGTH=str(len(form)),
        HTTP_COOKIE=f"csrftoken={'a' * 32}",
        **{"wsgi.input": BytesIO(form)},
    )
    assert answer.status_code == 400


def test_readyz_is_200_when_the_first_node_hangs_or_refuses_the_login(guarded, client, settings):
    good = settings.RABBIT_URL
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        settings.RABBIT_URL = f"amqp://guest:guest@127.0.0.1:{hanging.getsockname()[1]},{good}"
        began = time.monotonic()
        assert client.get("/readyz").json()["broker"]
        assert time.monotonic() - began < 2
    settings.RABBIT_URL = f"amqp://nobody:wrong@{good.rpartition('@')[2]},{good}"
    assert client.get("/readyz").json()["broker"]


@pytest.mark.django_db
def test_owners_addresses_are_unique_regardless_of_case():
    from django.core.exceptions import ValidationError
    from django.db import IntegrityError

    Owner.objects.create_user("alice@example.org")
    with pytest.raises(ValidationError):
        Owner.objects.create_user("Alice@Example.org")
    with pytest.raises(IntegrityError):
        Owner.objects.bulk_create([Owner(email="Bob@Example.org")])


def test_the_style_guide_shows_every_state_and_only_in_development(settings, client):
    assert client.get("/styleguide/").status_code == 404
    settings.DEBUG = True
    page = client.get("/styleguide/").text
    for level in Level:
        assert f'<span class="state {level}">' in page
