"""Why a queue grows: the rule, in tables of neighbouring situations, and each diagnosis on a real broker."""

import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import quote

import pika
import pytest
from django.db.models import F
from django.utils import timezone

from core import broker as broker_clients
from notifications.mails import compose
from notifications.models import Notification
from queues.guard import activity as fetching
from queues.guard import once
from queues.guard.consumer_health import count_consumers
from queues.models import Queue, Watch
from queues.rules import diagnosis
from queues.rules.activity import Activity, Holder, Seen, stored_activity
from queues.rules.diagnosis import Situation, diagnose
from rabbit.entities import QueueFlow
from rabbit.errors import BrokerUnavailable
from rabbit.policies import LengthLimit
from rabbit.requests import queues as requests
from tests.support.toolbox import queue_row, wait_until

NOW = timezone.now()


def minutes_ago(minutes):
    return NOW - timedelta(minutes=minutes)


def flow(published=0, acknowledged=0, delivered=None, redelivered=0, growth=None, seconds=30):
    delivered = acknowledged + redelivered if delivered is None else delivered
    growth = published - acknowledged if growth is None else growth
    return QueueFlow(seconds, published, delivered, redelivered, acknowledged, growth)


def situation(*, consumers=1, ready=0, unacknowledged=0, window=None, holders=(), limit=None, size=None, **known):
    """Return a situation with fresh figures, unless ``recent`` is left out."""
    figures = None
    if "recent" in known:
        recent = known.pop("recent")
        figures = Activity(
            NOW, consumers, ready, unacknowledged, size, tuple(holders), recent, window or recent, limit
        )  # fmt: skip
    return Situation(NOW, consumers, ready, unacknowledged, activity=figures, **known)


def holder(unacknowledged, prefetch=0, *, is_active=True, name="worker"):
    return Holder(name, "alice", prefetch, unacknowledged, is_active)


DROPS = LengthLimit(100, None, drops_oldest=True)
REJECTS = LengthLimit(100, None, drops_oldest=False)
BYTES = LengthLimit(None, 1000, drops_oldest=True)
QUIET = flow()

