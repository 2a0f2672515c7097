"""The rate: a token bucket of one process, and one in Redis that processes share."""

import logging
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4

import pytest
import redis
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from guardian_consumers import Consumer, Settings, SettingsError, SharedTokenBucket, TokenBucket
from guardian_consumers._rate import SCRIPT, validate_rate
from guardian_consumers._workers import RateLimited, Workers
from tests.support.consumers import QUEUE, consuming, length, publish_raw, settings_at
from tests.support.rates import max_excess, rate_deviation, taken
from tests.support.toolbox import in_parallel, wait_until
from tools.redis import PrivateRedis

RATES = st.one_of(st.sampled_from([0.1, 1, 50, 5000]), st.floats(0.01, 100_000))
BURSTS = st.one_of(st.none(), st.just(1), st.floats(1, 1000), st.just(1e9))


class Clock:
    """A clock that advances only when somebody sleeps, and then a little too far."""

    def __init__(self, late=0.0):
        self.now = 1_000.0
        self.late = late

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds * (1 + self.late) + 1e-9


@pytest.fixture(scope="module")
def server():
    with PrivateRedis() as server:
        yield server


@pytest.fixture
def shared(server, request):
    """Return a function that returns another process's share of a bucket unique to the test."""
    name = f"{request.node.name} {uuid4()}"
    return lambda rate, burst=None, **more: SharedTokenBucket(rate, burst, name=name, redis_url=server.url, **more)


# In one process


@given(rate=RATES, burst=BURSTS, late=st.floats(0, 3), steps=st.lists(st.floats(0, 3), max_size=60))
def test_takers_never_exceed_the_rate_and_one_burst(rate, burst, late, steps):
    clock = Clock(late)
    bucket = TokenBucket(rate, burst, clock=clock, sleep=clock.sleep)
    times = []
    for number, step in enumerate(steps):
        clock.now += step / rate
        if bucket.take(2 / rate) == 0:
            times.append(clock.now + number % 2 * bucket.max_token_age)  # interval other token is used late
    assert max_excess(sorted(times), rate) <= bucket.burst * (1 + 1e-9) + 1e-6


@given(rate=RATES, burst=BURSTS)
def test_a_constant_taker_gets_the_rate_from_an_empty_bucket(rate, burst):
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock=clock, sleep=clock.sleep)
    begun = clock.now
    for _ in range(50):
        assert bucket.take(float("inf")) == 0
    # Never before its time; and late by no more than one pause, of which the burst makes up.
    assert 50 / rate - 1e-6 <= clock.now - begun <= 50 / rate + bucket._min_sleep + 1e-5


def test_take_waits_for_its_timeout_and_returns_the_time_left():
    clock = Clock()
    bucket = TokenBucket(0.1, clock=clock, sleep=clock.sleep)
    assert bucket.take(0.5) == pytest.approx(9.5)
    assert clock.now == pytest.approx(1000.5)
    assert bucket.take(0) == pytest.approx(9.5)
    assert bucket.take(9.6) == 0
    assert clock.now == pytest.approx(1010)


def test_a_saved_burst_is_taken_at_once_before_the_rate_applies():
    clock = Clock()
    bucket = TokenBucket(10, 100_000, clock=clock, sleep=clock.sleep)
    clock.now += 20_000
    begun = clock.now
    for _ in range(100_009):
        assert bucket.take(1) == 0
    assert clock.now - begun == pytest.approx(1, abs=0.01)


def test_an_unused_token_returns_to_the_bucket_up_to_the_burst():
    clock = Clock()
    bucket = TokenBucket(1, 2.1, clock=clock, sleep=clock.sleep)
    clock.now += 10
    assert bucket.take(0) == 0
    for _ in range(3):
        bucket.give_back()
    assert [bucket.take(0) == 0 for _ in range(3)] == [True, True, False]


def test_threads_share_the_rate_of_one_bucket():
    bucket = TokenBucket(400)

    def count_tokens():
        count, until = 0, time.monotonic() + 1
        while time.monotonic() < until:
            count += bucket.take(0.1) == 0
        return count

    assert 360 <= sum(in_parallel(*[count_tokens] * 8)) <= 1.1 * 400 + bucket.burst


