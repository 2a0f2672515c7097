"""Feeding exchanges and consumers in a mail about queues, and the requests they take."""

import threading

import pytest

from queues.guard import facts
from queues.guard.facts import fetch_feeds
from rabbit.management import Management
from tests.support.counting import counted_requests

QUEUES = facts.MAX_SINGLE_REQUESTS + 1


@pytest.fixture
def queues(amqp, vhost):
    """Return more queues than are requested one by one, each bound to one exchange, as (vhost, name)."""
    amqp.channel.exchange_declare("builds", "topic")
    for number in range(QUEUES):
        amqp.queue(f"q{number}")
        amqp.channel.queue_bind(f"q{number}", "builds", f"build.{number}")
    return [(vhost, f"q{number}") for number in range(QUEUES)]


@pytest.fixture
def proxied_management(broker, proxy):
    management = Management(proxy.url(broker.management_url), read_timeout=5)
    yield management
    management.close()


def routing_keys(feeds):
    """Return the routing keys from the exchange by queue. None: unknown."""
    return {
        name: None if feed.bindings is None else [one.routing_key for one in feed.bindings if one.source == "builds"]
        for (_, name), feed in feeds.items()
    }


ALL = {f"q{number}": [f"build.{number}"] for number in range(QUEUES)}


# One by one: the bindings and the arguments of each queue, two kinds of policies, and the bindings of the exchange.
@pytest.mark.parametrize(("fewer", "requests"), [(0, 2 * QUEUES + 2 + 1), (1, 2 + 2)], ids=["few", "many"])
def test_bindings_and_arguments_of_many_queues_are_listed_in_one_request_each(
    management, broker, queues, fewer, requests
):
    with counted_requests() as sent:
        feeds = fetch_feeds(management, broker.amqp_url, queues, QUEUES * facts.QUEUES_PER_SINGLE_REQUEST - fewer)
    assert (len(sent), routing_keys(feeds)) == (requests, ALL)


def test_a_broker_lost_meanwhile_is_not_queried_for_the_rest(proxied_management, proxy, broker, queues, monkeypatch):
    monkeypatch.setattr(facts, "MAX_CONCURRENT_REQUESTS", 1)
    proxy.close_after(2)
    with counted_requests() as sent:
        feeds = fetch_feeds(proxied_management, broker.amqp_url, queues, QUEUES * facts.QUEUES_PER_SINGLE_REQUEST)
    known = {name: keys for name, keys in routing_keys(feeds).items() if keys is not None}
    assert known == {name: ALL[name] for name in list(ALL)[:2]}
    assert len(sent) < QUEUES
    assert {feed.consumers for feed in feeds.values()} == {0}


def test_a_slow_broker_is_abandoned_at_the_shared_timeout(proxied_management, proxy, broker, queues, monkeypatch):
    monkeypatch.setattr(facts, "BINDINGS_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(facts, "MAX_CONCURRENT_REQUESTS", 1)
    proxy.delay(0.2)
    with counted_requests() as sent:
        feeds = fetch_feeds(proxied_management, broker.amqp_url, queues, QUEUES * facts.QUEUES_PER_SINGLE_REQUEST)
    known = {name: keys for name, keys in routing_keys(feeds).items() if keys is not None}
    assert 0 < len(known) <= 3
    assert known.items() <= ALL.items()
    assert len(sent) <= 4


def test_one_late_answer_does_not_affect_the_other_queues(broker, queues, monkeypatch):
    over = threading.Event()

    class Late(Management):
        def queue_bindings(self, vhost, name):
            if name == "q0":
                over.wait(60)
            return super().queue_bindings(vhost, name)

    monkeypatch.setattr(facts, "BINDINGS_TIMEOUT_SECONDS", 2)
    management = Late(broker.management_url)
    try:
        feeds = fetch_feeds(management, broker.amqp_url, queues, QUEUES * facts.QUEUES_PER_SINGLE_REQUEST)
    finally:
        over.set()
        management.close()
    assert routing_keys(feeds) == {**ALL, "q0": None}


def test_a_missing_vhost_does_not_affect_the_other_queues(management, broker, queues, vhost):
    gone = f"{vhost[:-1]}!"  # sorted before the other
    assert gone < vhost
    feeds = fetch_feeds(management, broker.amqp_url, [*queues, (gone, "nothing")], 0)
    assert routing_keys(feeds) == {**ALL, "nothing": None}


def test_slow_lists_of_vhosts_are_abandoned_at_the_shared_timeout(
    proxied_management, proxy, broker, queues, vhost, monkeypatch
):
    monkeypatch.setattr(facts, "BINDINGS_TIMEOUT_SECONDS", 0.2)
    proxy.delay(1)
    with counted_requests() as sent:
        feeds = fetch_feeds(proxied_management, broker.amqp_url, [*queues, (f"{vhost}-too", "nothing")], 0)
    assert set(routing_keys(feeds).values()) == {None}
    assert {feed.consumers for (_, name), feed in feeds.items() if name != "nothing"} == {0}
    assert len(sent) == 1