SITUATIONS = {
    # no consumer: but neither a queue that needs none, nor one whose count is unknown
    "no_consumer": [
        situation(consumers=0, ready=3, unattended_since=minutes_ago(9)),
        situation(consumers=0),
        situation(consumers=0, ready=None),
        situation(consumers=0, ready=3, recent=flow(published=50), limit=DROPS),
    ],
    # messages are returned: but a consumer that connects again gets once what it held before
    "redelivering": [
        situation(unacknowledged=5, recent=flow(redelivered=200), holders=[holder(5, 5)]),
        situation(ready=5000, unacknowledged=1, recent=flow(redelivered=9), holders=[holder(1, 1)]),
        situation(unacknowledged=5, recent=flow(redelivered=3), window=flow(redelivered=30, seconds=300)),
        situation(unacknowledged=5, recent=flow(redelivered=90), stalled_since=minutes_ago(9)),
    ],
    "held_by_one": [
        situation(consumers=2, unacknowledged=50, recent=QUIET, holders=[holder(50), holder(0)]),
        situation(consumers=3, unacknowledged=50, recent=flow(20, 20), holders=[holder(50, 100), holder(0), holder(0)]),
        situation(
            consumers=2, unacknowledged=2, recent=QUIET, holders=[holder(2), holder(0)], stalled_since=minutes_ago(9)
        ),
    ],
    "stalled": [
        situation(ready=1, unacknowledged=2, stalled_since=minutes_ago(5)),
        situation(ready=1, unacknowledged=2, stalled_since=minutes_ago(5), recent=QUIET),
        # each of two consumers holds messages
        situation(
            consumers=2, unacknowledged=9, recent=QUIET, holders=[holder(5), holder(4)], stalled_since=minutes_ago(9)
        ),
        # a channel consumes several queues, so nobody knows whose messages it holds
        situation(
            consumers=2, unacknowledged=9, recent=QUIET, holders=[holder(None), holder(0)], stalled_since=minutes_ago(9)
        ),
        # a consumer connected again
        situation(
            unacknowledged=5, recent=flow(redelivered=5), holders=[holder(5, 5)], stalled_since=minutes_ago(9)
        ),
    ],
    "limited_by_broker": [
        situation(ready=100, recent=flow(500, 100, growth=0), limit=DROPS),
        situation(ready=100, recent=flow(500, 100, growth=0), limit=REJECTS),
        situation(ready=8, size=950, recent=flow(500, 100, growth=0), limit=BYTES),
        situation(consumers=0, needs_consumer=False, ready=100, recent=flow(500, growth=0), limit=DROPS),
    ],
    "consumers_too_slow": [
        situation(ready=900, recent=flow(300, 100)),
        # longer than a moment, though too slowly to show at once
        situation(ready=900, recent=flow(9, 6), window=flow(90, 60, seconds=300)),
        # within the broker's limit, or growing without a loss
        situation(ready=90, recent=flow(300, 100), limit=DROPS),
        situation(ready=100, recent=flow(150, 50, growth=100), limit=DROPS),
        # as fast as the publishers, with a backlog
        situation(ready=5000, recent=flow(100, 101), is_over_threshold=True),
    ],
    "draining": [
        situation(ready=900, recent=flow(100, 300)),
        situation(ready=900, recent=flow(100, 300), is_over_threshold=True),
        # the burst is over
        situation(ready=900, recent=flow(0, 30), window=flow(1000, 100, seconds=300)),
    ],
    "unknown": [
        situation(consumers=None, ready=3),
        situation(ready=None),
        situation(ready=9000, is_over_threshold=True),
        # full, but the missing messages were rejected by its consumers
        situation(ready=95, recent=flow(500, delivered=500, growth=0), limit=DROPS),
        # nothing acknowledged, for less than a stall takes
        situation(ready=3, unacknowledged=1, recent=flow(published=10), stalled_since=minutes_ago(4)),
    ],
    "healthy": [
        situation(),
        situation(ready=3),
        situation(ready=3, recent=flow(100, 98)),
        # a fast queue varies by a few percent
        situation(ready=300, recent=flow(10_000, 9_800)),
        situation(ready=300, recent=flow(9_800, 10_000)),
        # over its threshold, and all is acknowledged within seconds
        situation(ready=2100, recent=flow(30_000, 30_010), is_over_threshold=True),
        # needs no consumer
        situation(consumers=0, needs_consumer=False, ready=3),
        # at work on one message that takes long, while others wait for work
        situation(consumers=2, unacknowledged=1, recent=QUIET, holders=[holder(1), holder(0)]),
        # got its messages a moment ago
        situation(consumers=2, unacknowledged=9, recent=flow(9, delivered=9), holders=[holder(9), holder(0)]),
        # the other waits to become the single active consumer
        situation(consumers=2, unacknowledged=9, recent=QUIET, holders=[holder(9), holder(0, is_active=False)]),
        # full, and nothing is lost
        situation(ready=100, recent=flow(100, 100), limit=DROPS),
        # the stall is over
        situation(ready=3, unacknowledged=1, recent=flow(20, 20), stalled_since=minutes_ago(9)),
        # others are redelivered, and some acknowledged
        situation(unacknowledged=5, recent=flow(20, 20, redelivered=200)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "known"), [(code, known) for code, all_known in SITUATIONS.items() for known in all_known]
)
def test_a_situation_has_one_diagnosis(code, known):
    assert diagnose(known).code == code


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (
            situation(
                consumers=0,
                ready=3,
                unattended_since=minutes_ago(12),
                last_consumer=Seen("wor\u202eker", "alice", minutes_ago(13)),
            ),
            "It has had no consumer for 12 minutes. The last one that Guardian saw was wor\\u202eker (user alice), "
            "13 minutes ago. 3 messages wait.",
        ),
        (
            situation(
                consumers=2,
                ready=2000,
                recent=flow(300, 150),
                holders=[holder(1), holder(1)],
                deletion_limit=8000,
            ),
            "Its 2 consumers acknowledge 300 messages a minute, but 600 messages a minute are published. At this rate "
            "it reaches its deletion limit in 20 minutes. It needs 4 consumers of the same speed.",
        ),
        (
            situation(consumers=2, ready=2000, recent=flow(300, 150), holders=[holder(1), holder(None)]),
            "Its 2 consumers acknowledge 300 messages a minute, but 600 messages a minute are published.",
        ),
        (
            situation(ready=600, recent=flow(0, 300)),
            "It is getting shorter: 10 messages a second are acknowledged, no messages are published. At this rate it "
            "is empty in 60 seconds.",
        ),
        (
            situation(unacknowledged=5, recent=flow(redelivered=200)),
            "Its messages are delivered again and again: 200 redeliveries in the last 30 seconds, and no message was "
            "acknowledged. The consumers return their messages, or disconnect, before they acknowledge one.",
        ),
        (
            situation(consumers=3, unacknowledged=50, recent=QUIET, holders=[holder(50), holder(0), holder(0)]),
            "One consumer holds all 50 messages, and the other 2 consumers have none: worker (user alice), whose "
            "prefetch is unlimited.",
        ),
        (
            situation(
                ready=1, unacknowledged=2, stalled_since=minutes_ago(7), recent=QUIET, holders=[holder(2)]
            ),
            "Its consumer has acknowledged nothing for 7 minutes: 2 messages unacknowledged (worker (user alice) holds "
            "2), 1 ready.",
        ),
        (
            situation(ready=100, recent=flow(900, 300, growth=0), limit=DROPS),
            "It has reached the broker's own limit of 100 messages. The broker drops the oldest: about 20 messages a "
            "second.",
        ),
    ],
)  # fmt: skip
def test_the_text_has_the_figures(known, text):
    assert diagnose(known).text == text


