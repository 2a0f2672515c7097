"""What the REST API answers to those who may not, and to what can't be read."""

import json
from io import BytesIO
from urllib.parse import quote

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues.models import EventSubscription, Offering, Queue, SubscriptionQueue
from tests.api import Program

ZERO = "0" * 32

# Each endpoint: how it is asked, where, and with what.
ENDPOINTS = [
    ("GET", "pulse-users/", None),
    ("POST", "pulse-users/", {"username": "alice-2"}),
    ("GET", "pulse-users/alice/", None),
    ("PATCH", "pulse-users/alice/", {"owners": ["alice@example.org"]}),
    ("DELETE", "pulse-users/alice/", None),
    ("POST", "pulse-users/alice/rotate-password/", {}),
    ("GET", "pulse-users/alice/connections/", None),
    ("GET", "pulse-users/alice/belongings/", None),
    ("POST", "pulse-users/alice/ask-again/", {"email": "team@example.org"}),
    ("GET", "me/", None),
    ("POST", "vouching/ask/", {"reason": "to build things"}),
    ("GET", "owners/", None),
    ("POST", "owners/vouch/", {"email": "new@example.org"}),
    ("GET", "owners/adopt/", None),
    ("POST", "owners/adopt/", {"username": "old", "owners": ["alice@example.org"]}),
    ("GET", "owners/{alice}/", None),
    ("POST", "owners/{alice}/vouch/", {}),
    ("POST", "owners/{alice}/withdraw/", {}),
    ("GET", "tokens/", None),
    ("POST", "tokens/", {"name": "another"}),
    ("GET", f"tokens/{ZERO}/", None),
    ("DELETE", f"tokens/{ZERO}/", None),
    ("GET", "queues/", None),
    ("GET", "queues/{queue}/", None),
    ("PATCH", "queues/{queue}/", {"unbounded": True}),
    ("DELETE", "queues/{queue}/", None),
    ("POST", "queues/{queue}/purge/", None),
    ("GET", "queues/{queue}/live/", None),
    ("GET", "queues/{queue}/bindings/", None),
    ("GET", "queues/{queue}/samples/", None),
    ("GET", "queues/{queue}/events/", None),
    ("GET", "exchanges/", None),
    ("DELETE", "exchanges/?name=exchange/alice/x", None),
    ("GET", "channels/", None),
    ("POST", "channels/", {"name": "chat", "url": "https://1.1.1.1/hook"}),
    ("GET", f"channels/{ZERO}/", None),
    ("DELETE", f"channels/{ZERO}/", None),
    ("POST", f"channels/{ZERO}/test/", None),
    ("GET", "settings/", None),
    ("PATCH", "settings/", {"weekly_summary": False}),
]
IDS = [f"{method} {path}" for method, path, _ in ENDPOINTS]
every_endpoint = pytest.mark.parametrize(("method", "path", "body"), ENDPOINTS, ids=IDS)

VISITORS = ["not vouched", "alice", "co-owner", "other", "operator"]

# Who gets what, with the broker away: 503 is what those get who may.
EXPECTED = {
    "GET pulse-users/": [200, 200, 200, 200, 200],
    "POST pulse-users/": [403, 503, 503, 503, 503],
    "GET pulse-users/alice/": [404, 200, 200, 404, 200],
    "PATCH pulse-users/alice/": [404, 200, 200, 404, 200],
    "DELETE pulse-users/alice/": [404, 503, 503, 404, 503],
    "POST pulse-users/alice/rotate-password/": [404, 503, 503, 404, 503],
    "GET pulse-users/alice/connections/": [404, 503, 503, 404, 503],
    "GET pulse-users/alice/belongings/": [404, 503, 503, 404, 503],
    "POST pulse-users/alice/ask-again/": [404, 400, 400, 404, 400],
    "GET me/": [200, 200, 200, 200, 200],
    "POST vouching/ask/": [204, 409, 409, 409, 409],
    "GET owners/": [403, 403, 403, 403, 200],
    "POST owners/vouch/": [403, 403, 403, 403, 204],
    "GET owners/adopt/": [403, 403, 403, 403, 503],
    "POST owners/adopt/": [403, 403, 403, 403, 503],
    "GET owners/{alice}/": [404, 404, 404, 404, 200],
    "POST owners/{alice}/vouch/": [404, 404, 404, 404, 200],
    "POST owners/{alice}/withdraw/": [404, 404, 404, 404, 200],
    "GET tokens/": [200, 200, 200, 200, 200],
    "POST tokens/": [403, 201, 201, 201, 201],
    f"GET tokens/{ZERO}/": [404, 404, 404, 404, 404],
    f"DELETE tokens/{ZERO}/": [404, 404, 404, 404, 404],
    "GET queues/": [200, 200, 200, 200, 200],
    "GET queues/{queue}/": [404, 200, 200, 404, 200],
    "PATCH queues/{queue}/": [404, 403, 403, 404, 200],
    "DELETE queues/{queue}/": [404, 503, 503, 404, 503],
    "POST queues/{queue}/purge/": [404, 503, 503, 404, 503],
    "GET queues/{queue}/live/": [404, 200, 200, 404, 200],
    "GET queues/{queue}/bindings/": [404, 503, 503, 404, 503],
    "GET queues/{queue}/samples/": [404, 200, 200, 404, 200],
    "GET queues/{queue}/events/": [404, 200, 200, 404, 200],
    "GET exchanges/": [200, 503, 503, 200, 503],
    "DELETE exchanges/?name=exchange/alice/x": [404, 503, 503, 404, 503],
    "GET channels/": [200, 200, 200, 200, 200],
    "POST channels/": [403, 201, 201, 201, 201],
    f"GET channels/{ZERO}/": [404, 404, 404, 404, 404],
    f"DELETE channels/{ZERO}/": [404, 404, 404, 404, 404],
    f"POST channels/{ZERO}/test/": [404, 404, 404, 404, 404],
    "GET settings/": [200, 200, 200, 200, 200],
    "PATCH settings/": [200, 200, 200, 200, 200],
}


