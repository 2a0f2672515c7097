"""Random requests by anybody: each answer matches the schema, and none is a server error.

The short form is the same each time. In the long one, of `make soak`, ``GUARDIAN_FUZZ_CASES`` is the number of requests
that match the schema, and ``GUARDIAN_FUZZ_SEED`` the seed. As many again are garbage that matches no schema.
"""

import json
import os
import re
import secrets
import zlib
from io import BytesIO
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
import schemathesis
from django.conf import settings as django_settings
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from accounts.models import AuthToken, Owner
from message_store import queues
from message_store.applications import create_key
from message_store.models import Application
from message_store.queues import MessageInput
from tests.site import test_who_may
from tests.site.test_api_schema import ALL_OPERATIONS, OPERATIONS
from tests.site.test_who_may import PULSE_USER, SCOPES, VISITORS, restore_broker, routes, undone
from tests.support.api import answer_to, keeping_connections
from tests.support.proxy import Proxy

pytestmark = pytest.mark.slow

LONG_FORM = os.environ.get("GUARDIAN_FUZZ_CASES")
CASES = int(LONG_FORM or 200)
SEED = int(os.environ.get("GUARDIAN_FUZZ_SEED") or (secrets.randbelow(10**6) if LONG_FORM else 1))

AS_DOCUMENTED = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
KINDS = sorted({operation.path.split("/")[2] for operation in OPERATIONS})
"""The resources of the endpoints: the first part of their paths."""

WAYS = [("nobody", ""), ("nobody", "all"), ("owner", "agent")] + [
    (visitor, way) for visitor in VISITORS[1:] for way in ("all", "session")
]
"""Who sends a request, and how they authenticate: by a token of a scope, or a session. Nobody has an invalid token."""


def pick(ways: list[tuple[str, str]], *examples: Any) -> tuple[str, str]:
    """Return one of these with equal probability, unlike hypothesis's choice among few."""
    return ways[zlib.crc32(repr(examples).encode("utf-8", "replace")) % len(ways)]


def examples(cases: int) -> Any:
    """Return a decorator for this many examples, the same for the same seed on any machine."""
    patient = settings(
        max_examples=max(1, cases),
        phases=[Phase.generate],  # shrinking a failure takes many minutes
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(SEED)(patient(test))


@pytest.fixture(scope="module", autouse=True)
def shown_seed(request):
    """Print the seed at the end."""
    yield
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(f"\nSeed {SEED}")


# Requests that match the schema


class World(test_who_may.World):
    """The belongings of an owner, in the database and on the broker, and visitors with sessions."""

    def __init__(self, guarded: str, management: Any) -> None:
        super().__init__(guarded)
        self.management = management
        self.sign_in()
        self.restore()

    def restore(self) -> None:
        """Restore what a request may have deleted from the broker."""
        restore_broker(self.management, self.vhost)

    def point(self, case: schemathesis.Case) -> None:
        """Let this request name existing objects."""
        path = case.operation.path
        address = self.address_of(path[1:].replace("{", "<str:").replace("}", ">")).partition("?")[0]
        named = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path), address)
        case.path_parameters |= named.groupdict() if named else {}
        if path.startswith("/api/exchanges/"):
            case.query["name"] = f"exchange/{PULSE_USER}/events"
        body = case.body if isinstance(case.body, dict) else {}
        for field in {"offering", "offering_uuid"} & set(body):
            body[field] = self.offering.uuid.hex
        if "owners" in body:
            body["owners"] = ["owner@example.org", "co-owner@example.org"]
        if "email" in body:
            body["email"] = "unvouched@example.org"

    def send(self, case: schemathesis.Case, who: str, way: str) -> Any:
        """Send this request by a token, or by a session with its CSRF token like a browser, and roll it back."""
        headers, cookies = {}, {}
        if way in SCOPES:
            headers["Authorization"] = f"Token {self.keys[who, way]}"
        else:
            case.headers.pop("Authorization", None)  # which schemathesis invents
        if way == "session":
            session = self.cookies[who][django_settings.SESSION_COOKIE_NAME].value
            cookies = {django_settings.SESSION_COOKIE_NAME: session, "csrftoken": "c" * 32}
            headers["X-CSRFToken"] = "c" * 32
        with undone(), keeping_connections():
            return case.call(headers=headers, cookies=cookies)


