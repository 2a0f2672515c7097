"""Replays: an archive's messages are published again, each once."""

import time

import pika
import pytest

from accounts.models import Owner, PulseUser
from core.broker import session
from queues.actions import single
from queues.archives import replay
from queues.archives.replay import ReplayRefused
from queues.guard.once import run_once
from queues.models import Archive, Queue, Replay
from rabbit.confirmed import KEY_HEADER, ConfirmChannel, ConfirmedPublisher, Outcome
from rabbit.fetching import Bounds, Fetch, Fetched
from tests.support.faults import once_after
from tests.support.proxy import Proxy
from tests.support.toolbox import AWAY_AMQP, call_before, in_parallel, wait_until_equal

NAME = "queue/alice/builds"
FIRST_BATCH = "the first batch of a replay"


@pytest.fixture(autouse=True)
def limit(guarded, pulse_user, settings):
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 10_000


@pytest.fixture
def archived(amqp, alice):
    """Return the archive of a queue that had this number of messages; it is declared again."""

    def archived(messages):
        amqp.queue(NAME, messages)
        run_once()
        single.delete_queue(Queue.objects.get(name=NAME), alice)
        amqp.queue(NAME)
        run_once()
        return Archive.objects.get()

    return archived


def test_a_replay_brings_back_all_messages_in_order(amqp, alice, archived):
    started = replay.start(archived(250), alice, queue=NAME)
    assert (started.total, started.state) == (250, "running")
    assert replay.run_due() == 250
    started.refresh_from_db()
    assert (started.state, started.sent, started.repeated, started.error) == ("done", 250, 0, "")
    assert amqp.numbers(NAME) == list(range(250))


def test_a_range_is_replayed_to_an_exchange_with_the_routing_keys(amqp, alice, archived):
    amqp.channel.exchange_declare("exchange/alice/jobs", "topic")
    amqp.channel.queue_declare("other", durable=True)
    amqp.channel.queue_bind("other", "exchange/alice/jobs", "#")
    replay.start(archived(20), alice, exchange="exchange/alice/jobs", first=5, last=8)
    replay.run_due()
    found = amqp.taken("other")
    assert [(method.routing_key, int(body)) for method, _, body in found] == [(NAME, number) for number in (4, 5, 6, 7)]


def test_properties_and_headers_come_back_without_what_routes_or_expires():
    message = Fetched(
        b"x", {"user_id": "guest", "expiration": "5", "type": "t"}, {"CC": ["a"], "BCC": ["b"], "n": 1}, "e", "k", False
    )
    clean = replay.sanitized(message)
    assert clean.properties == {"type": "t"}
    assert clean.headers == {
        "n": 1, "x-guardian-original": {"CC": ["a"], "BCC": ["b"], "user_id": "guest", "expiration": "5"},
    }  # fmt: skip
    plain = Fetched(b"x", {"type": "t"}, {"n": 1}, "e", "k", False)
    assert replay.sanitized(plain) == plain


def test_a_replay_reaches_nobody_by_carbon_copy(amqp, alice, archived, guarded):
    amqp.queue("queue/bob/secret")
    amqp.queue(NAME)
    properties = pika.BasicProperties(headers={"CC": ["queue/bob/secret"], "n": 1}, expiration="60000")
    amqp.channel.basic_publish("", NAME, b"7", properties)
    amqp.taken("queue/bob/secret")
    one = archived(0)
    replay.start(one, alice, queue=NAME)
    replay.run_due()
    [(_, got, body)] = amqp.taken(NAME)
    assert (body, got.expiration, got.headers["n"]) == (b"7", None, 1)
    assert got.headers["x-guardian-original"] == {"CC": ["queue/bob/secret"], "expiration": "60000"}
    assert got.headers[KEY_HEADER] == f"{one.uuid.hex}/1"
    assert amqp.taken("queue/bob/secret") == []


