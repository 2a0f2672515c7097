"""One logical queue with priorities: in memory, over several queues, by the broker, and moving between them."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guardian_consumers import (
    BrokerPriorities,
    Consumer,
    NotPublished,
    PlainQueue,
    PriorityQueues,
    Publisher,
    Refused,
    Settings,
    SettingsError,
)
from guardian_consumers._priority import RankedBuffer, parse_ranges, priority_exchange, priority_of
from guardian_consumers.move_priorities import main, move
from guardian_consumers.names import level_queue, priority_queue
from tests.support.consumers import (
    QUEUE,
    InMilliseconds,
    consuming,
    length,
    publish_raw,
    queue_exists,
    settings_at,
    take,
)
from tests.support.toolbox import in_background, in_parallel, wait_until, wait_until_equal

PROJECT = Path(__file__).resolve().parents[2]
ALL = [QUEUE, f"{QUEUE}.level1", f"{QUEUE}.level2", f"{QUEUE}.priority"]
BY = ["0-4,5-9", "0-2,3-6,7-9", "broker"]


# In memory


class Clock:
    """A clock that only tests advance."""

    now = 0.0

    def __call__(self):
        return self.now


STEPS = st.lists(st.one_of(st.integers(0, 3), st.none(), st.floats(0.1, 30)), max_size=60)
"""An int: a message of this rank arrives. None: one is taken. A float: these seconds pass."""


@given(STEPS, st.one_of(st.none(), st.floats(0.5, 20)))
def test_messages_are_taken_by_rank_exactly_once(steps, ageing):
    clock = Clock()
    place = RankedBuffer(4, lambda message: message[0], ageing, clock)
    waiting = []
    for number, step in enumerate([*steps, *[None] * len(steps)]):
        if step is None:
            one = place.take()
            assert (one is None) == (not waiting)
            if one is None:
                continue
            waiting.remove(one)
            for other in waiting:
                assert not is_before(other, one, ageing)
        elif isinstance(step, int):
            message = step, clock.now, number
            waiting.append(message)
            place.put(message)
        else:
            clock.now += step
        assert len(place) == len(waiting)
    assert not waiting


def is_before(one, other, ageing):
    """Return whether one message is to be handled before the other, as documented."""
    (rank, since, number), (other_rank, other_since, other_number) = one, other
    if rank == other_rank:
        return number < other_number
    if ageing is None:
        return rank > other_rank
    # It may have waited less by the ageing time of the levels between them.
    return since - other_since < (rank - other_rank) * ageing - 1e-6


LINES = {0: "a", 1: "bc", 2: "de", 3: "f"}
"""Waiting messages by rank; the cases below name the overdue ones."""


@pytest.mark.parametrize(
    ("late", "together", "back"),
    [("", False, ""), ("", True, ""), ("a", False, "a"), ("b", False, "abc"), ("ad", False, "abcde"),
     ("a", True, "abcdef")],
)  # fmt: skip
def test_overdue_messages_are_returned_with_those_ranked_before_them(late, together, back):
    clock = Clock()
    place = RankedBuffer(4, lambda message: message[0], None, clock, single_queue=together)
    messages = [(rank, name) for rank, names in LINES.items() for name in names]
    for is_late in (True, False):
        for rank, name in messages:
            if (name in late) is is_late:
                place.put((rank, name))
        clock.now += 239 if is_late else 2
    assert "".join(name for _, name in place.overdue()) == back
    left = [place.take()[1] for _ in range(len(place))]
    assert (sorted(left), place.take()) == (sorted({*"abcdef"} - {*back}), None)


def test_messages_from_many_threads_are_taken_once():
    place = RankedBuffer(3, lambda message: message % 3)
    seen = []

    def put():
        for number in range(3000):
            place.put(number)

    def take():
        while len(seen) < 3000:
            one = place.take()
            if one is not None:
                seen.append(one)

    assert in_parallel(put, *[take] * 4) == [None] * 5
    assert sorted(seen) == list(range(3000))


# Settings


@given(st.lists(st.integers(1, 9), unique=True, max_size=9))
def test_priority_ranges_are_parsed(starts):
    bounds = [0, *sorted(starts), 10]
    ranges = [range(low, high) for low, high in pairwise(bounds)]
    text = ", ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in ranges)
    assert parse_ranges(text) == tuple(ranges)


@pytest.mark.parametrize(
    "changes",
    [
        *({"priorities": text} for text in ("0-4", "5-9,0-4", "0-4,6-9", "0-5,5-9", "0-10", "a", "0-4,", "9-0", "²-9")),
        {"priorities": "broker", "queue_type": "quorum"},
        {"priorities": "broker", "priority_ageing": 5.0},
        {"priorities": "0-4,5-9", "priority_ageing": 0.0},
    ],
    ids=str,
)
def test_invalid_priorities_are_refused_with_the_settings_name(changes):
    with pytest.raises(SettingsError, match="RABBIT_PRIORIT"):
        settings_at("amqp://127.0.0.1", **changes)


def test_one_setting_chooses_the_source():
    base = {"RABBIT_URL": "amqp://x", "RABBIT_EXCHANGE_NAME": "shop_test"}
    sources = [
        Settings.from_environment({**base, **more}).source("orders")
        for more in (
            {}, {"RABBIT_PRIORITIES": "broker"}, {"RABBIT_PRIORITIES": "0-4,5-9", "RABBIT_PRIORITY_AGEING": "60"},
        )
    ]  # fmt: skip
    assert sources == [PlainQueue("orders"), BrokerPriorities("orders"), PriorityQueues("orders", ageing=60)]


@pytest.mark.parametrize(("prefetch", "threads"), [("young", 2), (2, 3), ("grown", 30)])
def test_with_ranges_the_lowest_level_never_occupies_all_threads(prefetch, threads):
    consumer = Consumer(
        settings_at("amqp://127.0.0.1:1", priorities="0-4,5-9", prefetch=prefetch), "orders", pytest.fail
    )
    assert (consumer._workers.threads, consumer._connection._queues()[-1].prefetch < threads) == (threads, True)


def test_the_prefetch_doubles_with_the_level():
    queues = PriorityQueues("orders", "0-2,3-6,7-9").queues(settings_at("amqp://x").names, 20)
    assert [(queue.name, queue.prefetch) for queue in queues] == [(ALL[2], 80), (ALL[1], 40), (ALL[0], 20)]


@pytest.mark.parametrize(
    ("priority", "headers", "expected"),
    [
        (7, None, 7), (None, {"consumer-priority": "6"}, 6), (3, {"consumer-priority": "6"}, 6), (None, None, 0),
        (200, {}, 9), (None, {"consumer-priority": "x"}, 0), (2, {"consumer-priority": "-5"}, 2),
        (None, {"consumer-priority": "\u0663"}, 0), (1, {"consumer-priority": 6}, 1),
        (None, {"consumer-priority": True}, 0),
    ],
)  # fmt: skip
def test_a_messages_priority_is_the_header_as_text_or_else_the_property(priority, headers, expected):
    assert priority_of(SimpleNamespace(priority=priority, headers=headers)) == expected


@pytest.mark.parametrize("priority", [-1, 10])
def test_a_publisher_refuses_an_invalid_priority(priority):
    with pytest.raises(ValueError, match="from 0 to 9"):
        Publisher(settings_at("amqp://x")).publish({}, "orders", priority=priority)


# On a real broker


@pytest.fixture
def publish(consumer_settings):
    """Return a function that publishes messages with these priorities as their bodies."""
    with Publisher(consumer_settings()) as publisher:

        def do(*priorities):
            for priority in priorities:
                publisher.publish(priority, "orders", priority=priority, mandatory=True)

        yield do


class Gate:
    """A callback that blocks until it is opened, and records the messages."""

    def __init__(self):
        self.open = threading.Event()
        self.seen = []

    def __call__(self, message):
        assert self.open.wait(10)
        self.seen.append(message.body)


def lengths(amqp):
    """Return the number of ready messages in each queue that exists."""
    return {name: length(amqp, name) for name in ALL if queue_exists(amqp, name)}


class ClosedLimiter:
    """A limiter that lets nothing through."""

    def prefetch(self, most):
        return 1

    def take(self, timeout):
        time.sleep(min(timeout, 0.01))
        return 1

    def give_back(self):
        raise AssertionError("it gave no token")


def declare(settings):
    """Let a consumer declare and bind its queues, and stop it before it handles anything."""
    with consuming(Consumer(settings, "orders", pytest.fail, limiter=ClosedLimiter())):
        return settings


@pytest.mark.usefixtures("each_consumer")
@pytest.mark.parametrize("by", BY)
def test_the_callback_sees_one_queue_with_high_priorities_first(consumer_settings, amqp, publish, by):
    settings = declare(consumer_settings(priorities=by, prefetch=40, threads=1))
    priorities = [random.randrange(10) for _ in range(30)]
    gate = Gate()
    publish(*priorities)
    with consuming(Consumer(settings, "orders", gate)) as consumer:
        wait_until(lambda: consumer.figures()["waiting"] == 29)
        gate.open.set()
        wait_until(lambda: consumer.counts["done"] == 30)
    ranks = by_rank(by, gate.seen[1:])  # the first was taken while the others were still arriving
    assert ranks == sorted(ranks, reverse=True)
    assert Counter(gate.seen) == Counter(priorities)


def by_rank(by, priorities):
    """Return the level of each priority; with the broker's priorities each is its own level."""
    ranges = [range(n, n + 1) for n in range(10)] if by == "broker" else parse_ranges(by)
    return [next(level for level, numbers in enumerate(ranges) if one in numbers) for one in priorities]