@pytest.fixture
def world(guarded, management, settings, agents):
    settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH = 1000
    before = {user.name for user in management.users()}
    yield World(guarded, management)
    for name in {user.name for user in management.users()} - before:
        management.delete_user(name)


def takes_something(operation: schemathesis.APIOperation) -> bool:
    return bool(operation.body or operation.query or operation.path_parameters)


def valid_and_invalid(operation: schemathesis.APIOperation) -> Any:
    """Return a decorator that calls a test with requests of this operation, to existing and missing objects."""
    case = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if takes_something(operation):
        case |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    arguments = given(case=case, there=st.sampled_from([True, True, False]), number=st.integers(0, 10**6))
    return lambda test: examples(-(-CASES // len(OPERATIONS)))(arguments(test))


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_matches_the_schema(world, kind):
    """Send valid and invalid requests as anybody, about existing and missing objects."""
    for operation in [operation for operation in OPERATIONS if operation.path.split("/")[2] == kind]:
        sent = 0

        @valid_and_invalid(operation)
        def send(case: schemathesis.Case, there: bool, number: int) -> None:
            nonlocal sent
            way = pick(WAYS, number, case.path_parameters, case.query, case.body)
            if there:
                world.point(case)
            answer = world.send(case, *way)
            if case.method != "GET":
                world.restore()
            case.validate_response(answer, checks=[not_a_server_error, *AS_DOCUMENTED])
            sent += 1

        send()
        assert sent, operation.label


def test_every_answer_of_the_message_store_matches_the_schema(transactional_db):
    application = Application.objects.create(name="shop")
    reader = Owner.objects.create_user("ann@example.org")
    headers = {
        "its application": f"Application {create_key(application)[1]}",
        "a reader": f"Token {AuthToken.objects.create(user=reader, scope=AuthToken.Scope.ALL)[1]}",
        "anyone": "",
        "an unknown application": f"Application {'0' * 64}",
    }

    def restore() -> str:
        queue = queues.create("shop", "orders", partitions=2, principals=f"app:shop,bid:{reader.email}")
        return queues.post(queue, MessageInput(b"a book", partition=1)).id.hex

    named = {"application": "shop", "queue": "orders", "consumer": "mail", "worker": "0" * 32, "message_ids": restore()}
    for operation in [operation for operation in ALL_OPERATIONS if operation not in OPERATIONS]:

        @valid_and_invalid(operation)
        def send(case: schemathesis.Case, there: bool, number: int) -> None:
            who = pick([(who, who) for who in headers], number, case.path_parameters, case.query, case.body)[0]
            if there:
                case.path_parameters |= {name: named[name] for name in case.path_parameters}
            case.headers.pop("Authorization", None)  # which schemathesis invents
            answer = case.call(headers={"Authorization": headers[who]} if headers[who] else {})
            if case.method != "GET":
                named["message_ids"] = restore()
            case.validate_response(answer, checks=[not_a_server_error, *AS_DOCUMENTED])

        send()


def test_a_broker_lost_during_a_request_answers_only_503(world, broker, settings):
    asks_the_broker = set()
    with Proxy.before(broker.management_url) as http, Proxy.before(broker.amqp_url) as amqp:
        settings.RABBITMQ_MANAGEMENT_URL = http.url(broker.management_url)
        settings.RABBIT_URL = amqp.url(broker.amqp_url)
        for operation in OPERATIONS:

            @examples(-(-CASES // 200))
            @given(
                case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
                requests=st.sampled_from([0, 0, 1, 2, 4]),
                who=st.sampled_from(["owner", "operator"]),
            )
            def send(case: schemathesis.Case, requests: int, who: str) -> None:
                world.point(case)
                http.close_after(requests)
                amqp.close_after(requests)
                answer = world.send(case, who, "all")
                http.forward()
                amqp.forward()
                if case.method != "GET":
                    world.restore()
                case.validate_response(answer, checks=AS_DOCUMENTED)
                if answer.status_code >= 500:
                    assert answer.status_code == 503
                    asks_the_broker.add(case.operation.label)

            send()
    assert len(asks_the_broker) > 3


# Requests that match no schema

LONG = "x" * 5000
STRANGE = [
    "", " ", "\0", "a\0b", "/", "//", "../..", "a\nb", "\r\n", "'", '"', "`", "\\", "<b>", "%", "%00", "%s", "{}", "[]",
    "null", "true", "NaN", "-1", "0", "1", "1e999", "9" * 400, "\u202e", "\ufffe", "\ud800", "٣", "é" * 128, LONG, "*",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "a@b.c", "1:" + "0" * 32, "0" * 32,
    "queue/who-may/builds",
]  # fmt: skip
FIELDS = [
    "", "a", "action", "body", "close_connections", "code", "config_file_content", "confirm", "consistency", "consumer",
    "csrfmiddlewaretoken", "days", "dependencies", "description", "details", "email", "encoding", "include_count",
    "limit", "login", "max_length", "message_id", "messages", "name", "next", "notification_emails", "object_type",
    "object_types", "observable_object_type", "observable_objects", "offering", "offering_uuid", "offset", "order",
    "ordering", "owners", "page", "page_size", "partition", "partitions", "password", "payload", "positions",
    "principles", "pulse_user", "q", "queue", "queue_name", "quiet_from", "quiet_until", "reason", "remove", "scope",
    "search", "since", "span", "state", "time_zone", "token", "ttl", "type", "typed", "unbounded", "url", "username",
    "vhost", "warn_length", "weekly_summary", "\0", "a\nb", "[]", LONG,
]  # fmt: skip
HEADERS = [
    "Accept", "Accept-Encoding", "Accept-Language", "Cookie", "Forwarded", "HX-Request", "HX-Target", "Host",
    "If-Modified-Since", "If-None-Match", "Origin", "Range", "Referer", "Transfer-Encoding", "X-CSRFToken",
    "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-HTTP-Method-Override", "X-Partition",
    "X-Request-ID", "X-TTL",
]  # fmt: skip
CONTENT_TYPES = [
    "", "application/json", "application/json; charset=utf-16", "application/x-www-form-urlencoded",
    "multipart/form-data", "multipart/form-data; boundary=x", "text/plain", "text/xml; charset=rot13", "/", ";;", "é",
]  # fmt: skip
METHODS = [
    "GET", "GET", "HEAD", "POST", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get", "\u00e9",
]  # fmt: skip

values = st.sampled_from(STRANGE) | st.text(max_size=20)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**30) | st.floats() | values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=10,
)
pairs = st.lists(st.tuples(st.sampled_from(FIELDS), values), max_size=6)


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def form_encoded(given: list[tuple[str, str]]) -> bytes:
    return "&".join("=".join(quote_from_bytes(as_bytes(part), safe="") for part in pair) for pair in given).encode()


def multipart(given: list[tuple[str, str]]) -> bytes:
    part = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    return b"".join([*(part % (as_bytes(name), as_bytes(value)) for name, value in given), b"--x--\r\n"])


bodies = (
    anything.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(FIELDS), anything).map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(FIELDS), anything).map(lambda value: json.dumps(value).encode()[:-1])
    | pairs.map(form_encoded)
    | pairs.map(multipart)
    | st.binary(max_size=50)
    | st.sampled_from([b"", b"[" * 100_000, b"\xff\xfe", b"x" * 3_000_000, b'{"a": ' + b"1" * 5000 + b"}"])
)


