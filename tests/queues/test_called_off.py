"""Deletions that are called off, because the queue is no longer over its limit: it keeps all its messages."""

import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

from notifications.models import Notification
from queues.archives import reading, writing
from queues.guard import deleter, destroying
from queues.guard.once import run_once
from queues.models import Archive, Queue
from queues.rules.thresholds import FETCH_PAUSE, UNACKED_MINIMUM
from rabbit.fetching import Fetch
from tests.support.faults import once_before
from tests.support.proxy import Proxy
from tests.support.toolbox import (
    Killed,
    broker_version,
    call_before,
    queue_lengths,
    raising,
    stored_queue,
    wait_until_equal,
)

pytestmark = pytest.mark.rabbitmq

NAME = "queue/alice/jobs"
LIMIT = 100


@pytest.fixture(autouse=True)
def limits(guarded, settings, monkeypatch):
    settings.GUARDIAN_WARN_QUEUE_LENGTH = 50
    settings.GUARDIAN_MAX_QUEUE_LENGTH = LIMIT
    monkeypatch.setattr(destroying, "QUORUM_TICK_SECONDS", 2)  # the broker of the tests ticks each second


class Jobs:
    """A queue, the bodies published to it, and those that its consumer took."""

    def __init__(self, amqp, lengths):
        self.channel = amqp.channel
        self.lengths = lengths
        self.published = set()
        self.consumed = set()

    def declare(self, queue_type, **arguments):
        self.channel.queue_declare(NAME, durable=True, arguments={"x-queue-type": queue_type, **arguments})

    def fill(self, length):
        """Publish messages, each with a body of its own, until the queue is listed with this length."""
        for _ in range(length - self.lengths()[NAME]):
            body = uuid.uuid4().hex
            self.channel.basic_publish("", NAME, body.encode())
            self.published.add(body)
        wait_until_equal(self.lengths, {NAME: length})

    def get(self, count):
        """Take messages without acknowledging them, and return their tags."""
        taken = [self.channel.basic_get(NAME) for _ in range(count)]
        self.consumed.update(body.decode() for _, _, body in taken)
        return [method.delivery_tag for method, _, _ in taken]

    def consume(self, count):
        """Take and acknowledge messages."""
        for tag in self.get(count):
            self.channel.basic_ack(tag)

    def reject(self, times):
        """Publish a message, and reject it this number of times."""
        self.fill(1)
        for _ in range(times):
            method, _, _ = self.channel.basic_get(NAME)
            self.channel.basic_reject(method.delivery_tag, requeue=True)
        wait_until_equal(self.lengths, {NAME: 1})

    def found(self):
        """Return the bodies in the queue, in kept archives, and at the consumer."""
        kept = Archive.objects.filter(state="kept")
        bodies = {message.body.decode() for one in kept for _, message in reading.messages(one)}
        while (got := self.channel.basic_get(NAME, auto_ack=True))[0] is not None:
            bodies.add(got[2].decode())
        return bodies | self.consumed


@pytest.fixture
def jobs(amqp, management, guarded):
    return Jobs(amqp, lambda: queue_lengths(management, guarded))


@pytest.fixture
def while_fetched(monkeypatch):
    """Return a function that sets an action, which runs in each pass once the first messages are fetched."""

    def set_action(action):
        cancel = Fetch.cancel
        acted = []

        def act_first(fetch):
            if fetch not in acted:
                acted.append(fetch)
                action()
            cancel(fetch)

        monkeypatch.setattr(Fetch, "cancel", act_first)

    return set_action


def store_returned(vhost, at, **fields):
    """Store the row of the queue, whose messages were fetched and returned at this time."""
    stored_queue(NAME, vhost=vhost, type="quorum", attempted_at=at, returned_at=at, unacknowledged=0, **fields)


@pytest.fixture
def return_is_delivery(management):
    """Return whether the broker counts each return of a quorum queue's messages as a delivery."""
    return broker_version(management) < (4, 3)


def test_ten_deletions_that_are_called_off_cost_a_quorum_queue_no_message(jobs, while_fetched):
    jobs.declare("quorum", **{"x-delivery-limit": 3})
    while_fetched(lambda: jobs.consume(10))
    for _ in range(10):
        jobs.fill(LIMIT + 10)
        assert run_once().deleted == 0
    assert jobs.found() == jobs.published
    assert not Archive.objects.exists()


@pytest.mark.parametrize("limit", [3, 0])
def test_a_message_without_a_delivery_left_is_in_the_queue_or_in_an_archive(
    jobs, while_fetched, return_is_delivery, limit
):
    jobs.declare("quorum", **{"x-delivery-limit": limit})
    jobs.reject(limit)
    jobs.fill(LIMIT + 10)
    while_fetched(lambda: jobs.consume(10))
    assert run_once().deleted == 0
    assert jobs.found() == jobs.published
    kept = [(one.state, one.reason) for one in Archive.objects.all()]
    assert kept == ([("kept", "called_off")] if return_is_delivery else [])
    for one in Archive.objects.all():
        assert timedelta(hours=23) < one.expires - timezone.now() <= timedelta(days=1)


def test_the_archive_of_a_message_without_a_delivery_left_survives_a_kill(jobs):
    jobs.declare("quorum", **{"x-delivery-limit": 1})
    jobs.reject(1)
    jobs.fill(LIMIT + 10)
    with raising(destroying, "store_batch", Killed, after=True), pytest.raises(Killed):
        run_once()
    wait_until_equal(jobs.lengths, {NAME: LIMIT + 9})
    Archive.objects.update(created=timezone.now() - writing.UNKNOWN_OUTCOME)
    writing.enforce_bounds()
    assert jobs.found() == jobs.published


