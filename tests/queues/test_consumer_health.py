"""Queues without consumers or with stalled ones: counted on a real broker, notified at start and end."""

import json
import logging
from datetime import timedelta

import pika
import pytest
from django.db.models import F
from django.utils import timezone

from accounts.models import PulseUser
from core.leases import lease
from guardian_consumers.names import delay_queue, level_queue, parking_queue
from notifications.mails import compose
from notifications.models import Notification
from queues.actions import single
from queues.guard import consumer_health, once
from queues.guard.consumer_health import ConsumerState, QueueCounts, count_consumers
from queues.models import Queue, Watch
from tests.support.proxy import Proxy, http_answer
from tests.support.toolbox import call_after, queue_row, sent, wait_until

pytestmark = pytest.mark.usefixtures("guarded", "pulse_user")

NOW = timezone.now()
NAME = "queue/alice/builds"


@pytest.fixture(autouse=True)
def five_minutes(settings):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = settings.GUARDIAN_STALLED_MINUTES = 5


def answer(broker_proxy, *rows):
    """Answer the next requests with these rows, given as dictionaries, or with this text."""
    body = rows[0] if rows and isinstance(rows[0], str) else json.dumps(rows)
    broker_proxy.answer(http_answer("200 OK", body.encode(), "Content-Type: application/json"))


def listed_row(vhost, name, consumers, **more):
    return {"vhost": vhost, "name": name, "consumers": consumers, **more}


def stored_state(name=NAME):
    return Queue.objects.values_list("consumers", "unattended_since", "unattended_notified_at").get(name=name)


def let_minutes_pass(minutes):
    """Let these minutes pass for every queue."""
    for field in ("unattended_since", "stalled_since"):
        Queue.objects.update(**{field: F(field) - timedelta(minutes=minutes)})


def start_consumer(amqp):
    amqp.channel.basic_consume(NAME, lambda *_: None)
    amqp.connection.process_data_events()


def store_without_consumers(broker_proxy, guarded):
    """Store that the queue has had no consumer for five minutes."""
    once.run_once()
    answer(broker_proxy, listed_row(guarded, NAME, 0))
    count_consumers()
    let_minutes_pass(5)


def consumer_state(**values):
    unset = dict.fromkeys(ConsumerState._fields)
    common = {"id": 1, "vhost": "/", "name": "q", "type": "classic", "exclusive": False, "registered": False}
    return ConsumerState(**{**unset, **common, "state": "ok", "diagnosis": "", **values})


def counted(before, count, minutes):
    after = before.with_count(count, NOW).with_diagnosis(None, NOW)
    return after.with_notices(NOW, unattended_minutes=minutes, stalled_minutes=minutes)


def minutes_ago(minutes):
    return NOW - timedelta(minutes=minutes)


ALONE_4_MINUTES = consumer_state(unattended_since=minutes_ago(4))
ALONE_5_MINUTES = consumer_state(unattended_since=minutes_ago(5))


@pytest.mark.parametrize(
    ("before", "consumers", "minutes", "since", "notified_at"),
    [
        (consumer_state(), 0, 5, NOW, None),
        (consumer_state(), 2, 5, None, None),
        (ALONE_4_MINUTES, 0, 5, minutes_ago(4), None),
        (ALONE_5_MINUTES, 0, 5, minutes_ago(5), NOW),
        (ALONE_5_MINUTES, 0, 0, minutes_ago(5), None),
        (ALONE_5_MINUTES._replace(exclusive=True), 0, 5, minutes_ago(5), None),
        (ALONE_5_MINUTES._replace(registered=True, name="guardian.dlq"), 0, 5, minutes_ago(5), None),
        (ALONE_5_MINUTES._replace(registered=True), 0, 5, minutes_ago(5), NOW),
        (consumer_state(unattended_since=NOW, unattended_notified_at=NOW), 0, 5, NOW, NOW),
        (consumer_state(unattended_since=NOW, unattended_notified_at=NOW), 1, 5, None, None),
    ],
)
def test_a_count_of_consumers_updates_a_queues_state(before, consumers, minutes, since, notified_at):
    after = counted(before, QueueCounts(consumers), minutes)
    assert (after.consumers, after.unattended_since, after.unattended_notified_at) == (consumers, since, notified_at)