@st.composite
def requests_of(draw: Any, found: list[str]) -> tuple[str, dict[str, Any]]:
    """Draw a route and a WSGI environ for it, with bytes as Latin-1 like a server."""
    route = draw(st.sampled_from(found))
    method, query, body = draw(st.sampled_from(METHODS)), draw(pairs), draw(st.just(b"") | bodies)
    environ = {
        "REQUEST_METHOD": method,
        "QUERY_STRING": draw(st.sampled_from([form_encoded(query).decode(), "%", "&&=", "=%ED%A0%80", "\xff"])),
        "CONTENT_TYPE": draw(st.sampled_from(CONTENT_TYPES)),
        "CONTENT_LENGTH": draw(st.sampled_from([str(len(body))] * 5 + ["", "0", "-1", "x", str(len(body) + 10)])),
        "wsgi.input": BytesIO(body),
    }
    headers = draw(st.dictionaries(st.sampled_from(HEADERS), values, max_size=3))
    for name, value in headers.items():
        text = as_bytes(value).decode("latin-1")
        environ[f"HTTP_{name.upper().replace('-', '_')}"] = re.sub(r"[\x00-\x1f]", "", text)  # servers strip these
    return route, environ


PLACEHOLDER = re.compile(r"<[^>]+>")
ROUTES = [route for route in routes() if "^" not in route and not route.startswith("api/docs/")]