def test_it_began_when_the_code_last_changed():
    known = situation(ready=900, recent=flow(300, 100), since=minutes_ago(9))
    assert diagnose(known).since == NOW
    assert diagnose(
        situation(ready=900, recent=flow(300, 100), code="consumers_too_slow", since=minutes_ago(9))
    ).since == minutes_ago(9)


def test_stored_figures_are_read_as_they_were_written():
    known = Activity(
        NOW, 2, 3, 4, 5, (holder(1), holder(None)), flow(1), flow(2), DROPS, Seen("worker", "alice", NOW)
    )  # fmt: skip
    assert stored_activity(known.as_json()) == known
    assert stored_activity(Activity(NOW).as_json()) == Activity(NOW)


@pytest.mark.parametrize(("counted", "fetched", "code"), [(4, 6, "healthy"), (6, 4, "healthy"), (6, 6, "unknown")])
def test_old_figures_are_not_stated_as_current(counted, fetched, code):
    row = queue_row("q", consumers=2, ready=0, unacknowledged=0, activity=Activity(minutes_ago(fetched), 2).as_json())
    assert diagnosis.of_queue_at(row, minutes_ago(counted), NOW).code == code


@pytest.fixture
def calls(monkeypatch):
    """Collect the paths of the requests to the management API."""
    made = []
    monkeypatch.setattr(broker_clients, "listeners", [lambda call: made.append(call.path)])
    return made