@pytest.mark.parametrize(("rate", "most", "held"), [(0.1, 20, 1), (3, 20, 3), (2.5, 20, 3), (5000, 20, 20), (50, 1, 1)])
def test_the_prefetch_covers_one_second_of_the_rate(rate, most, held):
    assert TokenBucket(rate).prefetch(most) == held
    assert SharedTokenBucket(rate, name="x", redis_url="redis://127.0.0.1:1").prefetch(most) == held


# Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RABBIT_RATE", "0"), ("RABBIT_RATE", "nan"), ("RABBIT_RATE", "1e7"), ("RABBIT_BURST", "0.5"),
        ("RABBIT_RATE_REDIS_URL", "http://:sekret-word@x"), ("RABBIT_RATE_REDIS_URL", "redis://:sekret-word@x:y"),
        ("RABBIT_RATE_AWAY", "open"), ("RABBIT_RATE_AWAY", "0"), ("RABBIT_RATE_AWAY", "nan"),
    ],
)  # fmt: skip
def test_an_invalid_rate_setting_is_named_without_the_password(name, value):
    given = {
        "RABBIT_URL": "amqp://127.0.0.1", "RABBIT_EXCHANGE_NAME": "shop_test", "RABBIT_RATE": "5",
        "RABBIT_RATE_REDIS_URL": "redis://127.0.0.1", name: value,
    }  # fmt: skip
    with pytest.raises(SettingsError, match=name) as raised:
        Settings.from_environment(given)
    assert "sekret-word" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("changes", [{"burst": 5}, {"rate_redis_url": "redis://x"}, {"rate": 1, "rate_name": "sms"}])
def test_a_rate_setting_without_the_one_it_needs_is_refused(changes):
    with pytest.raises(SettingsError, match="RABBIT_RATE"):
        settings_at("amqp://127.0.0.1", **changes)


def test_the_environment_chooses_the_limiter_and_hides_the_password():
    given = {
        "RABBIT_URL": "amqp://127.0.0.1", "RABBIT_EXCHANGE_NAME": "shop_test", "RABBIT_RATE": "0.5", "RATE": "7",
        "RABBIT_BURST": "20", "RABBIT_RATE_REDIS_URL": "redis://:sekret-word@127.0.0.1:6380/1",
        "RABBIT_RATE_NAME": "sms", "RABBIT_RATE_AWAY": "0.1",
    }  # fmt: skip
    settings = Settings.from_environment(given)
    limiter = settings.limiter("orders")
    assert (type(limiter), limiter.rate, limiter.burst, limiter.name) == (SharedTokenBucket, 0.5, 20, "sms")
    assert "sekret-word" not in repr(settings)
    alone = replace(settings, rate_redis_url=None, rate_name=None, rate_away="wait").limiter("orders")
    assert (type(alone), alone.rate, alone.burst) == (TokenBucket, 0.5, 20)
    assert settings_at("amqp://127.0.0.1").limiter("orders") is None
    assert validate_rate(50, None) == (50, 5)
    assert validate_rate(0.1, None) == (0.1, 1)


# Shared, through Redis


@hypothesis_settings(max_examples=40)
@given(
    rate=st.sampled_from([0.1, 7, 500, 7000]),
    burst=st.sampled_from([1, 2, 10, 700, 1e6]),
    steps=st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0, 0, 0, 5])),
        max_size=40,
    ),
)
def test_takers_of_the_shared_bucket_never_exceed_the_rate_and_one_burst(server, rate, burst, steps):
    """Drive the real script with our own clock: takers keep tokens up to their maximum age, and use a part."""
    bucket = SharedTokenBucket(rate, burst, name="x", redis_url=server.url)
    now, set_back, unused, times = 1_800_000_000.0, 0.0, 0, []
    with redis.Redis.from_url(server.url) as client:
        client.delete("driven")
        script = client.register_script(SCRIPT.replace("redis.call('TIME')", "{ARGV[6], ARGV[7]}"))
        for step, wanted, part, late, back in steps:
            now += step / rate
            set_back += back
            seconds, rest = divmod(now - set_back, 1)
            call = [bucket.rate, bucket._capacity, wanted, unused, 1000, int(seconds), int(rest * 1_000_000)]
            got, _ = script(["driven"], call)
            used = round(got * part)
            unused = got - used
            times += [now + late * bucket.max_token_age] * used
        if steps:  # a token arrives in time, even if the clock was set back
            seconds, rest = divmod(now - set_back + 1 / rate + 1e-5, 1)
            assert script(["driven"], [*call[:2], 1, 0, 1000, int(seconds), int(rest * 1_000_000)])[0] == 1
    assert max_excess(sorted(times), rate) <= bucket.burst + rate * 2e-6 + 1e-3