@pytest.mark.parametrize("under", ["api/", "v1/"])
def test_garbage_is_refused_without_server_errors(world, under):
    """Send garbage to existing and almost existing paths of the API or the message store."""
    mine = [route for route in ROUTES if route.startswith(under)]
    application = create_key(Application.objects.get(name="shop"))[1]

    @examples(CASES // 3)
    @given(
        asked=requests_of(mine),
        names=st.lists(st.none() | values, min_size=3, max_size=3),
        number=st.integers(0, 10**6),
        end=st.sampled_from(["", "", "", "", "/", "\n", "//", "x"]),
    )
    def send(asked: tuple[str, dict[str, Any]], names: list[str | None], number: int, end: str) -> None:
        route, environ = asked
        way = pick([*WAYS, ("application", "key")], number, route, names, environ["QUERY_STRING"])
        address = world.address_of(route).partition("?")[0]
        if any(names) or "<" in address:  # otherwise the path of an existing object
            given_names = iter(names)
            address = "/" + PLACEHOLDER.sub(lambda _: next(given_names, None) or "1", route)
        who, how = way
        if how in SCOPES:
            environ |= {"HTTP_AUTHORIZATION": f"Token {world.keys[who, how]}"}
        elif how == "key":
            environ |= {"HTTP_AUTHORIZATION": f"Application {application}"}
        with undone():
            if how == "session":
                session = world.cookies[who][django_settings.SESSION_COOKIE_NAME].value
                environ["HTTP_COOKIE"] = f"{django_settings.SESSION_COOKIE_NAME}={session}; csrftoken={'c' * 32}"
                environ.setdefault("HTTP_X_CSRFTOKEN", "c" * 32)
            answer = answer_to(**environ, PATH_INFO=as_bytes(address + end).decode("latin-1"))
            assert_error_format(under, environ["REQUEST_METHOD"], answer)

    send()


def assert_error_format(under: str, method: str, answer: Any) -> None:
    """Assert what all answers below this path have in common."""
    text = answer.content.decode()
    assert answer.status_code < 500, text[:500]
    if answer.status_code < 400 or method == "HEAD":
        return
    kind = answer["Content-Type"]
    if under == "v1/":
        assert kind == "application/json"
        assert set(json.loads(text)) == {"status", "error_msg"}
        assert json.loads(text)["status"] == "error"
    elif kind == "application/json":
        assert answer.status_code == 400
        assert all(json.loads(text).values())
    else:
        assert kind == "application/problem+json"
        assert json.loads(text)["status"] == answer.status_code
        added = {"effect", "confirm"} if '"confirm"' in text else set()
        assert set(json.loads(text)) == {"type", "title", "status", "detail", "instance"} | added