def test_each_message_goes_to_the_queue_of_its_range(consumer_settings, amqp, publish):
    declare(consumer_settings(priorities="0-2,3-6,7-9"))
    publish(*range(10))
    publish_raw(amqp)
    publish_raw(amqp, priority=9)  # by a client that does not write the header
    publish_raw(amqp, headers={"consumer-priority": "high"})
    publish_raw(amqp, headers={"consumer-priority": "9"})  # by another client: all of them encode text alike
    assert lengths(amqp) == {ALL[0]: 6, ALL[1]: 4, ALL[2]: 4}


@pytest.mark.usefixtures("each_consumer")
def test_slow_low_priority_messages_leave_threads_for_high_ones(consumer_settings, amqp, publish):
    release, begun = {0: threading.Event(), 9: threading.Event()}, []

    def callback(message):
        begun.append(message.body)
        release[message.body].wait(10)

    settings = declare(consumer_settings(priorities="0-4,5-9", prefetch=4))
    publish(*[0] * 9)
    with consuming(Consumer(settings, "orders", callback)) as consumer:

        def stands():
            figures = consumer.figures()
            return figures["in_hand"], figures["waiting"]

        wait_until_equal(stands, (4, 0))
        publish(*[9] * 20)
        # Two high ones are in hand, and here wait as many as their prefetch.
        wait_until_equal(stands, (6, 6))
        release[0].set()
        wait_until(lambda: consumer.counts["done"] == 4 and stands() == (6, 2 + 4))
        wait_until_equal(lambda: begun.count(9), 6)  # all threads are busy with high ones
        assert begun.count(0) == 4
        release[9].set()
        wait_until(lambda: consumer.counts["done"] == 29)