def test_processes_share_one_bucket_that_starts_empty_and_expires(shared, server):
    one, other = shared(10, 3), shared(10, 3)
    begun = time.monotonic()
    got = [bucket.take(2) == 0 for _ in range(4) for bucket in (one, other)]
    assert all(got)
    assert time.monotonic() - begun >= 0.79
    with redis.Redis.from_url(server.url) as client:
        assert 0 < client.ttl(f"consumers:rate:{one.name}") <= 8 * 86400


def test_a_slow_rate_returns_the_time_left_with_few_redis_calls(shared):
    bucket = shared(0.1)
    calls = []
    script = bucket._script
    bucket._script = lambda *given: calls.append(1) or script(*given)
    began = time.monotonic()
    first = bucket.take(0.05)
    assert 10 - (time.monotonic() - began) <= first <= 10
    assert 0 < bucket.take(0.05) <= first - 0.05
    assert len(calls) == 1


def test_unused_tokens_of_a_process_return_to_the_shared_bucket(shared, server):
    bucket = shared(5, 10)
    key = f"consumers:rate:{bucket.name}"
    assert bucket.take(1) == 0
    bucket._batch, bucket._fetched = 5, 0  # as if it had used that many shortly before
    with redis.Redis.from_url(server.url) as client:
        client.hset(key, "level", "9")
        assert bucket.take(0) == 0
        assert float(client.hget(key, "level")) == pytest.approx(4, abs=0.5)
        time.sleep(bucket.max_token_age + 0.01)
        assert bucket.take(0) == 0  # the four kept tokens are too old to be used
        assert 7 <= float(client.hget(key, "level")) <= 9.5
    assert bucket._batch == 1


def test_a_flushed_redis_starts_with_an_empty_bucket(shared, server):
    bucket = shared(2, 10)
    with redis.Redis.from_url(server.url) as client:
        assert bucket.take(1) == 0
        client.hset(f"consumers:rate:{bucket.name}", "level", "9")
        assert shared(2, 10).take(0) == 0
        client.flushall()
        client.script_flush()
    assert 0 < shared(2, 10).take(0) <= 0.51


def test_a_redis_key_of_another_type_blocks_and_is_logged(shared, server, caplog):
    bucket = shared(1000)
    with redis.Redis.from_url(server.url) as client:
        client.set(f"consumers:rate:{bucket.name}", "mine")
    assert bucket.take(0.1) > 0
    assert "WRONGTYPE" in caplog.text
    assert server.url not in caplog.text


def test_a_lost_redis_blocks_and_restarts_with_an_empty_bucket(caplog):
    caplog.set_level(logging.INFO, "guardian_consumers._rate")
    with PrivateRedis() as server:
        bucket = SharedTokenBucket(20, 10, name="x", redis_url=server.url)
        for _ in range(3):
            assert bucket.take(1) == 0
        time.sleep(bucket.max_token_age)
        with redis.Redis.from_url(server.url) as client:
            client.hset("consumers:rate:x", "level", "8")  # saved to Redis's file
            time.sleep(1.1)
        server.kill()
        begun = time.monotonic()
        assert bucket.take(0.3) > 0
        assert bucket.away
        assert time.monotonic() - begun < 1
        server.start()
        begun = time.monotonic()
        times = []
        while time.monotonic() < begun + 2.2:
            if bucket.take(0.1) == 0:
                times.append(time.monotonic())
    assert not bucket.away
    assert len(times) > 15
    assert max_excess(times, 20) < 7  # tokens of the file are not used
    said = [record.getMessage() for record in caplog.records]
    assert sum("messages wait" in text for text in said) == 1
    assert sum("answers again" in text for text in said) == 1
    assert not any(server._password in text for text in said)


def test_a_hanging_redis_is_waited_for_at_most_a_second(shared, server):
    bucket = shared(1000)
    assert bucket.take(1) == 0
    time.sleep(bucket.max_token_age)
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert bucket.take(0.1) > 0
        assert time.monotonic() - begun < 1.5
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


def test_a_process_can_fall_back_to_its_own_rate_without_redis(caplog):
    bucket = SharedTokenBucket(1000, 100, name="x", redis_url="redis://127.0.0.1:1", away="50")
    begun = time.monotonic()
    count = 0
    while time.monotonic() < begun + 1:
        count += bucket.take(0.1) == 0
    assert 40 <= count <= 50 + 5
    assert "limited to 50/s on its own" in caplog.text