@pytest.mark.parametrize(
    ("name", "is_notified"),
    [
        (parking_queue("queue/alice/shop_orders"), False), (delay_queue("shop_orders", 600), False),
        (delay_queue("shop_orders", 0.25), False), (level_queue("shop_orders", 2), True), ("car.parked.here", True),
        ("shop.retry.soon", True), ("parked", True), ("shop.parked\n", True),
    ],
)  # fmt: skip
def test_parking_and_delay_queues_need_no_consumer(name, is_notified):
    alone = counted(ALONE_5_MINUTES._replace(name=name), QueueCounts(0), minutes=5)
    assert (alone.unattended_notified_at is not None) is is_notified


def test_a_queue_without_consumers_is_notified_once_and_once_when_it_recovers(amqp):
    amqp.queue(NAME, 3)
    once.run_once()
    count_until(lambda: stored_state()[0] == 0 and Queue.objects.get(name=NAME).bytes == 3)
    assert stored_state()[1] is not None
    assert sent("alice@example.org") == []
    let_minutes_pass(minutes=5)
    assert count_consumers() == 2
    assert count_consumers() == 0
    assert sent("alice@example.org") == sent("ops@example.org") == ["no-consumers"]
    facts = Notification.objects.filter(kind="no-consumers").first().facts
    assert (facts["queue"], facts["length"], facts["consumers"]) == (NAME, 3, 0)
    assert 300 <= facts["seconds"] < 360
    start_consumer(amqp)
    count_until(lambda: stored_state()[0] == 1, amqp.connection)
    assert stored_state() == (1, None, None)
    assert sent("alice@example.org") == sent("ops@example.org") == ["no-consumers", "consumers-back"]
    assert count_consumers() == 0


def count_until(true, connection: pika.BlockingConnection | None = None):
    """Count consumers until the condition is true: the broker's statistics lag by seconds."""
    deadline = timezone.now() + timedelta(seconds=20)
    while not true():
        assert timezone.now() < deadline
        if connection is not None:
            connection.sleep(0.5)
        count_consumers()


@pytest.mark.parametrize("meanwhile", ["a consumer started", "it was deleted", "gone", "deleting"])
def test_a_queue_that_changed_since_the_list_is_not_notified_as_without_consumers(
    amqp, broker_proxy, guarded, monkeypatch, meanwhile
):
    amqp.queue(NAME)
    if meanwhile == "a consumer started":
        start_consumer(amqp)
    store_without_consumers(broker_proxy, guarded)
    if meanwhile == "it was deleted":
        amqp.channel.queue_delete(NAME)
    elif meanwhile in Queue.State.values:
        call_after(monkeypatch, consumer_health, "_gather_facts", lambda: Queue.objects.update(state=meanwhile))
    assert (count_consumers(), sent("alice@example.org"), stored_state()[2]) == (0, [], None)


def test_a_recovery_is_notified_only_after_a_recheck(amqp, broker_proxy, guarded):
    amqp.queue(NAME)
    store_without_consumers(broker_proxy, guarded)
    assert count_consumers() == 2
    before = stored_state()
    answer(broker_proxy, listed_row(guarded, NAME, 1))  # an outdated list
    assert count_consumers() == 0
    assert (sent("alice@example.org"), stored_state()) == (["no-consumers"], before)
    start_consumer(amqp)
    assert count_consumers() == 2
    assert sent("alice@example.org") == ["no-consumers", "consumers-back"]


