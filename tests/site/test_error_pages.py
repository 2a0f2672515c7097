"""Error pages and answers: no stack trace, and the next step."""

import pytest
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from accounts.models import Owner
from guardian_site import urls
from guardian_site.errors import server_error
from rabbit.errors import BrokerUnavailable

pytestmark = pytest.mark.django_db


def needs_the_broker(request):
    raise BrokerUnavailable("GET /api/queues: can't connect to http://10.0.0.1:15672")


def not_allowed(request):
    raise PermissionDenied("Only operators change this. Ask ops@example.org.")


def broken(request):
    raise RuntimeError("a secret of the inside")


def needs_the_database(request):
    raise OperationalError("connection to server at 10.0.0.2, port 5432 failed: FATAL: too many clients already")


urlpatterns = [
    path("away/", needs_the_broker),
    path("database/", needs_the_database),
    path("api/database/", needs_the_database),
    path("v1/database", needs_the_database),
    path("not-allowed/", not_allowed),
    path("broken/", broken),
    path("api/broken/", broken),
    *urls.urlpatterns,
]
handler400 = urls.handler400
handler500 = urls.handler500


@pytest.fixture
def visitor():
    with override_settings(ROOT_URLCONF="tests.site.test_error_pages"):
        yield Client(raise_request_exception=False)


def test_an_unknown_page_is_404_with_a_link_to_the_front_page(visitor):
    page = visitor.get("/no/such/page/")
    assert page.status_code == 404
    assert "Go to the front page" in page.text


def test_without_the_broker_a_page_answers_503_without_the_brokers_address(visitor):
    page = visitor.get("/away/")
    assert (page.status_code, page["Retry-After"]) == (503, "30")
    assert "RabbitMQ does not answer" in page.text
    assert "10.0.0.1" not in page.text


@pytest.mark.parametrize("address", ["/database/", "/api/database/", "/v1/database/"])
def test_without_the_database_an_answer_is_503_without_its_address(visitor, address):
    answer = visitor.get(address)
    assert (answer.status_code, answer["Retry-After"]) == (503, "30")
    assert "database" in answer.text
    assert "10.0.0.2" not in answer.text
    if address.startswith("/api/"):
        assert answer.json()["status"] == 503


def test_a_forbidden_page_says_why(visitor):
    page = visitor.get("/not-allowed/")
    assert page.status_code == 403
    assert "Ask ops@example.org" in page.text


@pytest.mark.parametrize("address", ["/broken/", "/api/broken/"])
def test_an_internal_error_shows_the_request_id_and_no_details(visitor, settings, address):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 1
    answer = visitor.get(address, headers={"X-Request-ID": "say-this"})
    assert (answer.status_code, answer["X-Request-ID"]) == (500, "say-this")
    assert "say-this" in answer.text
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    if address.startswith("/api/"):
        assert set(answer.json()) == {"type", "title", "status", "detail", "instance"}
        assert answer.json()["instance"] == address


@pytest.mark.parametrize("https", [True, False])
@pytest.mark.parametrize(("address", "kind"), [("/", "text/html"), ("/api/me/", "application/problem+json")])
def test_an_answer_and_a_line_in_the_log_name_the_configured_address(visitor, settings, caplog, address, kind, https):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    settings.SECURE_SSL_REDIRECT = https
    answer = visitor.get(address, headers={"host": "10.42.0.17:8000"})
    assert (answer.status_code, answer["Content-Type"].partition(";")[0]) == (400, kind)
    assert "address is" in answer.text
    assert "https://guardian.example.org" in answer.text
    [line] = [record for record in caplog.records if record.levelname != "INFO"]
    assert "'10.42.0.17:8000'" in line.getMessage()
    assert "https://guardian.example.org" in line.getMessage()
    assert line.exc_info is None
    assert visitor.get("/healthz", headers={"host": "10.42.0.17:8000"}).status_code == 200


def test_a_form_without_its_csrf_token_is_refused_with_the_next_step(visitor):
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(Owner.objects.create_user("alice@example.org"))
    page = strict.post("/signout/")
    assert page.status_code == 403
    assert "reload the page" in page.text


def test_the_500_page_needs_no_session():
    assert server_error(RequestFactory().get("/")).status_code == 500


def test_pages_of_a_signed_in_owner_are_not_cached():
    visitor = Client()
    assert "no-store" not in visitor.get("/").headers.get("Cache-Control", "")
    visitor.force_login(Owner.objects.create_user("alice@example.org"))
    for page in ("/", "/queues/", "/settings/"):
        assert visitor.get(page)["Cache-Control"] == "private, no-store"