@pytest.fixture
def places(db, settings):
    """An account with a queue and two owners, and somebody of each kind. The broker is away."""
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    settings.RABBIT_URL = "amqp://guest:secret-word@127.0.0.1:1"
    owners = {
        "not vouched": Owner.objects.create_user("nina@example.org"),
        "alice": Owner.objects.create_user("alice@example.org", vouched=True, last_login=timezone.now()),
        "co-owner": Owner.objects.create_user("bob@example.org", vouched=True),
        "other": Owner.objects.create_user("carol@example.org", vouched=True),
        "operator": Owner.objects.create_superuser("ops@example.org"),
    }
    Owner.objects.create_user("new@example.org", last_login=timezone.now())
    account = PulseUser.objects.create(username="alice", ready=True)
    account.owners.set([owners["alice"], owners["co-owner"]])
    now = timezone.now()
    queue = Queue.objects.create(
        vhost="/", name="queue/alice/q", type="classic", durable=True, auto_delete=False, exclusive=False,
        ready=1, unacknowledged=0, pulse_user=account, first_seen=now, last_seen=now,
    )  # fmt: skip
    return owners, {"alice": owners["alice"].uuid.hex, "queue": queue.uuid.hex}


@every_endpoint
def test_nobody_is_told_to_sign_in(places, method, path, body):
    answer = Program().send(method, path.format(**places[1]), body)
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Token")
    is_problem(answer, 401)


@every_endpoint
@pytest.mark.parametrize("visitor", VISITORS)
def test_each_endpoint_lets_those_in_who_may(places, method, path, body, visitor):
    owners, names = places
    answer = Program(owners[visitor]).send(method, path.format(**names), body)
    assert answer.status_code == EXPECTED[f"{method} {path}"][VISITORS.index(visitor)], answer.text
    if answer.status_code in (403, 404, 409, 503):
        is_problem(answer, answer.status_code)
    assert "secret-word" not in answer.text
    assert ("Retry-After" in answer) == (answer.status_code == 503)


