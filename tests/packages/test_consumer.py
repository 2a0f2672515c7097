"""The consumer on a real broker: outcomes of messages, and failures around them."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pika
import pytest
import yapw.clients

from guardian_consumers import (
    AsyncConsumer,
    AsyncPublisher,
    Consumer,
    ConsumerError,
    Discard,
    Halt,
    Halted,
    Hung,
    NotPublished,
    Outcome,
    Park,
    PlainQueue,
    Policy,
    Publisher,
    Refused,
    Requeue,
    Retry,
    SettingsError,
    Unroutable,
    _link,
    run_all,
    run_all_async,
)
from guardian_consumers.django import in_transaction, with_fresh_connections
from rabbit.management import Management
from tests.conftest import Amqp
from tests.support.consumers import (
    PARKED,
    QUEUE,
    InMilliseconds,
    consuming,
    length,
    publish_raw,
    queue_exists,
    settings_at,
    take,
    without_django,
)
from tests.support.proxy import Proxy
from tests.support.toolbox import in_background, in_parallel, memory_alarm, queue_names, raising, wait_until

PROJECT = Path(__file__).resolve().parents[2]

in_both = pytest.mark.usefixtures("each_consumer")
in_both_hanging = pytest.mark.usefixtures("each_hanging_consumer")

# Several addresses


def test_a_consumer_connects_to_the_first_address_that_accepts_the_login(consumer_settings):
    url = consumer_settings().url
    wrong = url.replace("guardian:", "guardian:wrong-")
    with consuming(Consumer(consumer_settings(url=f"{wrong},{url}"), "work", lambda message: None)) as consumer:
        assert consumer.connected
    with pytest.raises(Refused):
        Consumer(consumer_settings(url=f"{wrong},{wrong}"), "work", lambda message: None).run()


def test_a_consumer_reconnects_to_a_cluster_that_was_renamed(node_settings, own_node):
    url = node_settings().url
    away = url.replace(urlsplit(url).netloc, "guest:guest@127.0.0.1:1")
    with Proxy.before(url) as proxy:
        consumer = Consumer(node_settings(url=f"{proxy.url(url)},{away}"), "orders", lambda message: None)
        with consuming(consumer):
            own_node.eval('rabbit_nodes:set_cluster_name(<<"renamed">>, <<"tests">>)')
            proxy.cut_after(0)
            publish_raw(connect(node_settings()))
            wait_until(lambda: consumer.counts["done"])


@in_both
def test_a_consumer_goes_on_at_the_next_address_when_its_node_is_lost(consumer_settings, amqp):
    url, calls = consumer_settings().url, []
    with Proxy.before(url) as proxy:
        consumer = Consumer(consumer_settings(url=f"{proxy.url(url)},{url}"), "orders", calls.append)
        with consuming(consumer):
            publish_raw(amqp, b"17")
            wait_until(lambda: calls)
            proxy.refuse()
            proxy.cut_after(1)
            publish_raw(amqp, b"18")
            wait_until(lambda: consumer.counts["reconnected"] and len(calls) >= 2)


# Names, publishing, handling


@in_both
def test_a_yapw_publisher_reaches_our_consumer_by_routing_keys(consumer_settings):
    seen = []
    with consuming(Consumer(consumer_settings(), PlainQueue("work", ["orders", "returns"]), seen.append)):
        client = yapw.clients.Blocking(url=consumer_settings().url, exchange="shop_test")
        client.publish({"order": 17}, "orders")
        client.publish({"order": 18}, "returns")
        client.close()
        wait_until(lambda: len(seen) == 2)
    assert sorted((message.routing_key, message.body["order"]) for message in seen) == [
        ("shop_test_orders", 17),
        ("shop_test_returns", 18),
    ]
    assert {message.queue for message in seen} == {"shop_test_work"}


def test_a_yapw_consumer_reads_what_our_publisher_sends(consumer_settings, amqp):
    client = yapw.clients.Blocking(url=consumer_settings().url, exchange="shop_test")
    client.declare_queue("orders")
    with Publisher(consumer_settings()) as publisher:
        publisher.publish({"order": 17}, "orders", mandatory=True)
    properties, body = take(amqp, QUEUE)
    client.close()
    assert (json.loads(body), properties.content_type, properties.delivery_mode) == (
        {"order": 17}, "application/json", 2,
    )  # fmt: skip
    assert properties.message_id


def test_threads_publish_at_once_and_wait_for_their_own_confirms(consumer_settings, amqp):
    seen, confirmed = [], []

    def publish(first):
        for number in range(first, first + 25):
            consumer.publisher.publish(number, "orders", mandatory=True)
            confirmed.append(number)
            with pytest.raises(Unroutable):
                consumer.publisher.publish(number, "nobody", mandatory=True)

    with consuming(Consumer(consumer_settings(), "orders", lambda message: seen.append(message.body))) as consumer:
        assert in_parallel(*(partial(publish, 25 * number) for number in range(8))) == [None] * 8
        wait_until(lambda: consumer.counts["done"] == 200)
    assert sorted(seen) == sorted(confirmed) == list(range(200))


# Outcomes of exceptions


def failing_consumer(consumer_settings, error, **changes):
    """Return a consumer whose callback raises this, and the messages it received."""
    seen = []

    def callback(message):
        seen.append((message.attempts, message.redelivered))
        raise error

    return Consumer(consumer_settings(**changes), "orders", callback), seen


@in_both
def test_a_poison_message_is_retried_and_parked_with_its_traceback(consumer_settings, amqp):
    times = []

    def callback(message):
        times.append((time.monotonic(), message.attempts, (message.routing_key, message.exchange)))
        raise LookupError(f"no order {message.body['order']}")

    with consuming(Consumer(consumer_settings(), "orders", callback)) as consumer:
        publish_raw(amqp, b'{"order": 17}', message_id="seventeen", headers={"theirs": "kept"}, correlation_id="c")
        properties, body = take(amqp, PARKED)
        wait_until(lambda: consumer.counts["park"] == 1)
    assert [attempts for _, attempts, _ in times] == [0, 1, 2]
    assert {names for *_, names in times} == {(QUEUE, "shop_test")}
    assert times[1][0] - times[0][0] >= 0.05
    assert times[2][0] - times[1][0] >= 0.2
    assert (body, properties.message_id, properties.correlation_id) == (b'{"order": 17}', "seventeen", "c")
    headers = properties.headers
    assert headers["consumer-error"] == "LookupError: no order 17"
    assert "raise LookupError(f\"no order {message.body['order']}\")" in headers["consumer-traceback"]
    assert headers["consumer-attempts"] == 3
    assert (headers["consumer-queue"], headers["consumer-exchange"], headers["consumer-routing-key"]) == (
        QUEUE, "shop_test", QUEUE,
    )  # fmt: skip
    assert headers["theirs"] == "kept"
    assert "x-death" not in headers
    assert abs(headers["consumer-failed-at"] - time.time()) < 30
    assert (length(amqp, PARKED), length(amqp, QUEUE)) == (0, 0)
    assert consumer.counts == {"retry": 2, "park": 1}


@in_both
@pytest.mark.parametrize(
    ("body", "properties", "expected"),
    [
        (b'{"order": ', {}, "the body is not valid application/json"),
        (b"\xff\xfe", {"content_type": "text/plain"}, "the body is not valid text/plain"),
        (b"<order/>", {"content_type": "application/xml"}, "the content type is 'application/xml'"),
        (b"{}", {"content_type": b"\xff\xfe"}, "the content type is b'\\xff\\xfe'"),
        (b"{}", {"content_encoding": "gzip"}, "the content encoding is 'gzip'"),
    ],
)
def test_an_unreadable_body_is_parked_and_the_next_message_handled(consumer_settings, amqp, body, properties, expected):
    seen = []
    with consuming(Consumer(consumer_settings(policy=Policy(Outcome.HALT)), "orders", seen.append)) as consumer:
        publish_raw(amqp, body, **properties)
        publish_raw(amqp, b'{"order": 18}')
        parked, raw = take(amqp, PARKED)
        wait_until(lambda: consumer.counts["done"] == 1)
    assert raw == body
    assert parked.headers["consumer-error"].startswith(f"guardian_consumers.Unreadable: {expected}")
    assert [message.body for message in seen] == [{"order": 18}]


@in_both
def test_unreadable_headers_park_the_message_and_keep_the_connection(consumer_settings, amqp):
    at_ = datetime.fromtimestamp(InMilliseconds.SECONDS, UTC)
    seen = []
    with consuming(Consumer(consumer_settings(), "orders", seen.append)) as consumer:
        for content_type in ("application/json", None):
            odd = InMilliseconds(headers={"at": at_}, message_id="one", content_type=content_type, type="order")
            amqp.channel.basic_publish("shop_test", QUEUE, b'{"order": 17}', odd)
        publish_raw(amqp, b'{"order": 18}')
        parked = [take(amqp, PARKED) for _ in range(2)]
        wait_until(lambda: consumer.counts["done"] == 1)
    assert {(p.content_type, p.message_id, p.type, body) for p, body in parked} == {
        (content_type, "one", "order", b'{"order": 17}') for content_type in ("application/json", None)
    }
    assert all("the headers can't be read" in properties.headers["consumer-error"] for properties, _ in parked)
    assert [message.body for message in seen] == [{"order": 18}]
    assert consumer.counts == {"done": 1, "park": 2}


@in_both
def test_bodies_are_decoded_by_content_type_and_custom_decoders(consumer_settings, amqp):
    seen = []
    consumer = Consumer(
        consumer_settings(), "orders", lambda m: seen.append(m.body), decoders={"application/xml": bytes.decode}
    )
    with consuming(consumer):
        publish_raw(amqp, b"\x00\xff", content_type=None)
        publish_raw(amqp, "å".encode(), content_type="text/plain; charset=utf-8")
        publish_raw(amqp, b"<order/>", content_type="application/xml")
        publish_raw(amqp, b"[1]", content_type="application/vnd.shop+json")
        wait_until(lambda: len(seen) == 4)
    assert sorted(map(repr, seen)) == sorted(map(repr, [b"\x00\xff", "å", "<order/>", [1]]))


@in_both
@pytest.mark.parametrize(
    ("error", "calls", "parked", "left"),
    [
        (Discard("not ours"), [(0, False)], 0, 0),
        (Park("look at this"), [(0, False)], 1, 0),
        (Requeue("try another"), [(0, False), (0, True)], 1, 0),
        (Retry("later"), [(0, False), (1, True), (2, True)], 1, 0),
        (Halt("enough"), [(0, False)], 0, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_callback_decides_its_messages_outcome_by_an_exception(consumer_settings, amqp, error, calls, parked, left):
    consumer, seen = failing_consumer(consumer_settings, error)
    with consuming(consumer):
        publish_raw(amqp)
        wait_until(lambda: len(seen) == len(calls) and not consumer.figures()["in_hand"])
    assert seen == calls
    wait_until(lambda: (length(amqp, PARKED), length(amqp, QUEUE)) == (parked, left))


@in_both
def test_an_exception_after_an_ack_does_not_requeue_the_message(consumer_settings, amqp):
    acks = []

    def callback(message):
        acks.append((message.ack(), message.ack(), message.settled))
        raise LookupError("in the middle of the second chunk")

    with consuming(Consumer(consumer_settings(), "orders", callback)) as consumer:
        publish_raw(amqp)
        wait_until(lambda: consumer.counts["late"])
    assert acks == [(True, False, True)]
    assert consumer.counts == {"done": 1, "late": 1}
    assert (length(amqp, QUEUE), length(amqp, PARKED)) == (0, 0)


def test_properties_the_broker_would_act_on_are_moved_to_headers_in_parking(consumer_settings, amqp):
    consumer, _ = failing_consumer(consumer_settings, Park("look"))
    with consuming(consumer):
        amqp.queue("others")
        amqp.channel.queue_bind("others", "shop_test", "others")
        user = urlsplit(consumer_settings().url).username
        publish_raw(amqp, user_id=user, expiration="60000", headers={"CC": ["others"], "x-death": [{"count": 99}]})
        properties, _ = take(amqp, PARKED)
    assert length(amqp, "others") == 1
    assert (properties.user_id, properties.expiration) == (None, None)
    kept = {name: value for name, value in properties.headers.items() if name.startswith("consumer-kept-")}
    assert kept == {"consumer-kept-user_id": user, "consumer-kept-expiration": "60000", "consumer-kept-CC": ["others"]}


def test_a_message_with_oversized_headers_and_error_is_parked(consumer_settings, amqp):
    consumer, _ = failing_consumer(consumer_settings, LookupError("x" * 500_000))
    with consuming(consumer):
        publish_raw(amqp, headers={"much": "x" * 130_000, "consumer-attempts": 2})
        properties, _ = take(amqp, PARKED)
        wait_until(lambda: consumer.counts["park"] == 1)
        assert consumer.counts["reconnected"] == 0
    assert properties.headers["consumer-headers-dropped"] is True
    assert "much" not in properties.headers
    assert properties.headers["consumer-error"].startswith("LookupError: xxx")


@in_both
def test_a_crash_between_parking_and_ack_leaves_two_with_the_same_id(consumer_settings, amqp):
    consumer, seen = failing_consumer(consumer_settings, Park("look"))
    publish, lost = consumer.publisher.publish_async, []

    def publish_and_lose(*args, **keywords):
        future = publish(*args, **keywords)
        future.result(10)
        if not lost:
            lost.append(True)
            gone, link = threading.Event(), consumer._connection._link
            link.call(lambda: (link.reconnect("as by a crash"), gone.set()))
            gone.wait(5)
        return future

    consumer.publisher.publish_async = publish_and_lose
    with consuming(consumer):
        publish_raw(amqp, b'{"order": 17}')
        ids = [take(amqp, PARKED)[0].message_id for _ in range(2)]
        wait_until(lambda: consumer.counts["park"] == 1)
    assert ids[0] == ids[1]
    assert len(seen) == 2
    assert consumer.counts["void"] == 1
    assert length(amqp, QUEUE) == 0


# Prefetch


@in_both
def test_the_prefetch_is_one_at_first_and_grows_to_twenty(consumer_settings, amqp):
    at_once = []
    now = [0]
    lock = threading.Lock()

    def callback(message):
        with lock:
            now[0] += 1
            at_once.append((message.body, now[0]))
        time.sleep(0.005 if message.body < 10 else 0.1)
        with lock:
            now[0] -= 1

    with consuming(Consumer(consumer_settings(prefetch="growing", grows_after=10), "orders", callback)) as consumer:
        assert consumer.figures()["prefetch"] == 1
        for number in range(70):
            publish_raw(amqp, b"%d" % number)
        wait_until(lambda: consumer.counts["done"] == 70)
        assert consumer.figures()["prefetch"] == 20
    assert max(together for body, together in at_once if body < 10) == 1
    assert max(together for body, together in at_once if body > 20) == 20
    assert sorted(body for body, _ in at_once) == list(range(70))


# Failures of the broker


@in_both
@pytest.mark.parametrize("error", [None, Park("look")], ids=["done", "parked"])
def test_a_message_of_a_lost_connection_is_redelivered_and_finished_once(consumer_settings, amqp, broker, error):
    calls = []
    going = threading.Event()

    def callback(message):
        calls.append((message.body, message.redelivered))
        if len(calls) == 1:
            assert going.wait(10)
        if error:
            raise error

    with Proxy.before(broker.amqp_url) as proxy:
        consumer = Consumer(consumer_settings(url=proxy.url(consumer_settings().url)), "orders", callback)
        with consuming(consumer):
            publish_raw(amqp, b"17")
            wait_until(lambda: calls)
            proxy.cut_after(1)
            publish_raw(amqp, b"18")
            wait_until(lambda: not consumer.connected)
            wait_until(lambda: consumer.counts["park" if error else "done"] == 2)
            before = consumer.counts["void"]
            going.set()
            wait_until(lambda: consumer.counts["void"] > before)
    assert [redelivered for body, redelivered in calls if body == 17] == [False, True]
    assert consumer.counts["reconnected"] == 1
    assert length(amqp, QUEUE) == 0
    parked = [take(amqp, PARKED)[1] for _ in range(length(amqp, PARKED))]
    assert sorted(parked) == ([b"17", b"18"] if error else [])


class HoldFirst:
    """A callback that holds the first message until it is released, and parks "poison"."""

    def __init__(self):
        self.seen = []
        self.released = threading.Event()

    def __call__(self, message):
        self.seen.append(message.body)
        if len(self.seen) == 1:
            assert self.released.wait(20)
        elif message.body == "poison":
            raise Park("look")


@in_both
def test_a_deleted_queue_is_redeclared_without_losing_messages_in_hand(consumer_settings, amqp):
    holding = HoldFirst()
    with consuming(Consumer(consumer_settings(), "orders", holding)) as consumer:
        publish_raw(amqp, b"17")
        wait_until(lambda: holding.seen)
        amqp.channel.queue_delete(QUEUE)
        wait_until(lambda: publish_raw(amqp, b"18") or 18 in holding.seen)
        holding.released.set()
        wait_until(lambda: not consumer.figures()["in_hand"] and not consumer.figures()["waiting"])
    assert consumer.counts == {"done": len(holding.seen)}  # no connection was lost, and no ack was void


def test_a_deleted_priority_level_is_redeclared_and_bound(consumer_settings, amqp):
    seen, level = [], f"{QUEUE}.level1"
    settings = consumer_settings(priorities="0-4,5-9")
    with consuming(Consumer(settings, "orders", lambda message: seen.append(message.queue))) as consumer:
        amqp.channel.queue_delete(level)
        wait_until(lambda: consumer.publisher.publish({}, "orders", priority=9) or level in seen)
    assert consumer.counts["reconnected"] == 0


@in_both
def test_a_deleted_parking_queue_is_redeclared(consumer_settings, amqp):
    holding = HoldFirst()
    with consuming(Consumer(consumer_settings(), "orders", holding)) as consumer:
        publish_raw(amqp, b"17")
        wait_until(lambda: holding.seen)
        amqp.channel.queue_delete(PARKED)
        publish_raw(amqp, b'"poison"')
        assert take_when_declared(amqp, PARKED) == b'"poison"'
        wait_until(lambda: consumer.counts["park"])
        holding.released.set()
        wait_until(lambda: consumer.counts["done"])
    assert holding.seen == [17, "poison"]
    assert consumer.counts == {"done": 1, "park": 1}


def take_when_declared(amqp, queue):
    """Take one message from a queue that may have to be declared first."""
    wait_until(lambda: queue_exists(amqp, queue))
    return take(amqp, queue)[1]


def test_a_parking_queue_redeclared_by_others_with_other_arguments_is_an_error(consumer_settings, amqp):
    consumer, _ = failing_consumer(consumer_settings, Park("look"))
    with consuming(consumer):
        amqp.channel.queue_delete(PARKED)
        amqp.queue(PARKED, arguments={"x-max-length": 5})
        publish_raw(amqp)
        ended, error = consumer.wait(10)
    assert ended
    assert isinstance(error, Refused)
    assert f"the queue {PARKED}" in str(error)
    wait_until(lambda: length(amqp, QUEUE) == 1)


@pytest.fixture
def full(amqp, broker, vhost):
    """Return a function that fills a queue, so that it refuses messages."""

    def fill(queue):
        amqp.publish(queue, 3)
        body = {"pattern": f"^{re.escape(queue)}$", "definition": {"max-length": 1, "overflow": "reject-publish"}}
        httpx.put(f"{broker.management_url}/api/policies/{vhost}/full", json=body, trust_env=False).raise_for_status()
        wait_until(lambda: refuses(queue))

    def refuses(queue):
        try:
            amqp.publish(queue, 1)
        except pika.exceptions.NackError:
            return True
        return False

    return fill


def handler_of(calls):
    """Return a callback that parks "poison…", fails for the first "flaky", and succeeds for the others."""

    def callback(message):
        calls[message.body] += 1
        if str(message.body).startswith("poison"):
            raise Park("look")
        if message.body == "flaky" and not message.attempts:
            raise LookupError

    return callback


@in_both
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_messages_for_a_full_parking_queue_wait_with_their_consumer(consumer_settings, amqp, full, caplog, queue_type):
    calls, published = Counter(), []
    settings = consumer_settings(queue_type=queue_type, threads=1, prefetch=4)
    consumer = Consumer(settings, "orders", handler_of(calls))
    publish = consumer.publisher.publish_async
    consumer.publisher.publish_async = lambda key, *rest, **more: published.append(key) or publish(key, *rest, **more)
    with caplog.at_level(logging.INFO), consuming(consumer):
        full(PARKED)
        for body in ("poison 1", "poison 2", "poison 3", "flaky", *range(10)):
            publish_raw(amqp, json.dumps(body).encode())
        wait_until(lambda: consumer.counts["done"] == 11)
        assert consumer.wait(3) == (False, None)
        assert consumer.figures()["kept"] == 3
        assert published.count(PARKED) <= 10
        assert re.search(rf"messages wait for {PARKED} \(\d\): the broker rejected the message", caplog.text)
        assert (length(amqp, QUEUE), consumer.counts["requeue"]) == (0, 0)
        amqp.channel.queue_purge(PARKED)
        wait_until(lambda: consumer.counts["park"], 15)
        wait_until(lambda: amqp.channel.queue_purge(PARKED) and not consumer.figures()["kept"], 60)
        wait_until(lambda: f"no message waits for {PARKED} any more" in caplog.text)
    assert {body: calls[body] for body in calls if str(body).startswith("poison")} == {
        "poison 1": 1, "poison 2": 1, "poison 3": 1,
    }  # fmt: skip
    assert consumer.counts == {"done": 11, "retry": 1, "park": 3}
    assert length(amqp, QUEUE) == 0


def test_a_consumer_takes_no_more_than_its_prefetch_while_messages_wait(consumer_settings, amqp, full):
    calls = Counter()
    consumer = Consumer(consumer_settings(prefetch=2), "orders", handler_of(calls))
    with consuming(consumer):
        full(PARKED)
        for number in range(5):
            publish_raw(amqp, json.dumps(f"poison {number}").encode())
        wait_until(lambda: consumer.figures()["kept"] == 2)
        assert consumer.wait(2) == (False, None)
        assert (len(calls), length(amqp, QUEUE)) == (2, 3)
    assert consumer.counts == {"requeue": 2, "unpublished": 2}
    wait_until(lambda: length(amqp, QUEUE) == 5)


@in_both
def test_a_waiting_message_of_a_lost_connection_is_redelivered(consumer_settings, amqp, full):
    calls = Counter()
    consumer = Consumer(consumer_settings(), "orders", handler_of(calls))
    with consuming(consumer):
        full(PARKED)
        publish_raw(amqp, b'"poison"')
        wait_until(lambda: consumer.figures()["kept"])
        link = consumer._connection._link
        link.call(lambda: link.reconnect("as by a crash"))
        wait_until(lambda: consumer.counts["void"] and calls["poison"] == 2, 15)
        amqp.channel.queue_purge(PARKED)
        wait_until(lambda: consumer.counts["park"], 15)
    assert (length(amqp, PARKED), length(amqp, QUEUE)) == (1, 0)


@in_both_hanging
def test_a_hung_callback_ends_the_consumer_once_its_message_is_parked(consumer_settings, amqp, full):
    release = threading.Event()
    settings = consumer_settings(time_limit=0.3, policy=Policy(Outcome.PARK))
    consumer = Consumer(settings, "orders", lambda message: release.wait(60))
    with consuming(consumer):
        full(PARKED)
        publish_raw(amqp)
        wait_until(lambda: consumer.wait(0.1)[0] or consumer.figures()["kept"])
        assert consumer.wait(2) == (False, None)
        amqp.channel.queue_purge(PARKED)
        assert isinstance(consumer.wait(15)[1], Hung)
        release.set()
    assert consumer.counts == {"park": 1}
    assert length(amqp, PARKED) == 1


@pytest.mark.parametrize("resumes", ["before the broker answers", "when it has paused"])
def test_a_pause_while_the_prefetch_changes_leaves_one_consumer(consumer_settings, amqp, resumes):
    def grow_and_pause():
        """Grow the prefetch, and pause before the broker has answered."""
        connection._prefetch._grown = True
        connection._sync()
        connection.set_paused(True)

    with consuming(Consumer(consumer_settings(prefetch="growing"), "orders", lambda message: None)) as consumer:
        connection = consumer._connection
        connection._link.call(grow_and_pause)
        wait_until(lambda: connection.paused)
        if resumes == "when it has paused":
            wait_until(lambda: not connection._syncing)
        connection.set_paused(False)
        publish_raw(amqp)
        wait_until(lambda: consumer.counts["done"] and not connection._syncing)
        assert consumer.figures()["prefetch"] == 20
        assert amqp.channel.queue_declare(QUEUE, passive=True).method.consumer_count == 1


@in_both
def test_an_ack_fails_once_its_connection_is_given_up(consumer_settings, amqp, broker):
    acks, given_up = [], threading.Event()

    def callback(message):
        if not acks:
            acks.append("begun")
            assert given_up.wait(10)
            acks.append(message.ack())

    with Proxy.before(broker.amqp_url) as proxy:
        consumer = Consumer(consumer_settings(url=proxy.url(consumer_settings().url)), "orders", callback)
        with consuming(consumer):
            publish_raw(amqp)
            wait_until(lambda: acks)
            proxy.delay(1)  # the broker's close takes a second
            link = consumer._connection._link
            link.call(lambda: (link.reconnect("for a test"), given_up.set()))
            wait_until(lambda: len(acks) == 2)
            proxy.forward()
            wait_until(lambda: consumer.counts["done"])
    assert acks == ["begun", False]
    assert consumer.counts["void"] == 1


@in_both
def test_messages_that_wait_too_long_for_a_thread_are_requeued(consumer_settings, amqp, monkeypatch):
    monkeypatch.setattr("guardian_consumers._source.OVERDUE_SECONDS", 0.2)
    holding = HoldFirst()
    consumer = Consumer(consumer_settings(threads=1), "orders", holding)
    waiting = consumer._connection.waiting
    arrived, place = [], waiting.put
    waiting.put = lambda delivery: (arrived.append(delivery), place(delivery))
    with consuming(consumer):
        for number in range(5):
            publish_raw(amqp, b"%d" % number)
        wait_until(lambda: not consumer.wait(0.1)[0] and length(amqp, QUEUE) == 4)  # another consumer may get them
        assert consumer.wait(1.2) == (False, None)
        assert len(arrived) == 5  # it rechecked without fetching them repeatedly
        holding.released.set()
        wait_until(lambda: not consumer.wait(0.1)[0] and consumer.counts["done"] == 5)
    assert sorted(holding.seen) == list(range(5))


def test_login_errors_do_not_show_the_password(consumer_settings):
    for url in (
        consumer_settings().url.replace("guardian:", "guardian:wrong-"),
        consumer_settings().url.rpartition("/")[0] + "/nowhere",
    ):
        with pytest.raises(Refused, match="RABBIT_URL") as raised:
            Consumer(consumer_settings(url=url), "orders", lambda message: None).run()
        assert "wrong-" not in str(raised.value)


@in_both
def test_a_consumer_waiting_for_its_broker_can_be_stopped(consumer_settings, caplog):
    consumer = Consumer(consumer_settings(url="amqp://127.0.0.1:1"), "orders", lambda message: None)
    consumer.start()
    wait_until(lambda: "connecting again" in caplog.text)
    consumer.stop()
    begun = time.monotonic()
    assert consumer.wait(5) == (True, None)
    assert consumer.close()
    assert time.monotonic() - begun < 3


def test_a_consumer_can_be_stopped_while_it_connects():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        consumer = Consumer(settings_at(f"amqp://127.0.0.1:{silent.getsockname()[1]}"), "orders", lambda message: None)
        consumer.start()
        with silent.accept()[0]:
            consumer.stop()
            assert consumer.wait(5) == (True, None)
            assert consumer.close()
    assert consumer.wait(0.01) == (False, None)


@in_both
def test_a_consumer_that_closes_while_callbacks_end_repeats_no_message(consumer_settings, amqp):
    seen = []

    def callback(message):
        time.sleep(random.uniform(0, 0.004))
        seen.append(message.body)

    settings = consumer_settings()
    with consuming(Consumer(settings, "orders", callback)):
        pass
    for number in range(300):
        publish_raw(amqp, b"%d" % number)
    while len(seen) < 300:
        enough = min(len(seen) + 30, 300)
        with consuming(Consumer(settings, "orders", callback)):
            wait_until(lambda enough=enough: len(seen) >= enough)
    assert sorted(seen) == list(range(300))
    assert length(amqp, QUEUE) == 0


@in_both
def test_closing_in_a_hurry_does_not_wait_for_the_broker(consumer_settings, broker):
    with Proxy.before(broker.amqp_url) as proxy:
        consumer = Consumer(consumer_settings(url=proxy.url(consumer_settings().url)), "orders", lambda message: None)
        consumer.start()
        wait_until(lambda: consumer.connected)
        consumer.publisher.publish({}, "nobody")
        proxy.delay(60)
        begun = time.monotonic()
        assert consumer.close(is_forced=lambda: True)
        assert time.monotonic() - begun < 8  # each of its two connections would wait for 10


def test_a_consumer_retries_while_a_proxy_has_no_broker_behind_it(consumer_settings, broker):
    with Proxy.before(broker.amqp_url) as proxy:
        proxy.close_next(1)
        with consuming(
            Consumer(consumer_settings(url=proxy.url(consumer_settings().url)), "orders", lambda message: None)
        ) as consumer:
            assert consumer.wait(0.01) == (False, None)
            assert proxy.connections == 2


async def ship_later(message):
    """Do nothing."""


def ship_each(message):
    """Yield nothing."""
    yield


def test_a_plain_function_is_no_callback_of_an_async_consumer():
    with pytest.raises(SettingsError, match="the callback ship_each is not a coroutine function"):
        AsyncConsumer(settings_at("amqp://x"), "orders", ship_each)


async def ship_each_later(message):
    """Yield nothing."""
    yield


@pytest.mark.parametrize("callback", [ship_later, ship_each, ship_each_later])
def test_a_callback_that_would_do_nothing_is_an_error(callback):
    for create in (lambda: Consumer(settings_at("amqp://x"), "orders", callback), lambda: in_transaction(callback)):
        with pytest.raises(SettingsError, match=f"the callback {callback.__name__} is a coroutine or generator"):
            create()


@pytest.mark.parametrize("callback", [ship_later, ship_each, ship_each_later])
@pytest.mark.parametrize("decorate", [lambda callback: callback, with_fresh_connections])
def test_a_callback_that_returns_what_nothing_runs_stops_the_consumer(consumer_settings, amqp, callback, decorate):
    consumer = Consumer(consumer_settings(), "orders", decorate(lambda message: callback(message)))
    with consuming(consumer):
        publish_raw(amqp)
        _, error = consumer.wait(10)
    assert isinstance(error, Halted)
    assert length(amqp, QUEUE) == 1


def test_a_callback_over_its_time_limit_is_parked_with_its_stack(consumer_settings, amqp):
    release = threading.Event()

    def callback(message):
        if message.body == 17:
            release.wait(60)

    policy = Policy(Outcome.PARK)
    consumer = Consumer(consumer_settings(time_limit=0.5, policy=policy), "orders", callback)
    try:
        with consuming(consumer):
            publish_raw(amqp, b"17")
            publish_raw(amqp, b"18")
            ended, error = consumer.wait(10)
            assert consumer.close() is False
        properties, _ = take(amqp, PARKED)
    finally:
        release.set()
    assert ended
    assert isinstance(error, Hung)
    assert "release.wait(60)" in properties.headers["consumer-traceback"]
    assert "TimeLimitExceeded" in properties.headers["consumer-error"]
    assert length(amqp, QUEUE) == 0


def test_a_task_over_its_time_limit_is_cancelled_and_the_consumer_goes_on(consumer_settings, amqp):
    cancelled = []

    async def callback(message):
        if message.body == 17:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(message.settled)
                raise
        elif message.body == 18:
            raise asyncio.CancelledError  # of a task that it awaits

    settings = consumer_settings(time_limit=0.5, policy=Policy(Outcome.PARK))
    with consuming(AsyncConsumer(settings, "orders", callback)) as consumer:
        publish_raw(amqp, b"17")
        assert consumer.wait(1) == (False, None)
        properties, _ = take(amqp, PARKED)
        publish_raw(amqp, b"18")
        assert take(amqp, PARKED)[0].headers["consumer-error"].startswith("asyncio.exceptions.CancelledError")
        publish_raw(amqp, b"19")
        wait_until(lambda: consumer.counts["done"])
    assert cancelled == [True]
    assert "await asyncio.sleep(60)" in properties.headers["consumer-traceback"]
    assert "TimeLimitExceeded" in properties.headers["consumer-error"]
    assert consumer.counts == {"park": 2, "done": 1}


def test_a_task_that_returns_after_its_time_limit_is_not_reported_as_done(consumer_settings, amqp):
    outcomes = []

    async def callback(message):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    consumer = AsyncConsumer(consumer_settings(time_limit=0.2, policy=Policy(Outcome.PARK)), "orders", callback)
    consumer.listeners.append(lambda message, outcome, took: outcomes.append(outcome))
    with consuming(consumer):
        publish_raw(amqp)
        consumer.wait(1)
        take(amqp, PARKED)
    assert outcomes == [None]


def test_a_task_that_is_cancelled_by_the_shutdown_may_clean_up(consumer_settings, amqp):
    steps = []

    async def callback(message):
        steps.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            steps.append("cleaned up")

    consumer = AsyncConsumer(consumer_settings(grace=0.1), "orders", callback)
    consumer.start()
    wait_until(lambda: consumer.connected)
    publish_raw(amqp)
    wait_until(lambda: steps)
    assert consumer.close() is False
    assert steps == ["begun", "cleaned up"]


def test_messages_in_progress_are_redelivered_if_the_program_ends_without_waiting_for_run(consumer_settings, amqp):
    begun = []

    async def callback(message):
        begun.append(message)
        await asyncio.sleep(60)

    consumer = AsyncConsumer(consumer_settings(policy=Policy(Outcome.DISCARD)), "orders", callback)

    async def program():
        running = asyncio.create_task(consumer.run())
        while not consumer.connected:
            await asyncio.sleep(0.01)
        for _ in range(10):
            publish_raw(amqp)
        while len(begun) < 10:
            await asyncio.sleep(0.01)
        return running

    asyncio.run(program())
    assert consumer.counts == {}
    assert length(amqp, QUEUE) == 10


def test_running_no_consumers_is_an_error():
    with pytest.raises(ValueError, match="no consumers"):
        run_all([])
    with pytest.raises(ValueError, match="no consumers"):
        asyncio.run(run_all_async([]))


def test_coroutines_publish_at_once_and_a_cancelled_run_ends_after_its_callbacks(consumer_settings, amqp):
    seen = []

    async def callback(message):
        if not message.attempts and message.body == 7:
            raise LookupError
        await message.publish(message.body, "packing", mandatory=True)
        seen.append(message.body)

    async def program():
        consumer = AsyncConsumer(consumer_settings(), "orders", callback)
        packing = AsyncConsumer(consumer_settings(), "packing", ship_later)
        running = asyncio.create_task(run_all_async([consumer, packing]))
        while not (consumer.connected and packing.connected):
            await asyncio.sleep(0.01)
        async with AsyncPublisher(consumer_settings()) as publisher:
            await asyncio.gather(*(publisher.publish(number, "orders", mandatory=True) for number in range(50)))
            with pytest.raises(Unroutable):
                await publisher.publish({}, "nobody", mandatory=True)
        while consumer.counts["done"] < 50:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return consumer, packing

    consumer, packing = asyncio.run(program())
    assert sorted(seen) == list(range(50))
    assert (consumer.counts["retry"], consumer.connected, packing.connected) == (1, False, False)


@pytest.mark.parametrize("late", [None, Park("too late")], ids=["returns", "raises"])
def test_a_callback_that_ends_while_its_message_is_parked_changes_nothing(consumer_settings, amqp, late):
    parking, ended = threading.Event(), threading.Event()
    acks = []

    def callback(message):
        assert parking.wait(10)
        acks.append((message.settled, message.ack()))
        ended.set()
        if late:
            raise late

    consumer = Consumer(consumer_settings(time_limit=0.2, policy=Policy(Outcome.PARK)), "orders", callback)
    publish = consumer.publisher.publish_async

    def publish_late(*args, **keywords):
        if not parking.is_set():
            parking.set()
            assert ended.wait(10)
            wait_until(lambda: not consumer.figures()["in_hand"])
        return publish(*args, **keywords)

    consumer.publisher.publish_async = publish_late
    with consuming(consumer):
        publish_raw(amqp)
        assert isinstance(consumer.wait(10)[1], Hung)
        consumer.close()
    assert acks == [(True, False)]
    assert consumer.counts == {"park": 1, **({"late": 1} if late else {})}
    assert (length(amqp, PARKED), length(amqp, QUEUE)) == (1, 0)


@in_both
def test_the_time_limit_excludes_parking_the_message(consumer_settings, amqp):
    consumer, seen = failing_consumer(consumer_settings, Park("look"), time_limit=0.2)
    publish, slowly = consumer.publisher.publish_async, threading.Event()

    def publish_slowly(*args, **keywords):
        slowly.wait(10)
        return publish(*args, **keywords)

    consumer.publisher.publish_async = publish_slowly
    with consuming(consumer):
        publish_raw(amqp)
        wait_until(lambda: seen)
        assert consumer.wait(1) == (False, None)
        slowly.set()
        wait_until(lambda: consumer.counts["park"])
        assert consumer.wait(0.01) == (False, None)
    assert (length(amqp, PARKED), length(amqp, QUEUE)) == (1, 0)


class BrokenLimiter:
    """A limiter that violates its contract by raising."""

    def prefetch(self, most):
        return most

    def take(self, timeout):
        raise LookupError("in the toolkit")

    def give_back(self):
        """Do nothing."""


@in_both
@pytest.mark.parametrize(
    ("limiter", "policy"),
    [(BrokenLimiter(), Policy()), (None, Policy(by_error={LookupError: "in the toolkit"}))],
    ids=["limiter", "policy"],
)
def test_an_error_outside_the_callback_stops_the_consumer(consumer_settings, amqp, limiter, policy):
    def callback(message):
        raise LookupError("no order")

    with consuming(Consumer(consumer_settings(policy=policy), "orders", callback, limiter=limiter)) as consumer:
        publish_raw(amqp)
        ended, error = consumer.wait(10)
    assert ended
    assert type(error) is ConsumerError
    assert "a worker failed" in str(error)
    assert "in the toolkit" in str(error)
    wait_until(lambda: length(amqp, QUEUE) == 1)


@in_both
def test_an_error_during_shutdown_is_raised(consumer_settings, amqp):
    release = threading.Event()

    def callback(message):
        assert release.wait(10)
        raise Halt("enough")

    consumer = Consumer(consumer_settings(), "orders", callback)
    running = in_background(consumer.run)
    wait_until(lambda: consumer.connected)
    publish_raw(amqp)
    wait_until(lambda: consumer.figures()["in_hand"])
    consumer.stop()
    wait_until(consumer._connection.stopping.is_set)
    release.set()
    with pytest.raises(Halted, match="enough"):
        running.result(10)


@in_both
def test_run_all_stops_started_consumers_if_another_fails_to_start(consumer_settings, monkeypatch):
    first, second = (Consumer(consumer_settings(), key, lambda message: None) for key in ("orders", "returns"))
    monkeypatch.setattr(second, "start", lambda: (wait_until(lambda: first.connected), pytest.fail("no more threads")))
    with pytest.raises(pytest.fail.Exception, match="no more threads"):
        run_all([first, second])
    assert not first.connected
    assert not first._connection._link._thread.is_alive()


# The connection's thread


def test_an_error_while_connecting_stops_the_consumer(consumer_settings):
    consumer = Consumer(consumer_settings(), "orders", lambda message: None)
    with raising(_link, "Connection", RuntimeError("no more sockets")):
        consumer.start()
        ended, error = consumer.wait(5)
        consumer.close()
    assert ended
    assert "no more sockets" in str(error)


def test_a_vhost_at_its_connection_limit_is_retried(consumer_settings, management, vhost):
    management._put("vhost-limits", vhost, "max-connections", json={"value": 0})
    consumer = Consumer(consumer_settings(), "orders", lambda message: None)
    consumer.start()
    try:
        wait_until(lambda: consumer._connection._link._failures)
        assert consumer.wait(0.01) == (False, None)
        management._delete("vhost-limits", vhost, "max-connections")
        wait_until(lambda: consumer.connected)
    finally:
        consumer.close()


@in_both_hanging
@pytest.mark.slow
def test_a_callback_longer_than_three_heartbeats_loses_no_connection(consumer_settings, amqp):
    with consuming(
        Consumer(consumer_settings(url=consumer_settings().url + "?heartbeat=1"), "orders", lambda m: time.sleep(4))
    ) as consumer:
        publish_raw(amqp)
        wait_until(lambda: consumer.counts["done"] == 1)
        assert consumer.counts["reconnected"] == 0


# A Pulse user


@in_both
def test_a_pulse_user_consumes_retries_and_parks_under_its_own_names(pulse_settings, management, vhost, amqp):
    settings = pulse_settings(queue_type="quorum")
    name = settings.pulse_user
    seen = []

    def callback(message):
        seen.append((message.attempts, message.routing_key))
        if message.body == "poison":
            raise LookupError("no")
        message.publish("poison", "orders", mandatory=True)

    with consuming(Consumer(settings, "orders", callback)) as consumer:
        with Publisher(settings) as publisher:
            publisher.publish("first", "orders", mandatory=True)
        wait_until(lambda: consumer.counts["park"] == 1)
    key = f"exchange/{name}/shop_test_orders"
    assert seen == [(0, key), (0, key), (1, key), (2, key)]
    queue = f"queue/{name}/shop_test_orders"
    assert queue_names(management, vhost) == {
        queue, f"{queue}.parked", f"{queue}.retry.50ms", f"{queue}.retry.200ms",
    }  # fmt: skip
    properties, body = take(amqp, f"{queue}.parked")
    assert (json.loads(body), properties.headers["consumer-error"]) == ("poison", "LookupError: no")


def test_a_pulse_user_without_the_setting_is_refused_with_the_exchanges_name(pulse_settings):
    with pytest.raises(Refused, match=r"the exchange shop_test: .*ACCESS_REFUSED|access to exchange 'shop_test'"):
        Consumer(pulse_settings(pulse_user=None), "orders", lambda message: None).run()


# As a separate process


PROGRAM = """
import asyncio, os, time
def orders(message):
    if message.body == "poison":
        raise LookupError("no")
    print("begun", flush=True)
    if message.body == "forward":
        message.publish({}, "elsewhere")
    time.sleep(float(os.environ.get("SLEEP", "0.3")))
    with open(os.environ["DONE"], "a") as done:
        done.write(f"{message.body}\\n")
