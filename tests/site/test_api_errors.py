"""The REST API without the broker, and its answers to what it cannot read. Permissions: test_who_may.py."""

import re
from io import BytesIO
from urllib.parse import quote

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import Owner
from agents.models import SubscriptionQueue
from core import rest
from guardian_site.api_docs import schema
from rabbit.errors import NodeDown
from tests.site.test_who_may import BODIES, BY_SCOPE, EXPECTED, REGISTERING, VISITORS, World, ask, undone
from tests.support.api import Program, Visitor

# Both paths of identities lead to the same views.
ENDPOINTS = {one: statuses for one, statuses in EXPECTED["all"].items() if one[0] in BY_SCOPE}
ENDPOINTS = {one: statuses for one, statuses in ENDPOINTS.items() if re.match("api/(?!marketplace-site-agent)", one[0])}

NEEDS_BROKER = {
    ("api/queues/<str:uuid>/messages/", "get"),
    ("api/queues/<str:uuid>/move/", "post"),
    ("api/archives/<str:uuid>/replay/", "post"),
    ("api/archives/<str:uuid>/restore/", "post"),
    ("api/pulse-users/", "post"),
    ("api/pulse-users/<str:username>/", "delete"),
    ("api/pulse-users/<str:username>/rotate-password/", "post"),
    ("api/pulse-users/<str:username>/connections/", "get"),
    ("api/pulse-users/<str:username>/belongings/", "get"),
    ("api/owners/adopt/", "get"),
    ("api/owners/adopt/", "post"),
    ("api/queues/<str:uuid>/", "delete"),
    ("api/queues/<str:uuid>/purge/", "post"),
    ("api/queues/<str:uuid>/bindings/", "get"),
    ("api/queues/<str:uuid>/rates/", "get"),
    ("api/exchanges/traffic/", "get"),
    ("api/watches/", "post"),
    ("api/watches/<str:uuid>/", "get"),
    ("api/exchanges/", "get"),
    ("api/exchanges/", "delete"),
    *((route, "post") for route in REGISTERING if not route.endswith("identities/")),
}