@pytest.mark.parametrize("how", ["by hand", "by itself"])
def test_a_queue_that_returns_with_a_consumer_is_notified_once(
    alice, amqp, broker_proxy, guarded, settings, broker, how
):
    amqp.queue(NAME)
    store_without_consumers(broker_proxy, guarded)
    assert count_consumers() == 2
    if how == "by hand":
        settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
        single.delete_queue(Queue.objects.get(), alice)
    else:
        amqp.channel.queue_delete(NAME)
        Queue.objects.update(state="gone")
        count_consumers()
    assert stored_state()[:2] == (None, None)
    amqp.queue(NAME)
    start_consumer(amqp)
    Queue.objects.update(state="ok")
    with Proxy.before(broker.management_url) as between:
        settings.RABBITMQ_MANAGEMENT_URL = between.url(broker.management_url)
        answer(between, listed_row(guarded, NAME, 1))
        assert (count_consumers(), count_consumers()) == (2, 0)
    assert sent("alice@example.org") == ["no-consumers", "consumers-back"]
    text = compose(Notification.objects.filter(kind="consumers-back").first()).body
    assert "has 1 consumer again." in text
    assert "There is nothing to do." in text


def test_an_incomplete_answer_keeps_the_stored_counts(amqp, broker_proxy, guarded):
    amqp.queue(NAME)
    store_without_consumers(broker_proxy, guarded)
    before = stored_state()
    for partial in (
        [],
        [listed_row(guarded, "another", 3)],
        [listed_row("another", NAME, 3)],
        [{"vhost": guarded, "name": NAME}],
        *([listed_row(guarded, NAME, wrong)] for wrong in (None, "many", True, -1)),
        ["nonsense"],
        ['{"error": "not_authorised"}'],
    ):
        answer(broker_proxy, *partial)
        assert count_consumers() == 0
        assert stored_state() == before


def test_an_unavailable_broker_changes_nothing_and_is_logged_once(amqp, broker_proxy, guarded, settings, caplog):
    amqp.queue(NAME)
    store_without_consumers(broker_proxy, guarded)
    before = stored_state()
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    caplog.set_level(logging.INFO)
    assert count_consumers() == 0
    Watch.objects.update(consumers_counted_at=timezone.now() - timedelta(minutes=3))
    assert count_consumers() == 0
    assert caplog.text.count("Could not count consumers") == 1
    assert "secret-word" not in caplog.text
    assert stored_state() == before


def test_two_concurrent_counts_run_once(amqp, broker_proxy, guarded):
    amqp.queue(NAME)
    once.run_once()
    answer(broker_proxy, listed_row(guarded, NAME, 4))
    with lease("consumers"):
        assert count_consumers() == 0
        assert stored_state()[0] is None
    count_consumers()
    assert stored_state()[0] == 4


AT_WORK = QueueCounts(1, ready=3, unacknowledged=2, acked_total=7)
"""A count of a working queue: messages wait, there is a consumer, and seven were acked so far."""

STALLED_4_MINUTES = consumer_state(acknowledged_total=7, stalled_since=minutes_ago(4))
STALLED_5_MINUTES = consumer_state(acknowledged_total=7, stalled_since=minutes_ago(5))
NOTIFIED = STALLED_5_MINUTES._replace(stalled_notified_at=minutes_ago(1))
NOTHING = (None, None, None)


