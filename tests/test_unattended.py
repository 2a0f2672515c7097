"""Queues without a consumer: counted on a real broker, told once, and once when they have one again."""

import logging
from datetime import timedelta

import pika
import pytest
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues import by_hand, monitor, unattended
from queues.lease import lease
from queues.mails import compose
from queues.models import Notification, Queue, Watch
from queues.unattended import Attendance, count_consumers
from tests.proxy import Proxy, http_answer

NOW = timezone.now()
NAME = "queue/alice/builds"


@pytest.fixture
def alice(guarded):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    PulseUser.objects.create(username="alice", ready=True).owners.add(owner)
    return owner


@pytest.fixture
def proxy(guarded, broker, settings):
    with Proxy.before(broker.management_url) as between:
        settings.RABBITMQ_MANAGEMENT_URL = between.url(broker.management_url)
        yield between


def answer(proxy, body):
    proxy.answer(http_answer("200 OK", body, "Content-Type: application/json"))


def listed(*queues):
    return b"[" + b",".join(queues) + b"]"


def row(vhost, name, consumers):
    return f'{{"vhost": "{vhost}", "name": "{name}", "consumers": {consumers}}}'.encode()


def known(name=NAME):
    return Queue.objects.values_list("consumers", "unattended_since", "unattended_told_at").get(name=name)


def told(recipient="alice@example.org"):
    return list(Notification.objects.filter(recipient=recipient).order_by("id").values_list("kind", flat=True))


def wait(minutes):
    """Let so much time pass for every queue."""
    for queue in Queue.objects.exclude(unattended_since=None):
        Queue.objects.filter(id=queue.id).update(unattended_since=queue.unattended_since - timedelta(minutes=minutes))


# The rule


def attendance(**values):
    return Attendance(1, "/", "q", False, False, None, None, None)._replace(**values)


@pytest.mark.parametrize(
    ("before", "consumers", "minutes", "since", "told_at"),
    [
        (attendance(), 0, 5, NOW, None),
        (attendance(), 2, 5, None, None),
        (attendance(unattended_since=NOW - timedelta(minutes=4)), 0, 5, NOW - timedelta(minutes=4), None),
        (attendance(unattended_since=NOW - timedelta(minutes=5)), 0, 5, NOW - timedelta(minutes=5), NOW),
        (attendance(unattended_since=NOW - timedelta(minutes=5)), 0, 0, NOW - timedelta(minutes=5), None),
        (
            attendance(unattended_since=NOW - timedelta(minutes=5), exclusive=True),
            0,
            5,
            NOW - timedelta(minutes=5),
            None,
        ),
        (
            attendance(unattended_since=NOW - timedelta(minutes=5), registered=True, name="guardian.dlq"),
            0,
            5,
            NOW - timedelta(minutes=5),
            None,
        ),
        (
            attendance(unattended_since=NOW - timedelta(minutes=5), registered=True),
            0,
            5,
            NOW - timedelta(minutes=5),
            NOW,
        ),
        (attendance(unattended_since=NOW, unattended_told_at=NOW), 0, 5, NOW, NOW),
        (attendance(unattended_since=NOW, unattended_told_at=NOW), 1, 5, None, None),
        (attendance(unattended_since=NOW + timedelta(hours=1)), 0, 5, NOW, None),
    ],
)
def test_what_follows_from_a_count(before, consumers, minutes, since, told_at):
    after = before.at(consumers, NOW, minutes)
    assert (after.consumers, after.unattended_since, after.unattended_told_at) == (consumers, since, told_at)


# On the broker


@pytest.mark.slow
def test_a_queue_is_told_about_once_and_once_when_it_has_a_consumer_again(alice, amqp, settings, broker):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    amqp.queue(NAME, 3)
    monitor.run_pass()
    count_until(lambda: known()[0] == 0)
    assert known()[1] is not None
    assert told() == []
    wait(minutes=5)
    assert count_consumers() == 2
    assert count_consumers() == 0
    assert told() == told("ops@example.org") == ["no-consumers"]
    facts = Notification.objects.filter(kind="no-consumers").first().facts
    assert (facts["queue"], facts["length"], facts["consumers"]) == (NAME, 3, 0)
    assert 300 <= facts["seconds"] < 360
    amqp.channel.basic_consume(NAME, lambda *_: None)
    amqp.connection.process_data_events()
    count_until(lambda: known()[0] == 1, amqp.connection)
    assert known() == (1, None, None)
    assert told() == told("ops@example.org") == ["no-consumers", "consumers-back"]
    assert count_consumers() == 0