@pytest.mark.usefixtures("each_consumer")
def test_with_ageing_a_low_priority_message_is_handled_among_high_ones(consumer_settings, amqp, publish):
    settings = declare(consumer_settings(priorities="0-4,5-9", prefetch=5, threads=1, priority_ageing=0.1))
    seen = []

    def callback(message):
        seen.append(message.body)
        time.sleep(0.01)
        if message.body == 9 and len(seen) < 60:
            message.publish(9, "orders", priority=9)  # as many arrive as are handled

    publish(9, 9, 9, 0)
    with consuming(Consumer(settings, "orders", callback)):
        wait_until(lambda: len(seen) >= 60)
    assert seen.index(0) < 40


@pytest.mark.parametrize("by", BY)
def test_a_failed_message_returns_to_its_level_and_is_parked(consumer_settings, amqp, publish, by):
    queues = []

    def callback(message):
        queues.append((message.queue, message.attempts, message.routing_key))
        raise LookupError("no")

    with consuming(Consumer(consumer_settings(priorities=by), "orders", callback)) as consumer:
        publish(9)
        wait_until(lambda: consumer.counts["park"])
    queue = {"0-4,5-9": ALL[1], "0-2,3-6,7-9": ALL[2], "broker": ALL[3]}[by]
    assert queues == [(queue, attempts, QUEUE) for attempts in range(3)]
    properties, _ = take(amqp, f"{queue}.parked")
    assert (properties.priority, properties.headers["consumer-priority"]) == (9, "9")