FIELDS = {
    (route, method): [*schema()["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]["properties"]]
    for path, methods in schema()["paths"].items()
    for method, described in methods.items()
    if (body := described.get("requestBody", {}).get("content", {}).get("application/json"))
    if (route := re.sub(r"{(\w+)}", r"<str:\1>", path.removeprefix("/"))).startswith("api/")
    if not re.search("agent|event-|offerings", route)
    if EXPECTED["session"][route, method].split()[VISITORS.index("operator")] not in ("403", "404")
}
"""The fields of each body that an operator may send. For the endpoints of agents see test_api_agents.py."""


@pytest.fixture
def world(db, settings):
    """Return owners and the belongings of one, while the broker is unavailable."""
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    settings.RABBIT_URL = "amqp://guest:secret-word@127.0.0.1:1"
    return World("/")


@pytest.fixture
def by_owner(world):
    return Program(world.people["owner"])


@pytest.fixture
def by_operator(world):
    return Program(world.people["operator"])


@pytest.fixture
def as_operator(world, by_operator):
    """Return a function that returns a client for a route, with a token wherever a token may be used."""
    by_session = Visitor(world.people["operator"])
    return lambda route: by_session if route.startswith("api/tokens/") else by_operator


def path_of(world, route):
    """Return the path of the owner's belongings as Program expects it."""
    return world.address_of(route).removeprefix("/api/")


def assert_problem(answer, status):
    assert answer["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert set(problem) - {"effect", "confirm"} == {"type", "title", "status", "detail", "instance"}
    assert (problem["status"], answer.status_code) == (status, status)
    assert problem["detail"]
    assert problem["instance"].startswith("/api/")


@pytest.mark.parametrize("visitor", ["owner", "operator"])
def test_without_the_broker_only_endpoints_that_need_it_answer_503(world, visitor):
    client, wrong = world.client(visitor, "all"), []
    for (route, method), statuses in ENDPOINTS.items():
        status = int(statuses.split()[VISITORS.index(visitor)])
        if (status < 400 or status == 409) and (route, method) in NEEDS_BROKER:
            status = 503
        answer = ask(world, client, method, route)
        if answer.status_code != status:
            wrong.append(f"{method} {route}: {answer.status_code}, not {status}")
        if answer.status_code > 400:
            assert_problem(answer, answer.status_code)
        assert b"secret-word" not in b"".join(answer)
        assert ("Retry-After" in answer) == (answer.status_code == 503)
    assert not wrong, "\n".join(wrong)


def test_an_unsupported_method_is_refused(by_operator):
    refused = by_operator.put("settings/", {})
    assert_problem(refused, 405)
    assert refused["Allow"] == "GET, PATCH, HEAD, OPTIONS"
    assert by_operator.send("OPTIONS", "settings/").json() == {"methods": ["GET", "PATCH", "HEAD", "OPTIONS"]}


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json; charset=base64", None),
        (b'{"a": 1}', "application/json; charset=rot13", None),
        (b"\xff", "application/json", 400),
        (b'{"username": "\\ud800"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"NaN", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'"text"', "application/json", 400),
        (b"1" + b"0" * 30, "application/json", 400),
        (b'{"a": ' + b"1" * 5000 + b"}", "application/json", 400),
        (b"[" * 1020 + b"]" * 1020, "application/json", 400),
        (b"null", "application/json", None),
        (b"username=a", "application/x-www-form-urlencoded", 415),
        (b"<a/>", "text/xml", 415),
        (b"{}", "", 415),
        (b'{"a": "' + b"x" * 3_000_000 + b'"}', "application/json", 413),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_unreadable_body_is_refused(world, as_operator, raw, kind, status):
    for route, method in FIELDS:
        with undone():
            answer = as_operator(route).send(method.upper(), path_of(world, route), raw=raw, content_type=kind)
        if status is None:
            assert answer.status_code < 500 or answer.status_code == 503, (route, method)
        else:
            assert answer.status_code == status, (route, method, answer.text)


TEXTS = ["", " ", "\0", "a\nb", "\u202e", "<b>", "'", "x" * 300, "x" * 100_000, "é" * 128, "\ufffe", "٣"]
VALUES = [*TEXTS, None, True, 0, -1, 10**30, 1.5, [], ["\0"], [[]], [1], ["a@b.c"] * 200, {}, {"a": []}]


@pytest.mark.slow
@pytest.mark.parametrize(("route", "method"), FIELDS)
def test_strange_values_of_fields_cause_no_server_error(world, as_operator, route, method):
    path, body = path_of(world, route), BODIES.get((route, method), {})
    for field in FIELDS[route, method]:
        for value in VALUES:
            with undone():  # a limit counts some of the requests
                answer = as_operator(route).send(method.upper(), path, {**body, field: value})
            assert answer.status_code in (200, 201, 204, 400, 403, 409, 503), (field, value, answer.text)
            if answer.status_code == 400:
                assert answer["Content-Type"] == "application/json"
                assert answer.json()


STRANGE = ["%00", "%ED%A0%80", "..%2F..", "a%0D%0Ab", "%F0%9F%98%80", "'%22%3Cb%3E", "x" * 5000, "%25", "None", "1"]


def test_unknown_names_answer_404_however_strange(as_operator):
    for name in STRANGE:
        for route, method in ENDPOINTS:
            if "<" in route:
                path = route.removeprefix("api/").replace(re.search("<.+>", route)[0], name)
                assert_problem(as_operator(route).send(method.upper(), path, BODIES.get((route, method))), 404)
        assert_problem(as_operator("api/exchanges/").send("DELETE", f"exchanges/?name={name}"), 404)


def test_invalid_page_numbers_are_refused(world, as_operator):
    events = path_of(world, "api/queues/<str:uuid>/events/")
    for query, status in [
        ({"page": "1"}, 200), ({"page_size": "1"}, 200), ({"page_size": "1000000000"}, 200), ({"page": "99999"}, 404),
        ({"page": "0"}, 400), ({"page": "-1"}, 400), ({"page": "x"}, 400), ({"page": "1.0"}, 400), ({"page": ""}, 400),
        ({"page": "9" * 30}, 400), ({"page": "²"}, 400), ({"page": "\0"}, 400), ({"page_size": "0"}, 400),
        ({"page_size": "-5"}, 400), ({"page_size": "all"}, 400), ({"format": "xml"}, 200), ({"unknown": "\0"}, 400),
    ]:  # fmt: skip
        for path in ("queues/", "pulse-users/", "tokens/", "channels/", "owners/", events):
            answer = as_operator(f"api/{path}").get(path, **query)
            assert answer.status_code == status, (path, query, answer.text)
            if status == 400:
                assert list(answer.json()) == [*query]


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("queues/", {"state": "sad"}, "state"),
        ("queues/", {"ordering": "colour"}, "ordering"),
        ("queues/", {"vhost": ["a", "a"]}, "vhost"),
        ("queues/", {"page": ["1", "2"]}, "page"),
        ("queues/<str:uuid>/samples/", {"span": ["hour", "day"]}, "span"),
        ("queues/", {"search": "\0"}, "search"),
        ("queues/", {"vhost": "\0"}, "vhost"),
        ("pulse-users/", {"search": "x" * 256}, "search"),
        ("queues/", {"pulse_user": "\0"}, "pulse_user"),
        ("queues/<str:uuid>/samples/", {"span": "year"}, "span"),
        ("queues/<str:uuid>/samples/", {"since": "yesterday"}, "since"),
        ("queues/<str:uuid>/samples/", {"since": "0001-01-01T00:00:00+14:00"}, "since"),
    ],
)
def test_an_invalid_filter_is_refused(world, by_owner, path, query, field):
    answer = by_owner.get(path_of(world, f"api/{path}"), **query)
    assert (answer.status_code, list(answer.json())) == (400, [field])


GET_ROUTES = [route for route, methods in BY_SCOPE.items() if route.startswith("api/") and "get" in methods]


def test_get_refuses_parameters_that_it_does_not_know(world, as_operator):
    assert len(GET_ROUTES) > 30
    for route in GET_ROUTES:
        answer = as_operator(route).get(path_of(world, route).partition("?")[0], colour="red")
        assert (answer.status_code, list(answer.json())) == (400, ["colour"]), route


def test_get_accepts_every_parameter_of_the_schema(world, as_operator):
    for route in GET_ROUTES:
        described = schema()["paths"]["/" + re.sub("<str:([^>]+)>", r"{\1}", route)]["get"].get("parameters", ())
        for name in [one["name"] for one in described if one["in"] == "query"]:
            answer = as_operator(route).get(path_of(world, route).partition("?")[0], **{name: "1"})
            assert "no such parameter" not in answer.text, (route, name)


@pytest.mark.parametrize("path", ["nonsense/", "", "a%0Ab/", "%0A", "%0A/", "nonsense/%0A", "queues/%0Ax/y/"])
def test_unknown_paths_answer_404_in_json(by_owner, path):
    assert_problem(by_owner.send("POST", path), 404)
    assert_problem(Program().send("POST", path), 401)


def test_only_a_get_without_the_trailing_slash_is_redirected(by_owner):
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        answer = by_owner.send(method, "tokens", {"name": "a"})
        assert_problem(answer, 404)
        assert "end in a slash" in answer.json()["detail"]
    answer = by_owner.get("tokens", page=1)
    assert (answer.status_code, answer["Location"]) == (301, "/api/tokens/?page=1")


def test_a_chunked_body_is_refused(by_owner):
    chunked = {"wsgi.input": BytesIO(b'{"weekly_summary": false}'), "HTTP_TRANSFER_ENCODING": "chunked"}
    for method, path in (("PATCH", "settings/"), ("POST", "tokens/"), ("DELETE", "exchanges/")):
        answer = by_owner.client.request(
            REQUEST_METHOD=method, PATH_INFO=f"/api/{path}", CONTENT_TYPE="application/json", **chunked
        )
        assert_problem(answer, 411)
    by_owner.owner.refresh_from_db()
    assert by_owner.owner.weekly_summary


def test_too_many_parameters_are_refused_without_a_traceback(by_owner, caplog):
    answer = by_owner.get("queues/", **{f"a{number}": 1 for number in range(1200)})
    assert_problem(answer, 400)
    assert "too many parameters" in answer.json()["detail"]
    assert not [record for record in caplog.records if record.exc_info]


def test_urls_in_answers_ignore_the_host_header(world, by_owner, settings):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    for route in ("queues/", "queues/<str:uuid>/", "pulse-users/", "pulse-users/<str:username>/"):
        answer = by_owner.client.get(world.address_of(f"api/{route}"), headers={"host": "testserver:99999"})
        assert answer.status_code == 200
        data = answer.text + answer.get("Link", "")
        assert "https://guardian.example.org/api/" in data
        assert "testserver" not in data


def test_page_links_keep_the_query(by_operator, settings):
    for number in range(6):
        Owner.objects.create_user(f"o{number}@example.org", last_login=timezone.now())
    answer = by_operator.get("owners/", page_size=2, page=2, search="example.org")
    assert answer["X-Result-Count"] == "11"
    links = dict(link.split("; ")[::-1] for link in answer["Link"].split(", "))
    assert set(links) == {f'rel="{rel}"' for rel in ("first", "prev", "next", "last")}
    last = by_operator.client.get(links['rel="last"'].strip("<>").removeprefix(settings.GUARDIAN_BASE_URL))
    assert len(last.json()) == 1
    assert 'rel="next"' not in last["Link"]
    first = by_operator.client.get(links['rel="first"'].strip("<>").removeprefix(settings.GUARDIAN_BASE_URL))
    assert 'rel="prev"' not in first["Link"]
    assert "search=" + quote("example.org") in links['rel="next"']


def test_an_event_that_never_reached_the_broker_is_reported_as_unpublished(world, settings):
    SubscriptionQueue.objects.update(state="ready")
    for url in (settings.RABBIT_URL, ""):
        settings.RABBIT_URL = url
        body = {"object_type": "order", "payload": {}}
        answer = Program(world.people["co-owner"]).post(path_of(world, "api/offerings/<str:uuid>/events/"), body)
        assert_problem(answer, 503)
        assert answer["Retry-After"]
        assert answer.json()["detail"].endswith("Try again in a minute. Nothing was published.")


def test_an_invalid_token_is_refused(db):
    headers = [{"Authorization": f"Token {token}"} for token in ("x", "0" * 64, "\xff" * 64, "")]
    for header in ({}, *headers):
        answer = Client(headers=header).get("/api/me/")
        assert_problem(answer, 401)
        assert answer["WWW-Authenticate"] == "Token"


def test_an_agent_is_told_that_the_node_of_its_queue_is_down(rf):
    error = rest._of_broker(NodeDown("The node of the queue 'a' is down."), rf.post("/"))
    assert (error.status_code, str(error.detail)) == (503, "The node of the queue 'a' is down.")


def test_a_request_for_html_is_answered_in_json(by_owner):
    answer = by_owner.send("GET", "me/", accept="text/html")
    assert (answer.status_code, answer["Content-Type"]) == (200, "application/json")