def count_until(true, connection: pika.BlockingConnection | None = None):
    """Count until something is true: the broker's figures lag by seconds."""
    deadline = timezone.now() + timedelta(seconds=20)
    while not true():
        assert timezone.now() < deadline
        if connection is not None:
            connection.sleep(0.5)
        count_consumers()


def test_nobody_is_told_where_it_is_off(alice, amqp, proxy, guarded):
    amqp.queue(NAME)
    monitor.run_pass()
    answer(proxy, listed(row(guarded, NAME, 0)))
    count_consumers()
    wait(minutes=10_000)
    assert count_consumers() == 0
    assert known()[0] == 0
    assert told() == []


def test_a_queue_that_has_a_consumer_after_all_is_not_told_about(alice, amqp, proxy, guarded, settings, broker):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    amqp.queue(NAME)
    monitor.run_pass()
    amqp.channel.basic_consume(NAME, lambda *_: None)
    amqp.connection.process_data_events()
    answer(proxy, listed(row(guarded, NAME, 0)))  # a list that lags
    count_consumers()
    wait(minutes=5)
    assert count_consumers() == 0
    assert told() == []
    assert known()[2] is None


def attend(amqp):
    amqp.channel.basic_consume(NAME, lambda *_: None)
    amqp.connection.process_data_events()


def known_to_be_without(proxy, guarded, minutes=5):
    """Have it known that the queue has had no consumer for so long."""
    monitor.run_pass()
    answer(proxy, listed(row(guarded, NAME, 0)))
    count_consumers()
    wait(minutes=minutes)


def test_a_queue_that_is_not_there_any_more_is_not_one_without_a_consumer(alice, amqp, proxy, guarded, settings):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    amqp.queue(NAME)
    known_to_be_without(proxy, guarded)
    amqp.channel.queue_delete(NAME)
    assert count_consumers() == 0
    assert (told(), known()[2]) == ([], None)


@pytest.mark.parametrize("state", ["gone", "deleting"])
def test_nobody_hears_that_a_queue_has_no_consumer_once_they_heard_that_it_is_deleted(
    alice, amqp, proxy, guarded, settings, monkeypatch, state
):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    amqp.queue(NAME)
    known_to_be_without(proxy, guarded)
    gather = unattended._gather_facts

    def be_deleted_meanwhile(*args):
        gathered = gather(*args)
        Queue.objects.update(state=state)
        return gathered

    monkeypatch.setattr(unattended, "_gather_facts", be_deleted_meanwhile)
    assert count_consumers() == 0
    assert told() == []
    assert known()[2] is None


def test_a_queue_that_has_no_consumer_after_all_is_not_told_to_have_one(alice, amqp, proxy, guarded, settings):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    amqp.queue(NAME)
    known_to_be_without(proxy, guarded)
    assert count_consumers() == 2
    before = known()
    answer(proxy, listed(row(guarded, NAME, 1)))  # a list that lags
    assert count_consumers() == 0
    assert (told(), known()) == (["no-consumers"], before)
    attend(amqp)
    assert count_consumers() == 2
    assert told() == ["no-consumers", "consumers-back"]