# Changed settings


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", BY[1]),
        (BY[1], "broker"),
        ("broker", BY[0]),
        (BY[0], BY[1]),
        (BY[1], BY[0]),
        (BY[1], "0-9"),
        (BY[1], ""),
        ("broker", ""),
    ],
)
def test_after_a_change_of_priorities_each_message_goes_to_one_queue_that_is_read(
    consumer_settings, amqp, publish, before, after
):
    declare(consumer_settings(priorities=before))
    declare(consumer_settings(priorities=after))
    publish(*range(10))
    publish_raw(amqp)
    there = {name: count for name, count in lengths(amqp).items() if count}
    expected = {"": {ALL[0]: 11}, "0-9": {ALL[0]: 11}, "broker": {ALL[3]: 11}, "0-4,5-9": {ALL[0]: 6, ALL[1]: 5},
                "0-2,3-6,7-9": {ALL[0]: 4, ALL[1]: 4, ALL[2]: 3}}  # fmt: skip
    assert there == expected[after]


@pytest.mark.parametrize(("before", "after"), [(BY[1], "broker"), ("broker", BY[1]), (BY[1], "0-9")])
def test_moving_brings_waiting_messages_to_the_new_queues_once_and_in_order(
    consumer_settings, amqp, publish, before, after
):
    declare(consumer_settings(priorities=before))
    with Publisher(consumer_settings()) as publisher:
        for number in range(60):
            publisher.publish({"n": number}, "orders", priority=number % 10, message_id=str(number))
    publish_raw(
        amqp,
        b'{"n": 60}',
        headers={"CC": ["elsewhere"]},
        user_id=urlsplit(consumer_settings().url).username,
        expiration="60000",
    )
    amqp.queue("others")
    amqp.channel.queue_bind("others", "shop_test", "elsewhere")
    settings = declare(consumer_settings(priorities=after, prefetch=100, threads=1))
    said = []
    waited = sum(lengths(amqp).values())
    moved = move(settings, "orders", said.append)
    assert (sum(lengths(amqp).values()), waited) == (61, 61)
    assert 0 < moved <= 61
    assert move(settings, "orders", said.append) == 0
    seen = []

    def callback(message):
        seen.append((message.properties.priority, message.body["n"], message.routing_key))

    with consuming(Consumer(settings, "orders", callback)) as consumer:
        wait_until(lambda: consumer.counts["done"] == 61)
    assert sorted(n for _, n, _ in seen) == list(range(61))
    assert {key for *_, key in seen} == {QUEUE}
    for priority in range(10):
        numbers = [n for one, n, _ in seen if one == priority]
        assert numbers == sorted(numbers)
    assert length(amqp, "others") == 0


def test_moving_without_target_queues_leaves_messages_in_place(consumer_settings, amqp, publish):
    declare(consumer_settings(priorities="0-4,5-9"))
    publish(0, 9)
    with pytest.raises(Refused, match=r"queue shop_test_orders\.priority does not exist: start a consumer"):
        move(consumer_settings(priorities="broker"), "orders", print)
    amqp.queue(f"{QUEUE}.priority", arguments={"x-max-priority": 9})  # unbound
    with pytest.raises(Exception, match=r"no queue is bound .*start a consumer"):
        move(consumer_settings(priorities="broker"), "orders", print)
    wait_until(lambda: lengths(amqp) == {ALL[0]: 1, ALL[1]: 1, ALL[3]: 0})


