"""What the middleware refuses before any view, and the headers of every answer."""

import re
import tempfile
import threading
import time

import httpx
import pytest
from django.test import Client
from django.utils import timezone

from accounts.signing_in.links import create_link
from queues.models import QueueEvent
from tests.site.test_api_schema import OPERATIONS, SCHEMA
from tests.support.api import Program
from tests.support.served import send_raw
from tests.support.toolbox import stored_queue

FORM = "application/x-www-form-urlencoded"


# Bodies


def post_10_gb(client, path, **headers):
    """Announce a body of 10 GB and send one byte, so that reading the body would fail."""
    return client.generic("POST", path, b"x", FORM, CONTENT_LENGTH=str(10_000_000_000), headers=headers)


@pytest.mark.parametrize("path", ["/signin/", "/signout/", "/addresses/x/", "/admin/accounts/owner/", "/no/such/"])
def test_a_page_refuses_a_large_body_unread(db, path):
    page = post_10_gb(Client(), path)
    assert (page.status_code, page["Content-Type"].partition(";")[0]) == (413, "text/html")
    assert "The body is too large. Nothing was changed." in page.text


@pytest.mark.parametrize("path", ["me/", "tokens/", "offerings/x/events/", "no/such/"])
def test_the_api_refuses_a_large_body_unread(alice, path):
    answer = post_10_gb(Program(alice).client, f"/api/{path}")
    assert (answer.status_code, answer["Content-Type"]) == (413, "application/problem+json")
    assert answer.json()["detail"] == "The body is too large."


def test_an_unexpected_file_upload_is_not_written_to_disk(client, db, monkeypatch):
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda *_, **__: pytest.fail("A file is written."))
    monkeypatch.setattr(tempfile, "mkstemp", lambda *_, **__: pytest.fail("A file is written."))
    part = (
        b'--x\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n' + b"y" * 3_000_000 + b"\r\n--x--\r\n"
    )
    answer = client.generic("POST", "/signin/", part, "multipart/form-data; boundary=x")
    assert answer.status_code == 413


def test_an_invalid_content_length_counts_as_no_body(client, db):
    for length in ("-1", "x", "1.5", ""):
        assert client.generic("POST", "/signin/", b"", FORM, CONTENT_LENGTH=length).status_code in (200, 403)


@pytest.mark.slow
def test_bodies_that_never_end_block_no_other_request(served):
    head = f"POST /signin/ HTTP/1.1\nHost: 127.0.0.1\nContent-Type: {FORM}"
    assert send_raw(served, f"{head}\nContent-Length: 10000000000")[0] == 413
    began, answers = time.monotonic(), []
    slow = [
        threading.Thread(target=lambda: answers.append(send_raw(served, f"{head}\nContent-Length: 100", b"email=")[0]))
        for _ in range(6)  # more requests than threads
    ]
    for thread in slow:
        thread.start()
    for thread in slow:
        thread.join(60)
    assert answers == [408] * 6
    assert time.monotonic() - began < 60
    assert httpx.get(f"http://127.0.0.1:{served}/signin/", trust_env=False, timeout=30).status_code == 200


def test_a_truncated_body_is_400(served):
    head = f"POST /signin/ HTTP/1.1\nHost: 127.0.0.1\nContent-Type: {FORM}\nContent-Length: 100"
    assert send_raw(served, head, b"email=alice@example.org", None)[0] == 400


# Headers


ANSWERS = {
    "/": 200, "/signin/": 200, "/queues/": 302, "/no/such/page/": 404, "/static/guardian.css": 200,
    "/static/no-such.css": 404, "/admin/": 302, "/api/me/": 401, "/api/schema/": 200, "/api/docs/": 200,
    "/help/": 200, "/help/owners/": 200, "/static/help/queue.png": 200,
    "/api/no/such/": 401, "/v1/shop": 404, "/v1/no/such/address/at/all": 404, "/healthz": 200, "/metrics": 401,
    "/signin/link/no-such-token/": 410, "/addresses/no-such-token/": 404,
}  # fmt: skip


@pytest.mark.parametrize(("path", "status"), ANSWERS.items())
def test_every_answer_has_the_security_headers(client, db, path, status):
    answer = client.get(path, headers={"Origin": "https://evil.example"})
    headers = {name.lower(): value for name, value in answer.headers.items()}
    assert answer.status_code == status
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert not [name for name in headers if name.startswith("access-control-")]
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert not re.search("unsafe|data:|https?:|\\*", " ".join(policy.values()))


def test_a_refusal_of_the_middleware_has_the_security_headers(client, db):
    answer = post_10_gb(client, "/signin/")
    assert answer.status_code == 413
    assert {"X-Frame-Options", "Content-Security-Policy", "X-Content-Type-Options"} <= set(answer.headers)


def test_no_cross_origin_request_is_allowed(client, db):
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "DELETE"}
    for path in ("/api/tokens/", "/v1/shop", "/tokens/"):
        answer = client.options(path, headers=preflight)
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")], path


def test_cookies_are_httponly_and_samesite(client, alice):
    client.get("/signin/")
    client.post(create_link(alice).removeprefix("http://127.0.0.1:8000"))
    client.get("/queues/")
    assert set(client.cookies) == {"csrftoken", "sessionid"}
    for name, cookie in client.cookies.items():
        assert cookie["httponly"], name
        assert cookie["samesite"] == "Lax", name
        assert cookie["path"] == "/", name
        assert not cookie["domain"], name
        assert not cookie["secure"], name  # nobody could sign in over HTTP; test_production.py tests HTTPS


# Bounds of lists and texts


def unbounded_fields(schema, components, where):
    """Yield the paths of lists and texts of a request schema that have no limit."""
    if "$ref" in schema:
        yield from unbounded_fields(components[schema["$ref"].rpartition("/")[2]], components, where)
    for part in schema.get("allOf", []) + schema.get("oneOf", []) + schema.get("anyOf", []):
        yield from unbounded_fields(part, components, where)
    kinds = schema.get("type")
    if kinds == "array" and "maxItems" not in schema:
        yield where
    if kinds == "string" and not {"maxLength", "enum", "format", "pattern"} & set(schema):
        yield where
    if "items" in schema:
        yield from unbounded_fields(schema["items"], components, f"{where}[]")
    for name, field in schema.get("properties", {}).items():
        if not field.get("readOnly"):
            yield from unbounded_fields(field, components, f"{where}.{name}")


def test_every_list_and_text_of_a_request_has_a_limit():
    components = SCHEMA.raw_schema["components"]["schemas"]
    bodies = {
        operation.label: operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]
        for operation in OPERATIONS
        if "requestBody" in operation.definition.raw
    }
    assert len(bodies) > 15
    found = {where for label, schema in bodies.items() for where in unbounded_fields(schema, components, label)}
    assert {where.rpartition(".")[2] for where in found} <= BOUND_BY_BYTES


BOUND_BY_BYTES = {"config_file_content"}
"""Fields with a limit in bytes, which no schema can state; test_api_agents.py tests it."""


def test_a_page_of_a_list_has_a_maximum_size(alice):
    now = timezone.now()
    queue = stored_queue("queue/alice/x", ready=0, unacknowledged=0, owner=alice)
    QueueEvent.objects.bulk_create([QueueEvent(queue=queue, kind="warned", at=now) for _ in range(301)])
    answer = Program(alice).get(f"queues/{queue.uuid}/events/", page_size=1_000_000_000)
    assert answer["X-Result-Count"] == "301"
    assert len(answer.json()) == 300
