"""Rate limits: how often owners and clients may do something, counted over all processes."""

import pytest
import time_machine
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from accounts.access import tokens
from accounts.models import AuthToken, Owner
from agents.events import publishing
from agents.models import Offering
from core import limits
from core.limits import RateLimit, RateLimitExceeded, consume
from guardian_site import middleware
from message_store import applications
from message_store.store import store
from tests.support.api import Program, Visitor
from tests.support.toolbox import in_parallel

pytestmark = [pytest.mark.sqlite, pytest.mark.usefixtures("middle_of_an_interval")]

THREE = RateLimit("tries", 3, 60)
WRONG = {"Authorization": f"Token {'0' * 64}"}


def count_allowed(limit, who):
    number = 0
    while True:
        try:
            consume(limit, who)
        except RateLimitExceeded:
            return number
        number += 1


def forget_shares():
    """Forget this process's share of the limits, like another process."""
    limits._left.clear()


# Counting


@pytest.mark.parametrize("most", [1, 3, 99, 100, 101, 250])
def test_exactly_the_limit_is_let_through(db, most):
    assert count_allowed(RateLimit(f"tries of {most}", most, 60), "alice") == most


def test_without_a_limit_nothing_is_counted(db, django_assert_num_queries):
    with django_assert_num_queries(0):
        for _ in range(1000):
            consume(RateLimit("tries", 0, 60), "alice")


def test_owners_and_limits_are_counted_separately(db):
    assert count_allowed(THREE, "alice") == 3
    assert count_allowed(THREE, "bob") == 3
    assert count_allowed(RateLimit("other tries", 3, 60), "alice") == 3


def test_after_the_retry_time_the_limit_starts_anew(db):
    count_allowed(THREE, "alice")
    with pytest.raises(RateLimitExceeded, match="the limit is 3 within a minute") as refused:
        consume(THREE, "alice")
    assert 1 <= refused.value.seconds <= 60
    with time_machine.travel(timezone.now() + timezone.timedelta(seconds=refused.value.seconds)):
        assert count_allowed(THREE, "alice") == 3


def test_processes_share_the_count(db):
    consume(THREE, "alice")
    forget_shares()
    assert count_allowed(THREE, "alice") == 2


def test_a_processs_share_is_not_available_to_others(db):
    many = RateLimit("many tries", 1000, 60)
    consume(many, "alice")
    forget_shares()
    assert count_allowed(many, "alice") == 1000 - 10  # nine of the first share are lost with its process


def test_a_large_limit_takes_few_statements(db, django_assert_max_num_queries):
    many = RateLimit("many tries", 60_000, 60)
    with django_assert_max_num_queries(12):
        for _ in range(600):
            consume(many, "alice")


def test_concurrent_requests_do_not_exceed_the_limit(transactional_db):
    outcomes = in_parallel(*[lambda: consume(THREE, "alice")] * 8)
    refused = [outcome for outcome in outcomes if isinstance(outcome, RateLimitExceeded)]
    assert (len(refused), outcomes.count(None)) == (5, 3)


# Tokens


@pytest.fixture
def three_tokens(monkeypatch):
    monkeypatch.setattr(tokens, "CREATION_LIMIT", RateLimit("tokens", 3, 3600))


def test_token_creation_is_limited_across_api_page_and_command(alice, as_alice, three_tokens):
    by_api = Visitor(alice)
    assert by_api.post("tokens/", {"name": "first"}).status_code == 201
    assert as_alice.post("/tokens/", {"name": "second", "days": 7}).status_code == 201
    call_command("create_token", "alice@example.org")
    before = AuthToken.objects.count()
    refused = by_api.post("tokens/", {"name": "fourth"})
    assert (refused.status_code, refused["Content-Type"]) == (429, "application/problem+json")
    assert "Too many tokens: the limit is 3 within an hour" in refused.json()["detail"]
    page = as_alice.post("/tokens/", {"name": "fourth", "days": 7})
    assert page.status_code == 429
    assert "Too many tokens: the limit is 3 within an hour" in page.text
    assert 'value="fourth"' in page.text
    with pytest.raises(CommandError, match="Too many tokens"):
        call_command("create_token", "alice@example.org")
    for answer in (refused, page):
        assert 1 <= int(answer["Retry-After"]) <= 3600
    assert AuthToken.objects.count() == before
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    assert Visitor(bob).post("tokens/", {"name": "b"}).status_code == 201


def test_an_invalid_token_is_not_counted(alice, three_tokens):
    visitor = Visitor(alice)
    for _ in range(4):
        assert visitor.post("tokens/", {"name": "\n"}).status_code == 400
    assert visitor.post("tokens/", {"name": "good"}).status_code == 201


# Events and messages


