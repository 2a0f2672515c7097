"""The consumer's pure parts: names, settings, outcomes of exceptions, and acknowledgements."""

import time

import pika
import pytest
import yapw.clients
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from guardian_consumers import Discard, Halt, Names, Outcome, Park, Policy, Requeue, Retry, Settings, SettingsError
from guardian_consumers._delivery import Delivery, QueueChannel
from guardian_consumers._outcomes import Unreadable, decide
from guardian_consumers._publisher import Publisher
from guardian_consumers._retries import delayed, message_id_of, parked
from guardian_consumers._source import FifoBuffer
from guardian_consumers._workers import Workers
from guardian_consumers.headers import ERROR, TRACEBACK
from guardian_consumers.names import delay_queue, parking_queue, return_key
from rabbit.permissions import allows, for_pulse_user
from tests.support.toolbox import wait_until_equal

URL = "amqp://shop:sekret-word@127.0.0.1/%2F"


# Names


@given(st.text("abcxyz_-.", min_size=1, max_size=30), st.text("abcxyz_-.", min_size=1, max_size=30))
def test_names_and_routing_keys_match_yapw(exchange, key):
    client = yapw.clients.Base(exchange=exchange)
    assert Names(exchange).exchange == exchange
    assert Names(exchange).queue(key) == Names(exchange).routing_key(key) == client.format_routing_key(key)


@given(st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,30}", fullmatch=True))
def test_a_pulse_user_may_configure_and_write_all_its_names(user):
    names = Names("shop_test", user)
    queue = names.queue("orders")
    allowed = for_pulse_user(user)
    for name in (names.exchange, queue, parking_queue(queue), delay_queue(queue, 10)):
        assert allows(allowed.configure, name)
        assert allows(allowed.write, name)
        assert allows(allowed.read, name)
    assert (names.exchange, queue) == (f"exchange/{user}/shop_test", f"queue/{user}/shop_test_orders")
    assert names.routing_key("orders") == yapw.clients.Base(exchange=names.exchange).format_routing_key("orders")


@pytest.mark.parametrize("user", ["", "1st", "a/b", "a\n", "å", "a" * 101, "a b"])
def test_an_invalid_pulse_user_name_is_refused(user):
    with pytest.raises(SettingsError, match="RABBIT_PULSE_USER"):
        Names("shop_test", user)


def test_a_name_longer_than_255_bytes_is_refused():
    with pytest.raises(SettingsError, match="255 bytes"):
        Names("shop_test").queue("å" * 130)


def test_each_delay_has_its_own_queue_name():
    assert [delay_queue("q", seconds) for seconds in (10, 0.05, 1.5, 600)] == [
        "q.retry.10s", "q.retry.50ms", "q.retry.1500ms", "q.retry.600s",
    ]  # fmt: skip
    assert return_key("q") == "q.again"


# Settings


def test_settings_are_read_from_the_environment():
    settings = Settings.from_environment(
        {
            "RABBIT_URL": URL,
            "RABBIT_EXCHANGE_NAME": "shop_test",
            "RABBIT_PULSE_USER": "shop",
            "RABBIT_PREFETCH": "7",
            "RABBIT_THREADS": "3",
            "RABBIT_ON_ERROR": "halt",
            "RABBIT_RETRY_DELAYS": "1, 2.5",
            "RABBIT_QUEUE_TYPE": "quorum",
            "RABBIT_TIME_LIMIT": "0",
            "RABBIT_GRACE": "",
            "HOME": "/",
        }
    )
    assert settings == Settings(
        URL, "shop_test", "shop", 7, threads=3, policy=Policy(Outcome.HALT, delays=(1, 2.5)), queue_type="quorum",
        time_limit=0,
    )  # fmt: skip
    assert (settings.young_prefetch, settings.grown_prefetch) == (7, 7)


def test_an_unknown_setting_is_logged_with_the_nearest_known_one(caplog):
    more = {"RABBIT_THREDS": "5", "RABBIT_COLOUR": "red", "RABBIT_PORT_5672_TCP": "tcp://10.0.0.7:5672"}
    Settings.from_environment({"RABBIT_URL": URL, "RABBIT_EXCHANGE_NAME": "shop_test", **more})
    assert caplog.messages == [
        "RABBIT_COLOUR is not a setting, so it has no effect.",
        "RABBIT_THREDS is not a setting, so it has no effect. Did you mean RABBIT_THREADS?",
    ]