def is_problem(answer, status):
    assert answer["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert set(problem) == {"type", "title", "status", "detail", "instance"}
    assert (problem["status"], answer.status_code) == (status, status)
    assert problem["detail"]
    assert problem["instance"].startswith("/api/")


@every_endpoint
def test_a_session_needs_the_csrf_token_to_change_anything(places, method, path, body):
    owners, names = places
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(owners["operator"])
    data = b"" if body is None else json.dumps(body).encode()
    answer = browser.generic(method, f"/api/{path.format(**names)}", data, content_type="application/json")
    if method == "GET":
        assert answer.status_code == EXPECTED[f"{method} {path}"][VISITORS.index("operator")]
    else:
        is_problem(answer, 403)
        assert "CSRF" in answer.json()["detail"]


@every_endpoint
def test_other_methods_are_refused(places, method, path, body):
    owners, names = places
    answer = Program(owners["operator"]).send("PUT", path.format(**names), body)
    is_problem(answer, 405)
    assert method in answer["Allow"]
    options = Program(owners["operator"]).send("OPTIONS", path.format(**names))
    assert method in options.json()["methods"]


WITH_BODY = [endpoint for endpoint in ENDPOINTS if endpoint[2] is not None]


@pytest.mark.parametrize(("method", "path", "body"), WITH_BODY, ids=[f"{m} {p}" for m, p, _ in WITH_BODY])
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
def test_what_cannot_be_read_is_refused(places, method, path, body, raw, kind, status):
    owners, names = places
    answer = Program(owners["operator"]).send(method, path.format(**names), raw=raw, content_type=kind)
    assert answer.status_code < 500 or answer.status_code == 503
    if status is not None:
        assert answer.status_code == status, answer.text


TEXTS = ["", " ", "\0", "a\nb", "\u202e", "<b>", "'", "x" * 300, "x" * 100_000, "é" * 128, "\ufffe", "٣"]
VALUES = [*TEXTS, None, True, 0, -1, 10**30, 1.5, [], ["\0"], [[]], [1], ["a@b.c"] * 200, {}, {"a": []}]


@pytest.mark.parametrize(("method", "path", "body"), WITH_BODY, ids=[f"{m} {p}" for m, p, _ in WITH_BODY])
def test_no_value_of_a_field_is_too_strange(places, method, path, body):
    owners, names = places
    fields = {
        "pulse-users/": ["username", "password", "owners", "notification_emails"],
        "pulse-users/alice/": ["owners", "notification_emails", "warn_length", "max_length"],
        "pulse-users/alice/rotate-password/": ["password", "close_connections"],
        "owners/{alice}/withdraw/": ["remove", "reason"],
        "owners/{alice}/vouch/": ["reason"],
        "tokens/": ["name", "days"],
        "queues/{queue}/": ["unbounded", "warn_length", "max_length"],
        "settings/": ["quiet_from", "quiet_until", "time_zone", "weekly_summary"],
    }.get(path, list(body))
    program = Program(owners["operator"])
    for field in fields:
        for value in VALUES:
            answer = program.send(method, path.format(**names), {**body, field: value})
            assert answer.status_code in (200, 201, 204, 400, 403, 409, 503), (field, value, answer.text)
            if answer.status_code == 400:
                assert answer["Content-Type"] == "application/json"
                assert answer.json()


STRANGE = ["%00", "%ED%A0%80", "..%2F..", "a%0D%0Ab", "%F0%9F%98%80", "'%22%3Cb%3E", "x" * 5000, "%25", "None", "1"]


@every_endpoint
def test_what_is_not_there_is_404_however_strange_its_name(places, method, path, body):
    if "{" not in path and ZERO not in path and "alice" not in path:
        return
    owners, _ = places
    for name in STRANGE:
        if "exchange/" in path:
            where = f"exchanges/?name={name}"
        else:
            parts = path.split("/")
            where = "/".join([parts[0], name, *parts[2:]])
        is_problem(Program(owners["operator"]).send(method, where, body), 404)


@pytest.mark.parametrize(
    "path", ["queues/", "pulse-users/", "tokens/", "channels/", "owners/", "queues/{queue}/events/"]
)
@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"page": "1"}, 200), ({"page_size": "1"}, 200), ({"page_size": "1000000000"}, 200), ({"page": "99999"}, 404),
        ({"page": "0"}, 400), ({"page": "-1"}, 400), ({"page": "x"}, 400), ({"page": "1.0"}, 400), ({"page": ""}, 400),
        ({"page": "9" * 30}, 400), ({"page": "²"}, 400), ({"page": "\0"}, 400), ({"page_size": "0"}, 400),
        ({"page_size": "-5"}, 400), ({"page_size": "all"}, 400), ({"format": "xml"}, 200), ({"unknown": "\0"}, 200),
    ],
)  # fmt: skip
def test_pages_are_numbers_from_one(places, path, query, status):
    owners, names = places
    answer = Program(owners["operator"]).get(path.format(**names), **query)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert list(answer.json()) == [name for name in query if name.startswith("page")]


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("queues/", {"state": "sad"}, "state"),
        ("queues/", {"ordering": "colour"}, "ordering"),
        ("queues/", {"search": "\0"}, "search"),
        ("queues/", {"vhost": "\0"}, "vhost"),
        ("pulse-users/", {"search": "x" * 256}, "search"),
        ("queues/", {"pulse_user": "\0"}, "pulse_user"),
        ("queues/{queue}/samples/", {"span": "year"}, "span"),
        ("queues/{queue}/samples/", {"since": "yesterday"}, "since"),
        ("queues/{queue}/samples/", {"since": "0001-01-01T00:00:00+14:00"}, "since"),
    ],
)
def test_a_filter_that_cannot_be_understood_is_told(places, path, query, field):
    owners, names = places
    answer = Program(owners["alice"]).get(path.format(**names), **query)
    assert (answer.status_code, list(answer.json())) == (400, [field])


@pytest.mark.parametrize("path", ["pulse-users/", "owners/"])
@pytest.mark.parametrize("search", ["\0", "%", "_", "\u202e", "'", "\\", "x" * 255])
def test_anything_can_be_searched_for(places, path, search):
    answer = Program(places[0]["operator"]).get(path, search=search)
    assert (answer.status_code, answer.json()) == (200, [])