def test_the_archive_of_a_message_without_a_delivery_left_is_kept_if_the_connection_is_lost(
    jobs, while_fetched, broker, settings, monkeypatch
):
    jobs.declare("quorum", **{"x-delivery-limit": 1})
    jobs.reject(1)
    jobs.fill(LIMIT + 10)
    while_fetched(lambda: jobs.consume(10))
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        call_before(monkeypatch, Fetch, "requeue", proxy.close_open)
        assert run_once().deleted == 0
    wait_until_equal(jobs.lengths, {NAME: LIMIT - 1})
    assert jobs.found() == jobs.published


def test_a_queue_whose_messages_were_returned_stays_up_to_twice_its_limit(jobs, guarded):
    jobs.declare("quorum")
    jobs.fill(2 * LIMIT)
    store_returned(guarded, timezone.now(), ready=2 * LIMIT)
    assert [run_once().deleted for _ in range(2)] == [0, 0]
    jobs.fill(2 * LIMIT + 1)
    assert [run_once().deleted for _ in range(2)] == [0, 1]
    facts = Notification.objects.get(kind="deletion", recipient="ops@example.org").facts
    assert (facts["dropped"], facts["why_not_archived"]) == (2 * LIMIT + 1, destroying.FETCH_PAUSED)


def test_a_limit_raised_meanwhile_spares_a_queue_whose_messages_were_returned(jobs, guarded, monkeypatch):
    jobs.declare("quorum")
    jobs.fill(2 * LIMIT + 1)
    store_returned(guarded, timezone.now(), ready=2 * LIMIT)
    once_before(monkeypatch, "the announcement", lambda: Queue.objects.update(max_length=LIMIT + 1))
    assert [run_once().deleted for _ in range(2)] == [0, 0]
    assert Queue.objects.get().max_length == LIMIT + 1


def test_an_hour_after_their_return_the_messages_are_archived(jobs, guarded):
    jobs.declare("quorum")
    jobs.fill(LIMIT + 1)
    store_returned(guarded, timezone.now() - FETCH_PAUSE, ready=LIMIT + 1)
    assert run_once().deleted == 1
    assert Archive.objects.get().messages == LIMIT + 1


@pytest.mark.parametrize("state", ["ok", "gone"])
def test_attempts_are_forgotten_when_the_queue_is_empty_or_declared_again(jobs, guarded, state):
    jobs.declare("quorum")
    if state == "gone":
        jobs.fill(1)
    store_returned(guarded, timezone.now() - timedelta(minutes=1), fetch_attempts=2, state=state, ready=1)
    run_once()
    queue = Queue.objects.get()
    assert (queue.fetch_attempts, queue.attempted_at, queue.returned_at) == (0, None, None)


def test_a_called_off_deletion_does_not_put_off_when_an_interrupted_attempt_is_forgotten(jobs, guarded, while_fetched):
    jobs.declare("quorum")
    jobs.fill(LIMIT + 10)
    interrupted_at = timezone.now() - timedelta(hours=23)
    store_returned(guarded, interrupted_at, fetch_attempts=1, ready=LIMIT + 10)
    while_fetched(lambda: jobs.consume(10))
    assert run_once().deleted == 0
    assert Queue.objects.values_list("fetch_attempts", "attempted_at").get() == (1, interrupted_at)


@pytest.mark.parametrize("is_acknowledged", [True, False], ids=["acknowledged", "held"])
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_messages_that_consumers_hold_are_counted_again_after_the_fetch(
    jobs, while_fetched, queue_type, is_acknowledged
):
    jobs.declare(queue_type)
    jobs.fill(120)
    tags = jobs.get(60)
    if queue_type == "quorum":
        run_once()  # stores since when its unacknowledged messages put it over its limit
    Queue.objects.update(over_unacked_since=timezone.now() - UNACKED_MINIMUM)
    fetched = []

    def acknowledge():
        fetched.append(1)
        for tag in tags if is_acknowledged else ():
            jobs.channel.basic_ack(tag)

    while_fetched(acknowledge)
    assert run_once().deleted == (not is_acknowledged)
    assert fetched
    if is_acknowledged:
        assert jobs.found() == jobs.published
    else:
        assert (Archive.objects.get().messages, Archive.objects.get().held) == (60, 60)


def test_a_message_that_returns_to_the_queue_right_before_the_deletion_counts_once(jobs, while_fetched, monkeypatch):
    jobs.declare("classic")
    jobs.fill(120)
    tags = jobs.get(60)

    def acknowledge():
        while tags[35:]:
            jobs.channel.basic_ack(tags.pop())

    def requeue():
        while tags:
            jobs.channel.basic_nack(tags.pop())

    while_fetched(acknowledge)
    once_before(monkeypatch, "the announcement", requeue)
    assert run_once().deleted == 0
    assert jobs.found() == jobs.published


def test_a_queue_whose_fetch_was_interrupted_is_judged_by_the_next_two_lists(jobs):
    jobs.declare("quorum")
    jobs.fill(LIMIT + 1)
    with raising(destroying, "store_batch", Killed), pytest.raises(Killed):
        run_once()
    wait_until_equal(jobs.lengths, {NAME: LIMIT + 1})
    jobs.fill(2 * LIMIT + 1)
    assert deleter.run().deleted == 0
    assert [run_once().deleted for _ in range(2)] == [0, 1]