@pytest.mark.parametrize(
    ("before", "count", "minutes", "expected"),
    [
        (consumer_state(), AT_WORK, 5, (7, NOW, None)),
        (STALLED_4_MINUTES, AT_WORK, 5, (7, minutes_ago(4), None)),
        (STALLED_5_MINUTES, AT_WORK, 5, (7, minutes_ago(5), NOW)),
        (STALLED_5_MINUTES, AT_WORK._replace(unacknowledged=0), 5, (7, minutes_ago(5), NOW)),
        (NOTIFIED, AT_WORK, 5, (7, minutes_ago(5), minutes_ago(1))),
        # messages were acked
        (STALLED_5_MINUTES, AT_WORK._replace(acked_total=8), 5, (8, NOW, None)),
        (NOTIFIED, AT_WORK._replace(acked_total=8), 5, (8, NOW, None)),
        # the broker restarted its counter, which says nothing about the consumer
        (NOTIFIED, AT_WORK._replace(acked_total=0), 5, (0, minutes_ago(5), minutes_ago(1))),
        (NOTIFIED, AT_WORK._replace(acked_total=0, consumers=0), 5, (0, None, minutes_ago(1))),
        (NOTIFIED._replace(stalled_since=None), AT_WORK._replace(acked_total=0), 5, (0, NOW, minutes_ago(1))),
        (STALLED_5_MINUTES, AT_WORK._replace(acked_total=0), 5, (0, NOW, None)),
        # no messages wait
        (STALLED_5_MINUTES, AT_WORK._replace(ready=0, unacknowledged=0), 5, NOTHING),
        # no consumer: notified separately, and a returning consumer gets the full time
        (STALLED_5_MINUTES, AT_WORK._replace(consumers=0), 5, (7, None, None)),
        (NOTIFIED, AT_WORK._replace(consumers=0), 5, (7, None, minutes_ago(1))),
        (NOTIFIED._replace(stalled_since=None), AT_WORK, 5, (7, NOW, minutes_ago(1))),
        (consumer_state(), AT_WORK._replace(consumers=0), 5, (7, None, None)),
        # unknown to the broker
        (STALLED_5_MINUTES, AT_WORK._replace(acked_total=None), 5, (7, None, None)),
        (STALLED_5_MINUTES, AT_WORK._replace(ready=None), 5, (7, None, None)),
        (NOTIFIED, AT_WORK._replace(unacknowledged=None), 5, (7, minutes_ago(5), minutes_ago(1))),
        # switched off; a stream
        (NOTIFIED, AT_WORK, 0, (7, minutes_ago(5), None)),
        (STALLED_5_MINUTES._replace(type="stream"), AT_WORK, 5, NOTHING),
    ],
)
def test_a_count_of_acked_messages_updates_a_queues_state(before, count, minutes, expected):
    after = counted(before, count, minutes)
    assert (after.acknowledged_total, after.stalled_since, after.stalled_notified_at) == expected


def stored_stall():
    return Queue.objects.values_list("acknowledged_total", "stalled_since", "stalled_notified_at").get(name=NAME)


SEVEN_ACKED = {"ack": 7}


def working_row(vhost, name=NAME, consumers=1, stats=SEVEN_ACKED):
    figures = {"messages_ready": 3, "messages_unacknowledged": 2, "message_stats": stats}
    return listed_row(vhost, name, consumers, **figures)


def test_a_stalled_consumer_is_notified_once_and_once_when_it_recovers(amqp):
    amqp.queue(NAME, 4)
    in_hand = []
    amqp.channel.basic_qos(prefetch_count=2)
    amqp.channel.basic_consume(NAME, lambda channel, method, *_: in_hand.append(method.delivery_tag))
    amqp.connection.process_data_events(1)
    amqp.channel.basic_ack(in_hand.pop(0))
    once.run_once()
    count_until(lambda: stored_stall()[0] == 1 and stored_stall()[1] is not None, amqp.connection)
    assert sent("alice@example.org") == []
    let_minutes_pass(minutes=5)
    wait_until(lambda: count_consumers() == 2, seconds=60)  # what was acknowledged in the last 30 s is no stall
    assert count_consumers() == 0
    assert sent("alice@example.org") == sent("ops@example.org") == ["stalled"]
    facts = Notification.objects.first().facts
    assert (facts["queue"], facts["length"], facts["unacknowledged"], facts["consumers"]) == (NAME, 3, 2, 1)
    assert 300 <= facts["seconds"] < 360
    text = " ".join(compose(Notification.objects.first()).body.split())
    assert "Its consumer has acknowledged nothing for 5 minutes: 2 messages unacknowledged" in text
    assert "(user guardian) holds 2), 1 ready." in text
    amqp.channel.basic_ack(in_hand.pop(0))
    count_until(lambda: stored_stall()[2] is None, amqp.connection)
    assert sent("alice@example.org") == sent("ops@example.org") == ["stalled", "stall-over"]
    assert "Its consumers acknowledge messages again" in compose(Notification.objects.last()).body
    assert count_consumers() == 0