def test_a_replay_to_a_wrong_target_or_range_is_refused(alice, archived):
    archive = archived(3)
    for to, why in (
        ({"queue": "queue/bob/builds"}, "starts with queue/alice/"),
        ({"exchange": "amq.topic"}, "starts with exchange/alice/"),
        ({"queue": "queue/alice/none"}, "no queue or exchange of this name"),
        ({"exchange": "exchange/alice/none"}, "no queue or exchange of this name"),
        ({}, "either a queue or an exchange"),
        ({"queue": NAME, "exchange": "exchange/alice/jobs"}, "either a queue or an exchange"),
        ({"queue": NAME, "first": 0}, "within 1 to 3"),
        ({"queue": NAME, "last": 4}, "within 1 to 3"),
        ({"queue": NAME, "first": 3, "last": 2}, "within 1 to 3"),
    ):
        with pytest.raises(ReplayRefused, match=why):
            replay.start(archive, alice, **to)
    assert not Replay.objects.exists()


def test_a_full_queue_ends_a_replay_with_the_first_message_that_it_refused(amqp, alice, archived):
    one = archived(20)
    name = "queue/alice/full"
    amqp.queue(name, arguments={"x-max-length": 5, "x-overflow": "reject-publish"})
    run_once()
    started = replay.start(one, alice, queue=name)
    replay.run_due()
    started.refresh_from_db()
    assert (started.state, started.sent) == ("failed", 5)
    assert started.error.startswith("Message 6 was not taken: the queue is full.")


def test_a_target_deleted_meanwhile_ends_a_replay(amqp, alice, archived):
    started = replay.start(archived(20), alice, queue=NAME)
    amqp.channel.queue_delete(NAME)
    replay.run_due()
    started.refresh_from_db()
    assert (started.state, started.sent) == ("failed", 0)
    assert "no queue is bound for it" in started.error


def test_without_the_broker_a_replay_waits(alice, archived, settings, broker, amqp):
    started = replay.start(archived(5), alice, queue=NAME)
    settings.RABBIT_URL = AWAY_AMQP
    assert replay.run_due() == 0
    settings.RABBIT_URL = broker.amqp_url
    assert replay.run_due() == 5
    started.refresh_from_db()
    assert (started.state, started.repeated) == ("done", 0)


def test_lost_confirms_repeat_one_batch(amqp, alice, archived, settings, broker, monkeypatch):
    started = replay.start(archived(250), alice, queue=NAME)
    with Proxy.before(broker.amqp_url) as proxy:
        settings.RABBIT_URL = proxy.url(broker.amqp_url)
        once_after(monkeypatch, FIRST_BATCH, lambda: proxy.cut_after(0))
        replay.run_due()
    settings.RABBIT_URL = broker.amqp_url
    started.refresh_from_db()
    assert (started.state, started.sent, started.in_flight) == ("running", 100, 100)
    replay.run_due()
    started.refresh_from_db()
    assert (started.state, started.sent, started.repeated) == ("done", 250, 100)
    arrived = amqp.numbers(NAME)
    assert list(dict.fromkeys(arrived)) == list(range(250))
    assert len(arrived) <= 350


def test_two_replays_at_once_both_arrive(amqp, alice, archived):
    one = archived(150)
    replay.start(one, alice, queue=NAME)
    replay.start(one, alice, queue=NAME, first=101)
    in_parallel(*[replay.run_due] * 2)
    assert [started.state for started in Replay.objects.all()] == ["done", "done"]
    assert sorted(amqp.numbers(NAME)) == sorted([*range(150), *range(100, 150)])


def test_two_replays_that_begin_at_once_stay_below_the_deletion_limit(alice, archived, settings):
    one = archived(20)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 30
    started = in_parallel(*[lambda: replay.start(one, alice, queue=NAME)] * 2)
    assert {type(outcome) for outcome in started} == {Replay, ReplayRefused}
    with pytest.raises(ReplayRefused, match="another replay or move is sending 20 more"):
        replay.start(one, alice, queue=NAME, last=11)
    replay.start(one, alice, queue=NAME, last=10)