def test_an_owners_events_a_minute_are_limited_and_refused_ones_and_guardians_are_not(alice, settings):
    settings.GUARDIAN_EVENTS_PER_MINUTE = 2
    offering = Offering.objects.create(name="Compute")
    offering.members.add(alice)
    program, path, event = Program(alice), f"offerings/{offering.uuid}/events/", {"object_type": "order", "payload": {}}
    assert [program.post(path, event).status_code for _ in range(3)] == [403] * 3
    offering.publishers.add(alice)
    assert [program.post(path, event).status_code for _ in range(3)] == [200, 200, 429]
    refused = program.post(path, event)
    assert "Too many events: the limit is 2 within a minute" in refused.json()["detail"]
    assert 1 <= int(refused["Retry-After"]) <= 60
    for _ in range(3):
        publishing.publish(offering, "order", {})


def test_an_applications_posts_a_minute_are_limited_and_reads_are_not(db, settings):
    settings.MESSAGE_STORE_POSTS_PER_MINUTE = 2
    name = "posts-too-often"
    key = applications.create_key(applications.create_application(name))[1]
    store().register(name, "one")
    client = Client(headers={"Authorization": f"Application {key}"})

    def post():
        return client.post(f"/v1/{name}/one", "hello", content_type="text/plain")

    posted = post()
    assert [post().status_code for _ in range(2)] == [201, 429]
    refused = post()
    positions = {"1": posted.json()["messages"][0]["key"]}
    path = f"/v1/{name}/one/positions/mailer"
    assert [client.put(path, positions, "application/json").status_code for _ in range(3)] == [200, 200, 429]
    assert "Too many requests with messages: the limit is 2 within a minute" in refused.json()["error_msg"]["rate"]
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert len(client.get(f"/v1/{name}/one").json()["messages"]) == 2


def test_a_cache_entry_that_expires_meanwhile_is_retried(db, monkeypatch):
    add, others = cache.add, [False] * 5
    monkeypatch.setattr(cache, "add", lambda *what: others.pop() if others else add(*what))
    assert limits.add("a-name", "ours", 60)
    assert (others, cache.get("a-name")) == ([], "ours")


def test_a_cache_that_stores_nothing_is_an_error(db, monkeypatch):
    monkeypatch.setattr(cache, "add", lambda *what: False)
    with pytest.raises(OperationalError):
        limits.add("a-name", "ours", 60)


# Wrong keys


GUESSES = {
    "a token": ("/api/me/", WRONG),
    "an invalid token": ("/api/me/", {"Authorization": "Token no-token"}),
    "an application's key": ("/v1/shop", {"Authorization": "Application no-such-key"}),
    "a token at the store": ("/v1/shop", WRONG),
    "the metrics token": ("/metrics", {"Authorization": "Bearer no-such-token"}),
}


@pytest.fixture
def three_guesses(monkeypatch, settings):
    monkeypatch.setattr(middleware, "WRONG_KEYS", RateLimit("wrong tokens and keys", 3, 60))
    settings.GUARDIAN_METRICS_TOKEN = "a-metrics-token"


@pytest.mark.parametrize(("path", "headers"), GUESSES.values(), ids=GUESSES)
def test_repeated_wrong_keys_are_refused_with_a_retry_time(db, three_guesses, path, headers):
    guesser = Client(headers=headers)
    assert [guesser.get(path).status_code for _ in range(5)] == [401, 401, 401, 429, 429]
    refused = guesser.get(path)
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert "Too many wrong tokens and keys" in refused.text.replace("&#x27;", "'")
    kinds = {"/api/me/": "application/problem+json", "/v1/shop": "application/json", "/metrics": "text/html"}
    assert refused["Content-Type"].partition(";")[0] == kinds[path]


def test_wrong_keys_of_all_kinds_share_one_limit(db, three_guesses):
    statuses = [Client(headers=headers).get(path).status_code for path, headers in GUESSES.values()]
    assert statuses == [401, 401, 401, 429, 429]


def test_a_valid_token_is_not_blocked_by_wrong_ones(alice, three_guesses):
    for _ in range(5):
        guessed = Client(headers=WRONG).get("/api/me/")
    assert guessed.status_code == 429
    assert Program(alice).get("me/").status_code == 200
    assert Client().get("/api/me/").status_code == 401  # a request without a key is not counted


def test_clients_are_counted_by_the_address_trusted_proxies_name(db, three_guesses, settings):
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 1
    forged = iter(range(100))

    def guess(place):
        forwarded = f"203.0.113.{next(forged)}, {place}"  # clients control what precedes the proxy's own entry
        return Client(headers={**WRONG, "X-Forwarded-For": forwarded}).get("/api/me/").status_code

    assert [guess("192.0.2.1") for _ in range(4)] == [401, 401, 401, 429]
    assert guess("192.0.2.2") == 401
    settings.ALLAUTH_TRUSTED_PROXY_COUNT = 3  # more than there are: then the peer counts
    assert [guess("192.0.2.1") for _ in range(4)] == [401, 401, 401, 429]