def test_a_consumer_without_acks_is_not_stalled_while_it_takes_messages(amqp, broker_proxy, guarded):
    amqp.queue(NAME)
    start_consumer(amqp)
    once.run_once()
    answer(broker_proxy, working_row(guarded, stats={"ack": 0, "deliver_no_ack": 3, "get_no_ack": 1}))
    count_consumers()
    let_minutes_pass(minutes=5)
    answer(broker_proxy, working_row(guarded, stats={"ack": 0, "deliver_no_ack": 4, "get_no_ack": 1}))
    assert count_consumers() == 0
    assert stored_stall()[0] == 5


def test_a_queue_whose_consumers_are_gone_after_a_recheck_has_not_stalled(amqp, broker_proxy, guarded):
    amqp.queue(NAME)
    once.run_once()
    answer(broker_proxy, working_row(guarded))  # an outdated list
    count_consumers()
    let_minutes_pass(minutes=5)
    assert count_consumers() == 0
    assert (sent("alice@example.org"), stored_stall()[2]) == ([], None)


def test_consumers_can_be_back_and_work_again_in_one_count(amqp, broker_proxy, guarded):
    amqp.queue(NAME)
    once.run_once()
    before = NOW - timedelta(minutes=9)
    Queue.objects.update(
        consumers=0,
        unattended_since=before,
        unattended_notified_at=before,
        acknowledged_total=6,
        stalled_notified_at=before,
    )
    start_consumer(amqp)
    answer(broker_proxy, working_row(guarded))
    assert count_consumers() == 4
    assert sorted(sent("alice@example.org")) == ["consumers-back", "stall-over"]
    assert stored_state() == (1, None, None)
    assert stored_stall()[::2] == (7, None)


@pytest.mark.parametrize("stats", [{}, [], None, "many"])
def test_without_message_statistics_stalls_are_not_judged(amqp, broker_proxy, guarded, stats):
    amqp.queue(NAME)
    start_consumer(amqp)
    once.run_once()
    answer(broker_proxy, working_row(guarded))
    count_consumers()
    let_minutes_pass(minutes=9)
    answer(broker_proxy, working_row(guarded, stats=stats))
    assert count_consumers() == 0
    assert (sent("alice@example.org"), stored_stall()) == ([], (7, None, None))


BOTH_KINDS = pytest.mark.parametrize(
    ("row", "consumers"), [(listed_row, 0), (working_row, 1)], ids=["unattended", "stalled"]
)


@BOTH_KINDS
@pytest.mark.parametrize("queues", [3, 30])
def test_counting_takes_constant_statements(
    amqp, broker_proxy, guarded, queues, row, consumers, django_assert_num_queries
):
    pulse_user = PulseUser.objects.get()
    names = [f"queue/alice/{number}" for number in range(queues)]
    for name in names:
        amqp.queue(name)
        for _ in range(consumers):
            amqp.channel.basic_consume(name, lambda *_: None)
    Queue.objects.bulk_create(
        queue_row(name, vhost=guarded, ready=0, unacknowledged=0, pulse_user=pulse_user) for name in names
    )
    answer(broker_proxy)
    count_consumers()  # the first count creates rows
    answer(broker_proxy, *(row(guarded, name, consumers) for name in names))
    with django_assert_num_queries(11):
        count_consumers()
    let_minutes_pass(minutes=5)
    with django_assert_num_queries(20):
        assert count_consumers() == 2 * queues