def test_what_another_replay_has_sent_already_needs_no_more_room(alice, archived, settings):
    one = archived(20)
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 30
    replay.start(one, alice, queue=NAME)
    Replay.objects.update(sent=15)
    replay.start(one, alice, queue=NAME)


def test_a_replay_is_stopped(amqp, alice, archived, monkeypatch):
    started = replay.start(archived(250), alice, queue=NAME)
    call_before(monkeypatch, ConfirmedPublisher, "publish", lambda: replay.stop(started, alice))
    assert replay.run_due() == 100
    started.refresh_from_db()
    assert (started.state, started.sent) == ("stopped", 100)
    assert replay.run_due() == 0


def test_a_replay_ends_when_its_owner_loses_access_in_the_middle(amqp, alice, archived, monkeypatch):
    started = replay.start(archived(250), alice, queue=NAME)
    once_after(monkeypatch, FIRST_BATCH, PulseUser.objects.get().owners.clear)
    assert replay.run_due() == 100
    started.refresh_from_db()
    assert (started.state, started.sent, started.error) == ("failed", 100, replay.NO_ACCESS)
    assert len(amqp.numbers(NAME)) == 100


def test_a_replay_waits_while_its_target_is_about_to_be_deleted(amqp, alice, archived, monkeypatch):
    started = replay.start(archived(250), alice, queue=NAME)
    once_after(monkeypatch, FIRST_BATCH, lambda: Queue.objects.update(state="deleting"))
    assert replay.run_due() == 100
    with pytest.raises(ReplayRefused, match="about to delete"):
        replay.start(started.archive, alice, queue=NAME)
    Queue.objects.update(state="ok")
    assert replay.run_due() == 150
    started.refresh_from_db()
    assert (started.state, started.sent, started.repeated) == ("done", 250, 0)


def test_a_replay_ends_when_its_owner_is_deactivated(amqp, alice, archived):
    started = replay.start(archived(5), alice, queue=NAME)
    Owner.objects.update(is_active=False)
    assert replay.run_due() == 0
    started.refresh_from_db()
    assert (started.state, started.sent, started.error) == ("failed", 0, replay.NO_ACCESS)


def test_the_rate_limits_a_replay(amqp, alice, archived):
    replay.start(archived(300), alice, queue=NAME, rate=400)
    began = time.monotonic()
    replay.run_due()
    assert time.monotonic() - began >= 0.5
    wait_until_equal(lambda: amqp.ready(NAME), 300)


def test_a_step_ends_in_time_and_the_next_continues(alice, archived):
    started = replay.start(archived(300), alice, queue=NAME, rate=100)
    assert replay.run_due(0.5) == 100
    started.refresh_from_db()
    assert (started.state, started.sent) == ("running", 100)
    Replay.objects.update(rate=None)
    assert replay.run_due() == 200


def test_float_headers_survive(amqp, guarded):
    amqp.queue("q")
    with session(guarded) as opened:
        message = Fetched(b"1", {}, {"ratio": 0.5}, "", "q", False)
        assert ConfirmedPublisher(opened).publish({"k": message}, "") == {}
    with session(guarded) as opened:
        [[got]] = Fetch(opened, "q", queue_type="classic").batches(1, Bounds(1, 100, 1))
    assert got.decode().headers == {"ratio": 0.5, KEY_HEADER: "k"}


def test_confirms_are_counted_in_any_order(guarded):
    with session(guarded) as opened:
        channel = ConfirmChannel(opened, key_of=lambda routing_key, _: routing_key)
        channel._unconfirmed = {tag: str(tag) for tag in range(1, 6)}
        channel._record(5, False, Outcome.CONFIRMED)
        channel._record(4, True, Outcome.CONFIRMED)
        assert channel.outcomes == {str(tag): Outcome.CONFIRMED for tag in range(1, 6)}