"""
TASKS = (
    PROGRAM.replace("def orders", "async def tasks")
    .replace("message.publish", "await message.publish")
    .replace("time.sleep", "await asyncio.sleep")
)
in_both_kinds = pytest.mark.parametrize("function", ["shop:orders", "shop:tasks=orders"], ids=["threads", "asyncio"])


@pytest.fixture
def program(consumer_settings, tmp_path):
    """Return a function that starts a consumer as a separate process."""
    (tmp_path / "shop.py").write_text(PROGRAM + TASKS)
    started = []

    def start(*arguments, command=("-m", "guardian_consumers"), **environment):
        process = subprocess.Popen(
            [sys.executable, *command, *arguments],
            cwd=PROJECT,
            env={
                **without_django(),
                "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "RABBIT_URL": consumer_settings().url, "DONE": str(tmp_path / "done"),
                "RABBIT_EXCHANGE_NAME": "shop_test", "RABBIT_PREFETCH": "grown",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@in_both_kinds
@pytest.mark.parametrize(
    "command", [("-m", "guardian_consumers"), ("manage.py", "consume")], ids=["alone", "manage.py"]
)
def test_sigterm_finishes_messages_in_hand_and_leaves_the_rest(program, amqp, tmp_path, command, function):
    process = program(function, command=command, RABBIT_THREADS="5")
    done = tmp_path / "done"
    wait_until(lambda: queue_exists(amqp, QUEUE), 60)  # Django starts slowly
    for number in range(40):
        publish_raw(amqp, b"%d" % number)
    wait_until(lambda: done.exists() and done.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, process.stdout.read()
    handled = [int(line) for line in done.read_text().split()]
    assert 5 <= len(handled) < 40
    left = [int(take(amqp, QUEUE)[1]) for _ in range(40 - len(handled))]
    assert sorted(handled + left) == list(range(40))
    assert length(amqp, QUEUE) == 0


@in_both_kinds
def test_a_second_signal_ends_a_process_with_a_slow_callback(program, amqp, function):
    process = program(function, SLEEP="60")
    wait_until(lambda: queue_exists(amqp, QUEUE))
    publish_raw(amqp, b"17")
    assert any(line == "begun\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    assert any("waiting for running callbacks" in line for line in process.stdout)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert take(amqp, QUEUE)[1] == b"17"


@pytest.mark.slow
def test_exit_codes_tell_broker_settings_and_callback_errors_apart(program, amqp):
    amqp.queue("shop_test_taken", arguments={"x-max-length": 5})
    cases = [
        (program("shop:orders=taken"), 3, "the queue shop_test_taken"),
        (program("shop:nothing"), 2, "shop has no function nothing"),
        (program("nowhere:orders"), 2, "module nowhere does not exist"),
        (program("shop:orders", RABBIT_EXCHANGE_NAME=""), 2, "RABBIT_EXCHANGE_NAME isn't set"),
        (program("shop:orders", "shop:orders"), 2, "two functions have the same queue"),
    ]
    halting = program("shop:orders", "--on-error", "halt")
    wait_until(lambda: queue_exists(amqp, QUEUE))
    publish_raw(amqp, b'"poison"')
    for process, code, expected in [*cases, (halting, 1, "LookupError: no")]:
        out, _ = process.communicate(timeout=20)
        assert (process.returncode, expected in out) == (code, True), out
    assert take(amqp, QUEUE)[1] == b'"poison"'


# On a node of its own


@pytest.fixture
def node_settings(own_node):
    """Return a function that returns settings for a vhost of the node."""
    management = Management(own_node.management_url)
    name = f"test-{uuid.uuid4().hex[:12]}"
    management.create_vhost(name)
    yield lambda **changes: settings_at(own_node.amqp_url, name, **changes)
    management.delete_vhost(name)
    management.close()


def connect(settings):
    """Connect to the vhost of these settings."""
    base, _, vhost = settings.url.rpartition("/")
    return Amqp(base, vhost)


@in_both
@pytest.mark.soak
def test_after_an_acknowledgement_timeout_the_late_ack_is_void(node_settings, own_node):
    calls = []

    def callback(message):
        calls.append(message.redelivered)
        if len(calls) == 1:
            wait_until(lambda: consumer.counts["reconnected"] == 1)

    # The configuration file has no key for the second, the interval of the check.
    own_node.eval("[application:set_env(rabbit, Key, 1000) || Key <- [consumer_timeout, channel_tick_interval]]")
    try:
        # RabbitMQ 4.3 has no such timeout for classic queues.
        with consuming(Consumer(node_settings(queue_type="quorum"), "orders", callback)) as consumer:
            publish_raw(connect(node_settings()))
            wait_until(lambda: consumer.counts["done"] == 1, 20)
            wait_until(lambda: consumer.counts["void"] == 1, 20)
    finally:
        own_node.eval("application:set_env(rabbit, consumer_timeout, 1800000)")
        own_node.eval("application:set_env(rabbit, channel_tick_interval, 60000)")
    assert calls == [False, True]
    assert consumer.counts["reconnected"] == 1


@in_both
def test_during_an_alarm_messages_to_park_stay_in_hand_until_it_ends(node_settings, own_node):
    fail, tries = threading.Event(), Counter()

    def callback(message):
        tries[message.body] += 1
        if str(message.body).startswith("slow"):
            assert fail.wait(20)
        if str(message.body).endswith("poison"):
            raise Park("look")

    with consuming(Consumer(node_settings(publish_timeout=1.5, threads=20), "orders", callback)) as consumer:
        amqp = connect(node_settings())
        publish_raw(amqp, b'"poison"')
        publish_raw(amqp, b'"slow poison"')
        publish_raw(amqp, b'"slower poison"')
        for number in range(50):
            publish_raw(amqp, b"%d" % number)
        wait_until(lambda: consumer.counts["done"] == 50)
        wait_until(lambda: consumer.counts["park"] == 1)
        take(amqp, PARKED)
        with memory_alarm(own_node):
            wait_until(lambda: publishing_is_refused(consumer.publisher))
            assert consumer.connected
            fail.set()
            assert consumer.wait(3) == (False, None)  # twice the publish timeout
            assert (consumer.figures()["kept"], length(amqp, PARKED)) == (2, 0)
        wait_until(lambda: consumer.counts["park"] == 3, 30)
        assert {take(amqp, PARKED)[1] for _ in range(2)} == {b'"slow poison"', b'"slower poison"'}
        assert length(amqp, PARKED) == 0
    assert consumer.counts == {"done": 50, "park": 3}
    assert (tries["slow poison"], tries["slower poison"]) == (1, 1)


def test_during_an_alarm_a_single_thread_goes_on_with_other_messages(node_settings, own_node):
    calls = Counter()
    with consuming(Consumer(node_settings(threads=1), "orders", handler_of(calls))) as consumer:
        amqp = connect(node_settings())
        publish_raw(amqp, b'"poison 0"')  # the publisher connects
        wait_until(lambda: consumer.counts["park"])
        consumer._connection.set_paused(True)
        wait_until(lambda: not consumer._connection._channels[0].consumer_tag)
        for body in ("poison 1", "poison 2", 1, 2):
            publish_raw(amqp, json.dumps(body).encode())
        with memory_alarm(own_node):
            consumer._connection.set_paused(False)
            wait_until(lambda: consumer.counts["done"] == 2, 10)
            assert consumer.figures()["kept"] == 2
        wait_until(lambda: consumer.counts["park"] == 3, 20)
    assert set(calls.values()) == {1}


@in_both_hanging
def test_during_an_alarm_a_hung_callback_does_not_prevent_stopping(node_settings, own_node):
    release = threading.Event()
    settings = node_settings(time_limit=0.2, publish_timeout=0.3, policy=Policy(Outcome.PARK))
    consumer = Consumer(settings, "orders", lambda message: release.wait(60))
    with consuming(consumer), Publisher(settings) as other:
        amqp = connect(node_settings())
        with memory_alarm(own_node):
            wait_until(lambda: publishing_is_refused(other))
        publish_raw(amqp)
        wait_until(lambda: consumer.figures()["in_hand"])
        try:
            with memory_alarm(own_node):
                waiting = in_background(consumer.wait)
                wait_until(lambda: consumer._time_limit.threads)
                consumer.stop()
                assert waiting.result(5) == (True, None)
        finally:
            release.set()
        wait_until(lambda: length(amqp, PARKED) == 1)
        assert isinstance(consumer.wait(10)[1], Hung)
    assert consumer.counts == {"park": 1}


@in_both_kinds
def test_during_an_alarm_sigterm_ends_a_callback_that_waits_for_a_confirm(node_settings, own_node, program, function):
    with consuming(Consumer(node_settings(), "orders", pytest.fail)):
        pass
    amqp = connect(node_settings())
    publish_raw(amqp, b'"forward"')
    with memory_alarm(own_node):
        process = program(function, RABBIT_URL=node_settings().url)
        assert any("accepts no messages" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert take(amqp, QUEUE)[1] == b'"forward"'


def publishing_is_refused(publisher):
    """Return whether the broker refuses messages: it may still accept the first one during an alarm."""
    try:
        publisher.publish({}, "nobody")
    except NotPublished as error:
        return "runs short" in str(error)
    return False


@in_both
@pytest.mark.soak
def test_a_broker_restart_under_load_repeats_only_unacknowledged_messages(node_settings, own_node):
    handled, published, uncertain = [], [], set()
    numbers = itertools.count()
    enough = threading.Event()

    def callback(message):
        time.sleep(random.uniform(0.02, 0.06))  # slower than publishing, so there is always work in hand
        handled.append((message.body, message.redelivered))

    consumer = Consumer(node_settings(publish_timeout=60), "orders", callback)

    def publish():
        while not enough.is_set():
            number = next(numbers)
            while True:
                try:
                    consumer.publisher.publish(number, "orders", mandatory=True)
                    break
                except NotPublished as error:
                    if error.unknown:
                        uncertain.add(number)
                    time.sleep(0.05)
            published.append(number)
            time.sleep(0.004)

    with consuming(consumer):
        publishing = [in_background(publish) for _ in range(4)]
        wait_until(lambda: consumer.counts["done"] > 200)
        acknowledged = {body for body, _ in handled[:100]}  # at most the last twenty are in hand
        own_node.restart()
        before = len(published)
        wait_until(lambda: len(published) > before + 200, 60)
        enough.set()
        for call in publishing:
            call.result(60)
        wait_until(lambda: {body for body, _ in handled} >= set(published), 60)
        wait_until(lambda: not consumer.figures()["in_hand"])
        assert length(connect(node_settings()), QUEUE) == 0
        assert consumer.counts["reconnected"] == 1
    assert consumer.counts["void"] > 0  # messages were in hand or prefetched when the connection was lost
    assert {body for body, _ in handled} == set(published)
    times = Counter(body for body, _ in handled)
    twice = {body for body, count in times.items() if count > 1} - uncertain
    assert not twice & acknowledged
    assert len(twice) <= 20  # at most the prefetch was unacknowledged