@pytest.mark.parametrize("how", ["by hand", "by itself"])
def test_a_queue_that_goes_and_comes_back_with_a_consumer_is_told_about_once(
    alice, amqp, proxy, guarded, settings, broker, how
):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    amqp.queue(NAME)
    known_to_be_without(proxy, guarded)
    assert count_consumers() == 2
    if how == "by hand":
        settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
        by_hand.delete_queue(Queue.objects.get(), alice)
    else:
        amqp.channel.queue_delete(NAME)
        Queue.objects.update(state="gone")
        count_consumers()
    assert known()[:2] == (None, None)
    amqp.queue(NAME)
    attend(amqp)
    Queue.objects.update(state="ok")
    with Proxy.before(broker.management_url) as between:
        settings.RABBITMQ_MANAGEMENT_URL = between.url(broker.management_url)
        answer(between, listed(row(guarded, NAME, 1)))
        assert (count_consumers(), count_consumers()) == (2, 0)
    assert told() == ["no-consumers", "consumers-back"]
    text = compose(Notification.objects.filter(kind="consumers-back").first()).body
    assert "has 1 consumer again. There is nothing to do." in text


def test_what_the_answer_lacks_keeps_what_was_known_of_it(alice, amqp, proxy, guarded, settings):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    amqp.queue(NAME)
    monitor.run_pass()
    answer(proxy, listed(row(guarded, NAME, 0)))
    count_consumers()
    before = known()
    for partial in (
        listed(),
        listed(row(guarded, "another", 3)),
        listed(row("another", NAME, 3)),
        listed(f'{{"vhost": "{guarded}", "name": "{NAME}"}}'.encode()),
        listed(row(guarded, NAME, "null")),
        listed(row(guarded, NAME, '"many"')),
        listed(row(guarded, NAME, "true")),
        listed(row(guarded, NAME, "-1")),
        b"nonsense",
        b'{"error": "not_authorised"}',
    ):
        answer(proxy, partial)
        assert count_consumers() == 0
        assert known() == before


def test_a_queue_that_is_gone_is_not_known_to_be_without_a_consumer(alice, amqp, proxy, guarded):
    amqp.queue(NAME)
    monitor.run_pass()
    answer(proxy, listed(row(guarded, NAME, 0)))
    count_consumers()
    Queue.objects.update(state="gone")
    count_consumers()
    assert known() == (None, None, None)


def test_a_broker_that_is_away_changes_nothing_and_is_one_line_in_the_log(
    alice, amqp, proxy, guarded, settings, caplog
):
    amqp.queue(NAME)
    monitor.run_pass()
    answer(proxy, listed(row(guarded, NAME, 0)))
    count_consumers()
    before = known()
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    caplog.set_level(logging.INFO)
    assert count_consumers() == 0
    Watch.objects.update(consumers_counted_at=timezone.now() - timedelta(minutes=3))
    assert count_consumers() == 0
    assert caplog.text.count("Consumers can't be counted") == 1
    assert "secret-word" not in caplog.text
    assert known() == before


def test_two_at_once_do_it_once(alice, amqp, proxy, guarded):
    amqp.queue(NAME)
    monitor.run_pass()
    answer(proxy, listed(row(guarded, NAME, 4)))
    with lease("consumers"):
        assert count_consumers() == 0
        assert known()[0] is None
    count_consumers()
    assert known()[0] == 4


@pytest.mark.parametrize("queues", [3, 80])
def test_it_takes_one_request_and_as_many_statements_for_many_queues_as_for_few(
    alice, amqp, proxy, guarded, queues, django_assert_num_queries, settings
):
    settings.GUARDIAN_NO_CONSUMER_MINUTES = 5
    account = PulseUser.objects.get()
    now = timezone.now()
    names = [f"queue/alice/{number}" for number in range(queues)]
    for name in names:
        amqp.queue(name)
    Queue.objects.bulk_create(
        Queue(
            vhost=guarded, name=name, type="classic", durable=True, auto_delete=False, exclusive=False, ready=0,
            unacknowledged=0, first_seen=now, last_seen=now, pulse_user=account,
        )
        for name in names
    )  # fmt: skip
    answer(proxy, listed())
    count_consumers()  # the first one makes the rows that the others find
    answer(proxy, listed(*(row(guarded, name, 0) for name in names)))
    before = proxy.connections
    with django_assert_num_queries(11):
        count_consumers()
    assert proxy.connections - before == 1
    assert Queue.objects.filter(consumers=0, unattended_since__isnull=False).count() == queues
    wait(minutes=5)
    with django_assert_num_queries(16):
        assert count_consumers() == 2 * queues
