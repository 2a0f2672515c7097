import time

import pytest

from rabbit import fetching
from rabbit.amqp import Session
from rabbit.errors import NotOnBroker
from rabbit.fetching import Bounds, Fetch
from tests.support.toolbox import wait_until_equal

PLENTY = Bounds(20_000, 64 * 1024 * 1024, 20)
KINDS = ["classic", "quorum"]


@pytest.fixture
def session(broker, vhost):
    with Session(broker.amqp_url, vhost) as opened:
        yield opened


@pytest.fixture
def fill(amqp, session):
    """Declare a queue with this number of messages, and wait until the broker counts them."""

    def fill(name, messages, size=10, **arguments):
        amqp.channel.queue_declare(name, durable=True, arguments=arguments)
        for number in range(messages):
            amqp.channel.basic_publish("", name, b"%d" % number + b"." * size)
        wait_until_equal(lambda: session.declare_passively(name).ready, messages)

    return fill


def fetched(fetch, ready, bounds=PLENTY):
    return [int(message.body.rstrip(b".")) for batch in fetch.batches(ready, bounds) for message in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_all_messages_are_fetched_in_order(session, fill, kind):
    fill("q", 1500, **{"x-queue-type": kind})
    fetch = Fetch(session, "q", queue_type=kind)
    assert fetched(fetch, 1500) == list(range(1500))
    assert fetch.declare_passively().ready == 0
    assert fetch.delete_queue() == 0
    with pytest.raises(NotOnBroker):
        session.declare_passively("q")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_put_back_is_in_the_queue_again(session, fill, kind):
    fill("q", 300, **{"x-queue-type": kind})
    fetch = Fetch(session, "q", queue_type=kind)
    fetched(fetch, 300)
    fetch.requeue()
    wait_until_equal(lambda: session.declare_passively("q").ready, 300)
    again = fetched(Fetch(session, "q", queue_type=kind), 300)
    if kind == "quorum":
        again.sort()  # what each of the two consumers got comes back in its order
    assert again == list(range(300))


def test_what_is_removed_leaves_messages_that_came_later_to_the_purge(session, fill, amqp):
    fill("q", 20)
    fetch = Fetch(session, "q", queue_type="classic")
    assert len(fetched(fetch, 20)) == 20
    amqp.publish("q", 3)
    assert fetch.purge_queue() == 3
    assert session.declare_passively("q").ready == 0


def test_the_bounds_limit_messages_and_bytes(session, fill):
    fill("many", 150)
    fetch = Fetch(session, "many", queue_type="classic")
    assert len(fetched(fetch, 150, Bounds(120, 10_000_000, 20))) == 120
    assert (fetch.kept, fetch.excess, fetch.delete_queue()) == (120, 0, 30)
    fill("large", 50, size=100_000)
    fetch = Fetch(session, "large", queue_type="classic")
    assert len(fetched(fetch, 50, Bounds(20_000, 1_000_000, 20))) == 9
    assert fetch.kept + fetch.excess + fetch.delete_queue() == 50


def test_messages_of_no_bytes_are_fetched(session, amqp):
    amqp.channel.queue_declare("q")
    amqp.channel.basic_publish("", "q", b"")
    [[message]] = Fetch(session, "q", queue_type="classic").batches(1, PLENTY)
    assert message.body == b""


def test_messages_that_consumers_hold_are_left_to_them(session, fill, amqp):
    fill("q", 150)
    amqp.channel.basic_qos(prefetch_count=100)
    amqp.channel.basic_consume("q", lambda *_: None)
    wait_until_equal(lambda: session.declare_passively("q").ready, 50)
    assert len(fetched(Fetch(session, "q", queue_type="classic"), 50)) == 50


@pytest.mark.parametrize("single", ["a single active consumer", "an exclusive consumer"])
def test_a_classic_queue_is_fetched_past_another_consumer_at_once(session, fill, amqp, single):
    is_exclusive = single == "an exclusive consumer"
    fill("q", 50, **({} if is_exclusive else {"x-single-active-consumer": True}))
    amqp.channel.basic_qos(prefetch_count=5)
    amqp.channel.basic_consume("q", lambda *_: None, exclusive=is_exclusive)
    wait_until_equal(lambda: session.declare_passively("q").ready, 45)
    fetch = Fetch(session, "q", queue_type="classic")
    began = time.monotonic()
    assert fetched(fetch, 45) == list(range(5, 50))
    assert time.monotonic() - began < fetching.SILENCE_SECONDS


def test_a_queue_is_fetched_although_its_first_messages_are_larger(session, fill, amqp):
    fill("q", fetching.FIRST_MESSAGES, size=5_000)
    for number in range(fetching.FIRST_MESSAGES, 500):
        amqp.channel.basic_publish("", "q", b"%d" % number)
    wait_until_equal(lambda: session.declare_passively("q").ready, 500)
    fetch = Fetch(session, "q", queue_type="classic")
    began = time.monotonic()
    assert fetched(fetch, 500, Bounds(20_000, 200_000, 20)) == list(range(500))
    assert time.monotonic() - began < fetching.SILENCE_SECONDS


def test_a_queue_that_is_emptied_by_others_ends_the_fetch(session, fill, amqp, monkeypatch):
    monkeypatch.setattr(fetching, "SILENCE_SECONDS", 0.1)
    fill("q", 50)
    fetch = Fetch(session, "q", queue_type="classic")
    amqp.channel.queue_purge("q")
    assert fetched(fetch, 50) == []


def test_a_queue_deleted_meanwhile_ends_the_fetch(session, fill, amqp, monkeypatch):
    monkeypatch.setattr(fetching, "SILENCE_SECONDS", 0.1)
    fill("q", 1000)
    fetch = Fetch(session, "q", queue_type="classic")
    batches = fetch.batches(2000, PLENTY)
    assert next(batches)
    amqp.channel.queue_delete("q")
    with pytest.raises(NotOnBroker):
        list(batches)
    assert not session.is_connected  # py-amqp would have reopened the channel