@pytest.mark.parametrize("path", ["nonsense/", "", "a%0Ab/", "%0A", "%0A/", "nonsense/%0A", "queues/%0Ax/y/"])
def test_addresses_that_lead_nowhere_say_so_in_json(places, path):
    is_problem(Program(places[0]["alice"]).send("POST", path), 404)
    is_problem(Program().send("POST", path), 401)


def test_what_is_sent_without_the_slash_is_not_redirected_to_a_list(places):
    program = Program(places[0]["alice"])
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        answer = program.send(method, "tokens", {"name": "a"})
        is_problem(answer, 404)
        assert "end in a slash" in answer.json()["detail"]
    answer = program.get("tokens", page=1)
    assert (answer.status_code, answer["Location"]) == (301, "/api/tokens/?page=1")


def test_a_body_in_chunks_is_refused_since_it_would_be_taken_for_none(places):
    owners, _ = places
    program = Program(owners["alice"])
    chunked = {"wsgi.input": BytesIO(b'{"weekly_summary": false}'), "HTTP_TRANSFER_ENCODING": "chunked"}
    for method, path in (("PATCH", "settings/"), ("POST", "tokens/"), ("DELETE", "exchanges/")):
        answer = program.client.request(
            REQUEST_METHOD=method, PATH_INFO=f"/api/{path}", CONTENT_TYPE="application/json", **chunked
        )
        is_problem(answer, 411)
    owners["alice"].refresh_from_db()
    assert owners["alice"].weekly_summary


def test_more_parameters_than_are_read_are_told_without_a_traceback(places, caplog):
    answer = Program(places[0]["alice"]).get("queues/", **{f"a{number}": 1 for number in range(1200)})
    is_problem(answer, 400)
    assert "too many parameters" in answer.json()["detail"]
    assert not [record for record in caplog.records if record.exc_info]


def test_another_host_than_ours_is_a_problem(places):
    is_problem(Program(places[0]["alice"]).client.get("/api/queues/", headers={"host": "evil.example"}), 400)


def test_no_address_is_made_of_the_host_that_was_asked(places, settings):
    owners, names = places
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    client = Program(owners["alice"]).client
    for path in ("queues/", f"queues/{names['queue']}/", "pulse-users/", "pulse-users/alice/"):
        answer = client.get(f"/api/{path}", headers={"host": "testserver:99999"})
        assert answer.status_code == 200
        told = answer.text + answer.get("Link", "")
        assert "https://guardian.example.org/api/" in told
        assert "testserver" not in told


def test_other_forms_than_json_are_answered_in_json(places):
    answer = Program(places[0]["alice"]).send("GET", "me/", accept="text/html")
    assert (answer.status_code, answer["Content-Type"]) == (200, "application/json")


def test_links_keep_what_is_asked_for(places, settings):
    for number in range(6):
        Owner.objects.create_user(f"o{number}@example.org", last_login=timezone.now())
    program = Program(places[0]["operator"])
    answer = program.get("owners/", page_size=2, page=2, search="example.org")
    assert answer["X-Result-Count"] == "11"
    links = dict(link.split("; ")[::-1] for link in answer["Link"].split(", "))
    assert set(links) == {f'rel="{rel}"' for rel in ("first", "prev", "next", "last")}
    last = program.client.get(links['rel="last"'].strip("<>").removeprefix(settings.GUARDIAN_BASE_URL))
    assert len(last.json()) == 1
    assert 'rel="next"' not in last["Link"]
    first = program.client.get(links['rel="first"'].strip("<>").removeprefix(settings.GUARDIAN_BASE_URL))
    assert 'rel="prev"' not in first["Link"]
    assert "search=" + quote("example.org") in links['rel="next"']


def test_an_event_that_never_reached_the_broker_is_told_not_to_be_published(places, settings):
    owners, _ = places
    offering = Offering.objects.create(name="Cluster")
    offering.members.add(owners["alice"])
    offering.publishers.add(owners["alice"])
    subscription = EventSubscription.objects.create(owner=owners["alice"], object_type="order")
    SubscriptionQueue.objects.create(
        subscription=subscription, offering=offering, object_type="order", vhost="/", queue_name="a", state="ready"
    )
    for url in (settings.RABBIT_URL, ""):
        settings.RABBIT_URL = url
        body = {"object_type": "order", "payload": {}}
        answer = Program(owners["alice"]).post(f"offerings/{offering.uuid.hex}/events/", body)
        is_problem(answer, 503)
        assert answer["Retry-After"]
        assert answer.json()["detail"].endswith("Try again in a minute. Nothing was published.")


def test_a_token_that_cannot_be_used_is_refused(places):
    for token in ("x", "0" * 64, "\xff" * 64, ""):
        answer = Client(headers={"Authorization": f"Token {token}"}).get("/api/me/")
        is_problem(answer, 401)
        assert answer["WWW-Authenticate"] == "Token"