def test_defaults_are_retry_and_a_growing_prefetch():
    settings = Settings.from_environment({"RABBIT_URL": URL, "RABBIT_EXCHANGE_NAME": "shop_test"})
    assert (settings.young_prefetch, settings.grown_prefetch, settings.grace) == (1, 20, None)
    assert settings.policy == Policy(Outcome.RETRY, {}, (10, 60, 600))
    assert "sekret-word" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RABBIT_URL", ""), ("RABBIT_URL", "http://shop:sekret-word@x"), ("RABBIT_URL", "amqp://shop:sekret-word@x:y"),
        ("RABBIT_URL", f"{URL},{URL}other"),
        ("RABBIT_EXCHANGE_NAME", " "), ("RABBIT_PULSE_USER", "a/b"),
        ("RABBIT_PREFETCH", "0"), ("RABBIT_PREFETCH", "many"), ("RABBIT_PREFETCH", "65536"),
        ("RABBIT_THREADS", "0"), ("RABBIT_ON_ERROR", "done"), ("RABBIT_ON_ERROR", "x"),
        ("RABBIT_RETRY_DELAYS", "1;2"), ("RABBIT_RETRY_DELAYS", "0"), ("RABBIT_RETRY_DELAYS", "nan"),
        ("RABBIT_QUEUE_TYPE", "stream"), ("RABBIT_TIME_LIMIT", "-1"), ("RABBIT_GRACE", "inf"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_named_without_the_password(name, value):
    with pytest.raises(SettingsError, match=name) as raised:
        Settings.from_environment({"RABBIT_URL": URL, "RABBIT_EXCHANGE_NAME": "shop_test", name: value})
    assert "sekret-word" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_the_address_may_be_several_separated_by_commas():
    settings = Settings(f"{URL}, amqp://shop:sekret%2Cword@two:5673", "shop_test")
    assert [(one.host, one.port, one.virtual_host, one.credentials.password) for one in settings.addresses] == [
        ("127.0.0.1", 5672, "/", "sekret-word"),
        ("two", 5673, "/", "sekret,word"),
    ]


# Outcomes of exceptions


@pytest.mark.parametrize(
    ("error", "policy", "attempts", "redelivered", "expected"),
    [
        (ValueError(), Policy(), 0, False, (Outcome.RETRY, 10)),
        (ValueError(), Policy(), 2, True, (Outcome.RETRY, 600)),
        (ValueError(), Policy(), 3, True, (Outcome.PARK, 0)),
        (ValueError(), Policy(delays=()), 0, False, (Outcome.PARK, 0)),
        (ValueError(), Policy(Outcome.REQUEUE), 0, False, (Outcome.REQUEUE, 0)),
        (ValueError(), Policy(Outcome.REQUEUE), 0, True, (Outcome.PARK, 0)),
        (UnicodeError(), Policy(by_error={ValueError: Outcome.DISCARD}), 0, False, (Outcome.DISCARD, 0)),
        (
            UnicodeError(), Policy(by_error={ValueError: Outcome.DISCARD, UnicodeError: Outcome.PARK}), 0, False,
            (Outcome.PARK, 0),
        ),
        (KeyError(), Policy(by_error={ValueError: Outcome.DISCARD}), 0, False, (Outcome.RETRY, 10)),
        (SystemExit(), Policy(), 0, False, (Outcome.HALT, 0)),
        (Unreadable(), Policy(Outcome.HALT), 0, False, (Outcome.PARK, 0)),
        (Unreadable(), Policy(Outcome.DISCARD), 0, False, (Outcome.DISCARD, 0)),
        (Discard(), Policy(Outcome.HALT), 9, True, (Outcome.DISCARD, 0)),
        (Halt(), Policy(), 0, False, (Outcome.HALT, 0)),
        (Park(), Policy(), 0, False, (Outcome.PARK, 0)),
        (Requeue(), Policy(), 1, False, (Outcome.PARK, 0)),
        (Retry(after=11), Policy(), 0, False, (Outcome.RETRY, 60)),
        (Retry(after=9999), Policy(), 0, False, (Outcome.RETRY, 600)),
        (Retry(after=1), Policy(), 3, False, (Outcome.PARK, 0)),
    ],
)  # fmt: skip
def test_a_policy_decides_the_outcome_of_an_exception(error, policy, attempts, redelivered, expected):
    assert decide(error, policy, attempts, redelivered) == expected


# Acknowledgements


class Channel:
    """A channel that keeps unacknowledged tags and refuses what RabbitMQ refuses."""

    def __init__(self, tags):
        self.unacknowledged = set(tags)
        self.requeued = set()
        self.frames = 0

    def basic_ack(self, tag, multiple=False):
        assert tag in self.unacknowledged, "PRECONDITION_FAILED - unknown delivery tag"
        self.frames += 1
        self.unacknowledged -= {one for one in self.unacknowledged if one == tag or (multiple and one <= tag)}

    def basic_reject(self, tag, requeue):
        assert tag in self.unacknowledged
        self.frames += 1
        self.unacknowledged.remove(tag)
        self.requeued.add(tag)


@hypothesis_settings(max_examples=40)
@given(st.permutations(range(1, 25)), st.lists(st.integers(1, 6), min_size=1), st.sets(st.integers(1, 24)))
def test_exactly_the_finished_messages_are_settled_in_any_order(order, batches, rejected):
    amqp = Channel(order)
    channel = QueueChannel("q", 0, amqp)
    for tag in sorted(order):
        channel.delivered(tag)
    finished, position = set(), 0
    while position < len(order):
        for size in batches:
            batch = order[position : position + size]
            position += size
            finished |= set(batch)
            channel.settle([tag for tag in batch if tag not in rejected], [tag for tag in batch if tag in rejected])
            assert amqp.unacknowledged == set(order) - finished
            assert amqp.requeued == finished & rejected
    assert (len(channel._unacked), len(channel._settled)) == (0, 0)  # settled tags are forgotten


def test_messages_finished_in_order_take_one_ack():
    amqp = Channel(range(1, 21))
    channel = QueueChannel("q", 0, amqp)
    for tag in range(1, 21):
        channel.delivered(tag)
    channel.settle(list(range(1, 21)), [])
    assert (amqp.frames, amqp.unacknowledged) == (1, set())


# Headers of failed messages


class Method:
    def __init__(self, tag=1, exchange="shop_test", routing_key="shop_test_orders", redelivered=False):
        self.delivery_tag = tag
        self.exchange = exchange
        self.routing_key = routing_key
        self.redelivered = redelivered


def delivery(body=b"{}", **properties):
    return Delivery(QueueChannel("shop_test_orders", 0, None), Method(), pika.BasicProperties(**properties), body)


def test_a_message_without_an_id_gets_one_from_its_content():
    first, again, other = delivery(b"1"), delivery(b"1"), delivery(b"2")
    assert message_id_of(first) == message_id_of(again) != message_id_of(other)
    _, properties = delayed(first, ValueError(), 10)
    assert properties.message_id == message_id_of(first)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("attempts", ["many", -1, 2**40, None, [3], True])
def test_an_invalid_attempts_header_counts_as_none(attempts):
    _, properties = parked(delivery(headers={"consumer-attempts": attempts}), ValueError("x"), "")
    assert properties.headers["consumer-attempts"] == 1


def test_an_exception_without_text_and_invalid_unicode_are_still_written():
    _, properties = parked(delivery(), Unspeakable(), "\ud800" + "x" * 50_000 + "the end")
    assert "Unspeakable" in properties.headers[ERROR]
    assert len(properties.headers[TRACEBACK].encode()) <= 16_010
    assert properties.headers[TRACEBACK].endswith("the end")


def test_properties_pika_cannot_write_are_dropped_from_a_parked_message():
    _, properties = parked(delivery(headers={"odd": 2**70}, message_id="7"), ValueError("x"), "")
    assert (properties.headers["consumer-headers-dropped"], properties.headers[ERROR]) == (True, "ValueError: x")
    _, properties = parked(delivery(message_id="7", priority=2**70), ValueError("x"), "")
    assert (properties.message_id, properties.priority, properties.headers[ERROR]) == ("7", None, "ValueError: x")
    assert properties.encode()


# Threads


def workers_of(threads, handle, **options):
    waiting = FifoBuffer()
    made = Workers(threads, waiting, handle, "test", **options)

    def put(what):
        waiting.put(what)
        made.wake()

    return made, put


def test_workers_take_each_of_a_thousand_messages_and_none_after_the_end():
    taken = []
    workers, put = workers_of(8, taken.append)
    for number in range(1000):
        put(number)
        if number % 7 == 0:
            time.sleep(0.0002)  # lets threads fall asleep and wake in between
    wait_until_equal(lambda: len(taken), 1000)
    workers.end()
    put(1000)
    assert workers.wait(time.monotonic() + 5, lambda: False)
    assert sorted(taken) == list(range(1000))


def test_a_failing_worker_is_reported_and_the_others_continue():
    failures, handled = [], []

    def handle(what):
        if what == "bad":
            raise LookupError("in the toolkit")
        handled.append(what)

    workers, put = workers_of(2, handle, failed=failures.append)
    for what in ("bad", "good"):
        put(what)
    workers.end()
    assert workers.wait(time.monotonic() + 5, lambda: False)
    assert list(map(repr, failures)) == ["LookupError('in the toolkit')"]


@pytest.mark.parametrize("after", ["60", [60]])
def test_a_delay_that_is_no_number_is_a_type_error(after):
    with pytest.raises(TypeError, match="after must be a number of seconds"):
        Retry("later", after=after)


def test_overdue_messages_are_found_oldest_first(monkeypatch):
    monkeypatch.setattr("guardian_consumers._source.OVERDUE_SECONDS", 100)
    waiting, now = FifoBuffer(), time.monotonic()
    old, older, young = delivery(b"1"), delivery(b"2"), delivery(b"3")
    older.since, old.since = now - 300, now - 200
    for one in (older, old, young):
        waiting.put(one)
    assert waiting.overdue() == [older, old]
    assert waiting.overdue() == []
    assert waiting.take() is young


def test_unencodable_messages_are_refused_before_sending():
    publisher = Publisher(Settings(URL, "shop_test"))
    with pytest.raises(TypeError, match="bytes or text"):
        publisher.publish({"a": 1}, "orders", content_type="text/plain")
    with pytest.raises(SettingsError, match="255 bytes"):
        publisher.publish({}, "x" * 300)
    publisher.close()