@pytest.mark.parametrize("queues", [3, 60])
def test_a_run_looks_at_fifty_queues(guarded, amqp, pulse_user, calls, queues, django_assert_num_queries):
    names = [f"queue/alice/{number}" for number in range(queues)]
    for name in names:
        amqp.queue(name)
        amqp.channel.basic_consume(name, lambda *_: None)
    once.run_once()
    Watch.objects.get_or_create(id=1)
    wait_until(lambda: count_consumers() == 0 and Queue.objects.filter(consumers=1).count() == queues)
    Queue.objects.filter(name=names[0]).update(state="warned", activity=Activity(timezone.now()).as_json())
    Queue.objects.filter(name=names[1]).update(state="deleting")
    Queue.objects.filter(name__in=names[2:]).update(activity=None)
    calls.clear()
    with django_assert_num_queries(11):
        count_consumers()
    per_queue = min(queues - 1, 50)
    assert calls.count("/api/queues/{vhost}/{name}") == per_queue
    assert len(calls) == 1 + per_queue + 2
    # The one over its threshold is among them, although its figures were the newest.
    assert "last_consumer" in Queue.objects.get(name=names[0]).activity


def test_a_page_takes_two_requests_for_rates_and_none_for_the_diagnosis(guarded, amqp, pulse_user, as_alice, calls):
    amqp.queue("queue/alice/q", 3)
    amqp.channel.basic_consume("queue/alice/q", lambda *_: None)
    once.run_once()
    wait_until(lambda: count_consumers() == 0 and Queue.objects.get().activity)
    Queue.objects.update(activity=None)
    calls.clear()
    as_alice.get(f"/queues/{Queue.objects.get().uuid}/")
    assert sorted(path.rpartition("/")[2] for path in calls) == [
        "bindings", "channels", "connections", "overview", "{name}", "{name}", "{vhost}", "{vhost}",
    ]  # fmt: skip
    assert Queue.objects.get().activity["consumers"] == 1


def test_the_last_consumer_is_stored(guarded, amqp, pulse_user):
    amqp.queue("queue/alice/q", 3)
    amqp.channel.basic_consume("queue/alice/q", lambda *_: None, consumer_tag="only")
    once.run_once()
    wait_until(lambda: count_consumers() == 0 and "last_consumer" in (Queue.objects.get().activity or ()))
    amqp.channel.basic_cancel("only")
    wait_until(lambda: count_consumers() == 0 and Queue.objects.get().consumers == 0)
    found = diagnosis.of_queue_at(Queue.objects.get(), timezone.now(), timezone.now())
    assert (found.code, "(user guardian)" in found.text) == ("no_consumer", True)


@pytest.mark.parametrize(
    ("kind", "messages", "expected"),
    [
        (
            "warning",
            6,
            "has 6 messages. Its warning threshold is 5. It has had no consumer for 9 minutes. Guardian has",
        ),
        ("deletion", 11, "its deletion limit is 10. The last diagnosis: It has had no consumer for 9 minutes."),
    ],
)
def test_a_mail_says_why_the_queue_grew(guarded, amqp, pulse_user, kind, messages, expected):
    amqp.queue("queue/alice/q")
    once.run_once()
    Queue.objects.update(unattended_since=timezone.now() - timedelta(minutes=9))
    Watch.objects.update(consumers_counted_at=timezone.now())
    amqp.publish("queue/alice/q", messages)
    once.run_once()
    notification = Notification.objects.filter(kind=kind).first()
    assert notification.facts["diagnosis"]["code"] == "no_consumer"
    assert expected in " ".join(compose(notification).body.split())


class Traffic:
    """Publishers and consumers of several queues, each with a channel of its own, on one connection in a thread."""

    def __init__(self, amqp_url, vhost):
        self._url = f"{amqp_url.rstrip('/')}/{quote(vhost, safe='')}"
        self._stop = threading.Event()
        self._steps = []

    @contextmanager
    def running(self):
        with pika.BlockingConnection(pika.URLParameters(self._url)) as self._connection:
            self._channel = self._connection.channel()
            for step in _situations(self):
                self._steps.append(step)
            thread = threading.Thread(target=self._run)
            thread.start()
            try:
                yield
            finally:
                self._stop.set()
                thread.join()

    def _run(self):
        while not self._stop.is_set():
            for step in self._steps:
                step()
            self._connection.sleep(0.1)

    def queue(self, name, messages=0, **arguments):
        self._channel.queue_declare(f"queue/alice/{name}", durable=True, arguments=arguments)
        self.publish(name, messages)

    def publish(self, name, messages):
        for _ in range(messages):
            self._channel.basic_publish("", f"queue/alice/{name}", b"x")

    def consume(self, name, prefetch=0):
        """Start a consumer, and return its channel and the delivery tags in hand."""
        channel, in_hand = self._connection.channel(), []
        channel.basic_qos(prefetch_count=prefetch)
        channel.basic_consume(f"queue/alice/{name}", lambda _, method, *__: in_hand.append(method.delivery_tag))
        self._connection.process_data_events(0.1)
        return channel, in_hand