def test_a_move_that_crashed_before_the_acks_is_finished_by_the_next(consumer_settings, amqp, monkeypatch):
    declare(consumer_settings(priorities="0-4,5-9"))
    publish_raw(amqp, b"17", headers={"consumer-priority": "3"})
    settings = declare(consumer_settings(priorities="broker"))
    monkeypatch.setattr("guardian_consumers.move_priorities._Move._settle", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        move(settings, "orders", print)
    wait_until(lambda: lengths(amqp) == {ALL[0]: 1, ALL[1]: 0, ALL[3]: 1})
    monkeypatch.undo()
    assert move(settings, "orders", print) == 1
    first, second = (take(amqp, ALL[3])[0] for _ in range(2))
    assert first.message_id == second.message_id
    assert first.priority == 3  # the broker sorts by it, though the publisher set only the header


def test_moving_works_beside_consumers_of_both_settings(consumer_settings, amqp, publish):
    seen = []

    def callback(message):
        if message.body == 9 and not message.attempts:
            raise LookupError("not yet")
        time.sleep(0.002)
        seen.append((message.id, message.queue))

    policy = {"policy": settings_at("amqp://x").policy.__class__(delays=(1,))}
    old = Consumer(consumer_settings(priorities="0-4,5-9", prefetch=3, threads=1, **policy), "orders", callback)
    new = Consumer(consumer_settings(priorities="broker", **policy), "orders", callback)
    said = []
    with consuming(old):
        publish(*[9] * 3, *[2] * 200)
        wait_until(lambda: old.counts["retry"] == 3)
        with consuming(new):
            publish(*[2] * 50)
            move(new.settings, "orders", said.append)
            assert any("stop its 1 consumers" in text for text in said)
            old.close()
            move(new.settings, "orders", said.append)
            wait_until(lambda: len(seen) >= 253)
            wait_until(lambda: not new.figures()["in_hand"])
    assert sorted(Counter(one for one, _ in seen).values()) == [1] * 253
    # Delayed messages return to the new queue, or to the old ones while they are read.
    assert {ALL[3]} <= {queue for _, queue in seen} <= {ALL[0], ALL[1], ALL[3]}
    assert sum(lengths(amqp).values()) == 0


@pytest.mark.parametrize(("before", "after"), [(BY[0], "broker"), ("broker", BY[1])])
def test_messages_that_return_from_a_delay_during_a_move_go_to_one_queue_each(consumer_settings, amqp, before, after):
    declare(consumer_settings(priorities=before))
    settings = declare(consumer_settings(priorities=after))
    again = f"{ALL[1] if after == 'broker' else ALL[3]}.again"
    enough, published = threading.Event(), []

    def publish_returning():
        with pika.BlockingConnection(settings.addresses) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            while not enough.is_set():
                published.append(str(len(published)))
                properties = pika.BasicProperties(message_id=published[-1])
                channel.basic_publish("shop_test", again, b"{}", properties, mandatory=True)

    publishing = in_background(publish_returning)
    try:
        wait_until(lambda: len(published) > 20)
        move(settings, "orders", print)
    finally:
        enough.set()
        publishing.result(10)
    assert sorted(ids_of_all(amqp)) == sorted(published)
    declare(consumer_settings(priorities=before))
    amqp.channel.basic_publish("shop_test", again, b"{}")
    assert sum(lengths(amqp).values()) == 1


def ids_of_all(amqp):
    """Take all messages from the queues, and return their ids."""
    return [one for name in lengths(amqp) for one in taken_ids(amqp, name)]


@pytest.mark.slow
def test_a_move_that_fails_acks_what_the_new_queue_accepted(consumer_settings, amqp, publish, broker, vhost):
    if broker.node is None:
        pytest.skip("nobody can run rabbitmqctl on a broker that was named")
    declare(consumer_settings(priorities="0-4,5-9"))
    publish(*[1] * 100)
    settings = declare(consumer_settings(priorities="broker"))
    limit = '{"max-length": 20, "overflow": "reject-publish"}'
    broker.node.ctl("set_policy", "-p", vhost, "small", rf"^{QUEUE}\.priority$", limit)
    with pytest.raises(NotPublished, match="a queue may be full"):
        move(settings, "orders", print)
    there = ids_of_all(amqp)
    assert (len(there), len(set(there))) == (100, 100)


def test_moving_parks_a_message_with_unreadable_headers(consumer_settings, amqp, publish):
    declare(consumer_settings(priorities="0-4,5-9"))
    odd = InMilliseconds(headers={"at": datetime.fromtimestamp(InMilliseconds.SECONDS, UTC)}, message_id="odd")
    publish(1)
    amqp.channel.basic_publish("shop_test", QUEUE, b"{}", odd)
    publish(2)
    said = []
    assert move(declare(consumer_settings(priorities="broker")), "orders", said.append) == 2
    assert said[0] == f"{QUEUE}: moved 2; parked 1 with headers that can't be read"
    parked, _ = take(amqp, f"{ALL[3]}.parked")
    assert parked.message_id == "odd"
    assert "the headers can't be read" in parked.headers["consumer-error"]
    assert lengths(amqp) == {ALL[0]: 0, ALL[1]: 0, ALL[3]: 2}


def test_the_command_prints_what_it_moved_and_its_exit_code_tells_errors_apart(
    consumer_settings, amqp, publish, capsys
):
    environment = {
        "RABBIT_URL": consumer_settings().url,
        "RABBIT_EXCHANGE_NAME": "shop_test",
        "RABBIT_PRIORITIES": "broker",
    }
    declare(consumer_settings(priorities="0-4,5-9"))
    publish(0, 9)
    assert main(["orders"], environment) == 1
    assert "start a consumer" in capsys.readouterr().err
    assert main(["orders"], {**environment, "RABBIT_PRIORITIES": ""}) == 2
    assert main(["orders", "--priorities", "0-3"], environment) == 2
    declare(consumer_settings(priorities="broker"))
    capsys.readouterr()
    done = subprocess.run(
        [sys.executable, "-m", "guardian_consumers.move_priorities", "orders"],
        cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"{QUEUE}: moved 1", f"{QUEUE}.level1: moved 1"]
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for url in "amqp://127.0.0.1:1", f"amqp://127.0.0.1:{mute.getsockname()[1]}/?stack_timeout=0.5":
            assert main(["orders"], {**environment, "RABBIT_URL": url}) == 1
            assert "the connection to the broker" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_move_loses_and_duplicates_no_message(consumer_settings, amqp):
    declare(consumer_settings(priorities="0-4,5-9"))
    for one in range(3000):
        properties = pika.BasicProperties(message_id=str(one), headers={"consumer-priority": str(one % 10)})
        amqp.channel.basic_publish("shop_test", QUEUE, b"{}", properties)
    settings = declare(consumer_settings(priorities="broker"))
    environment = {
        "RABBIT_URL": settings.url, "RABBIT_EXCHANGE_NAME": "shop_test", "RABBIT_PRIORITIES": "broker",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }  # fmt: skip
    moving = subprocess.Popen(
        [sys.executable, "-m", "guardian_consumers.move_priorities", "orders"],
        cwd=PROJECT, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: length(amqp, ALL[3]) > 300)
    moving.terminate()
    _, said = moving.communicate(timeout=20)
    assert (moving.returncode, said) == (1, "stopped by a signal; run this again\n")
    assert length(amqp, ALL[3]) < 3000
    wait_until(lambda: sum(lengths(amqp).values()) == 3000)
    move(settings, "orders", print)
    assert lengths(amqp) == {ALL[0]: 0, ALL[1]: 0, ALL[3]: 3000}
    assert set(taken_ids(amqp, ALL[3])) == {str(one) for one in range(3000)}


def taken_ids(amqp, queue):
    """Take all messages from a queue, and return their ids."""
    while (got := amqp.channel.basic_get(queue, auto_ack=True))[0] is not None:
        yield got[1].message_id


# A Pulse user


def test_a_pulse_user_uses_ranges_broker_priorities_and_moving(pulse_settings, amqp):
    settings = declare(pulse_settings(priorities="0-2,3-6,7-9"))
    with Publisher(settings) as publisher:
        for priority in range(10):
            publisher.publish(priority, "orders", priority=priority, mandatory=True)
    name = settings.pulse_user
    queue = f"queue/{name}/shop_test_orders"
    assert [length(amqp, level_queue(queue, level)) for level in range(3)] == [3, 4, 3]
    assert move(declare(pulse_settings(priorities="broker")), "orders", print) == 10
    assert [json.loads(take(amqp, priority_queue(queue))[1]) for _ in range(10)] == list(range(9, -1, -1))
    exchange = priority_exchange(declare(pulse_settings(priorities="0-4,5-9")).names, "orders")
    assert exchange.startswith(f"exchange/{name}/")