@pytest.mark.slow
def test_four_processes_keep_to_one_rate(server):
    times, processor = taken(4, 3.5, rate=500, redis_url=server.url, name="four")
    assert rate_deviation(times, 500, 2) < 0.05
    assert max_excess(times, 500) <= 50
    assert max(processor) < 0.25  # no busy waiting


# In a consumer


@pytest.mark.usefixtures("each_consumer")
def test_a_consumer_keeps_to_its_configured_rate(consumer_settings, amqp):
    times = []
    with consuming(Consumer(consumer_settings(rate=50), "orders", lambda message: times.append(time.monotonic()))):
        for _ in range(120):
            publish_raw(amqp)
        wait_until(lambda: len(times) >= 100)
    assert max_excess(times, 50) <= 5 + 1
    assert (len(times) - 1) / (times[-1] - times[0]) == pytest.approx(50, rel=0.1)


@contextmanager
def counted_arrivals(consumer):
    """Record the messages that arrive at a consumer."""
    arrived = []
    waiting = consumer._connection.waiting
    put = waiting.put
    waiting.put = lambda delivery: (arrived.append(delivery), put(delivery))
    with consuming(consumer):
        yield arrived


@pytest.mark.usefixtures("each_consumer")
@pytest.mark.slow
def test_at_a_slow_rate_messages_wait_in_the_queue(consumer_settings, amqp):
    done = []
    consumer = Consumer(consumer_settings(rate=0.5, hold_seconds=0.3), "orders", done.append)
    with counted_arrivals(consumer) as arrived:
        for number in range(3):
            publish_raw(amqp, b"%d" % number)
        wait_until(lambda: arrived)
        wait_until(lambda: length(amqp, QUEUE) == 3)
        assert consumer.figures()["waiting"] == 0
        wait_until(lambda: len(done) == 2)
        assert consumer.figures()["prefetch"] == 2  # one in hand and one waiting
    assert [message.body for message in done] == [0, 1]
    assert len(arrived) <= 7  # two for each token and before the first, without repeated fetching


@pytest.mark.usefixtures("each_consumer")
def test_slow_callbacks_do_not_lower_the_rate(consumer_settings, amqp):
    """At ten a second and with blocked callbacks, twenty are started, not the ten that a second needs."""
    begun, release = [], threading.Event()

    def callback(message):
        begun.append(message.body)
        release.wait(20)

    with consuming(Consumer(consumer_settings(rate=10), "orders", callback)) as consumer:
        assert consumer.figures()["prefetch"] == 11
        for number in range(30):
            publish_raw(amqp, b"%d" % number)
        try:
            wait_until(lambda: len(begun) == 20)
            assert consumer.figures()["prefetch"] == 20
        finally:
            release.set()
    assert consumer.counts == {"done": len(begun)}


@pytest.mark.usefixtures("each_consumer")
def test_a_consumer_waiting_for_a_token_stops_at_once(consumer_settings, amqp):
    consumer = Consumer(consumer_settings(rate=0.01), "orders", lambda message: None)
    with consuming(consumer):
        publish_raw(amqp)
        wait_until(lambda: length(amqp, QUEUE) == 0 or consumer._connection.paused)
        begun = time.monotonic()
    assert time.monotonic() - begun < 3
    wait_until(lambda: length(amqp, QUEUE) == 1)
    assert not consumer.counts["done"]


class LosingLimiter:
    """A limiter that loses the waiting message while it grants the first token."""

    def __init__(self, waiting):
        self.waiting = waiting
        self.calls = []

    def take(self, timeout):
        self.calls.append("take")
        if len(self.calls) == 1:
            self.waiting.take()
        return 0

    def give_back(self):
        self.calls.append("give back")


def test_a_token_without_a_message_is_given_back():
    connection = Consumer(settings_at("amqp://127.0.0.1:1"), "orders", pytest.fail)._connection
    waiting, handled = connection.waiting, []
    limiter = LosingLimiter(waiting)
    workers = Workers(1, RateLimited(connection, limiter, hold_seconds=5), handled.append, "test")
    waiting.put("lost")
    workers.wake()
    wait_until(lambda: workers._idle)
    waiting.put("next")
    workers.wake()
    wait_until(lambda: handled == ["next"])
    workers.end()
    assert limiter.calls == ["take", "give back", "take"]