def _situations(traffic):
    """Prepare each situation in the queue named after its diagnosis. Yield what is done ten times a second."""

    def acknowledge(consumer, messages):
        channel, in_hand = consumer
        for tag in in_hand[:messages]:
            channel.basic_ack(tag)
        del in_hand[:messages]

    def give_back(consumer):
        channel, in_hand = consumer
        while in_hand:
            channel.basic_nack(in_hand.pop(), requeue=True)

    traffic.queue("no_consumer", 3)
    traffic.queue("redelivering", 5)
    failing = traffic.consume("redelivering", prefetch=2)
    yield lambda: give_back(failing)
    traffic.queue("held_by_one", 20)
    traffic.consume("held_by_one")
    traffic.consume("held_by_one")
    traffic.queue("stalled", 5)
    traffic.consume("stalled", prefetch=2)
    traffic.queue("limited_by_broker", 20, **{"x-max-length": 10})
    dropped = traffic.consume("limited_by_broker", prefetch=5)
    yield lambda: (traffic.publish("limited_by_broker", 4), acknowledge(dropped, 1))
    traffic.queue("consumers_too_slow")
    slow = traffic.consume("consumers_too_slow", prefetch=5)
    yield lambda: (traffic.publish("consumers_too_slow", 4), acknowledge(slow, 1))
    traffic.queue("draining", 3000)
    fast = traffic.consume("draining", prefetch=20)
    yield lambda: acknowledge(fast, 5)
    traffic.queue("healthy")
    enough = traffic.consume("healthy", prefetch=20)
    yield lambda: (traffic.publish("healthy", 4), acknowledge(enough, 20))
    traffic.queue("unknown", 5)
    traffic.consume("unknown", prefetch=1)


@pytest.mark.rabbitmq
@pytest.mark.slow
def test_each_situation_on_the_broker_gets_its_diagnosis(guarded, broker, settings, monkeypatch):
    monkeypatch.setattr(requests, "SAMPLE_SECONDS", 5)
    monkeypatch.setattr(fetching, "RECENT_SECONDS", 15)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100_000
    with Traffic(broker.amqp_url, guarded).running():
        time.sleep(18)
        once.run_once()
        count_consumers()
        Queue.objects.filter(name="queue/alice/stalled").update(stalled_since=F("stalled_since") - timedelta(minutes=6))
        time.sleep(7)
        once.run_once()
        count_consumers()
        found = {queue.name.rpartition("/")[2]: queue for queue in Queue.objects.all()}
    assert {name: queue.diagnosis for name, queue in found.items()} == {code: code for code in Queue.Diagnosis.values}


def test_an_answer_that_is_missing_costs_no_other_queue_its_figures(amqp, guarded, management, monkeypatch):
    names = [f"queue/alice/{number}" for number in range(3)]
    for name in names:
        amqp.queue(name)
    real = management.queue

    def queue(vhost, name, **options):
        if name == names[1]:
            raise BrokerUnavailable("no answer in time", timed_out=True)
        return real(vhost, name, **options)

    monkeypatch.setattr(management, "queue", queue)
    found = fetching.fetch(management, [(guarded, name) for name in names], NOW)
    assert found.keys() == {(guarded, names[0]), (guarded, names[2])}
