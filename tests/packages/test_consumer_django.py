"""Consumers that write to the database: killed at each step, given messages twice, and without the database."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection, connections, transaction
from django.utils import timezone

from guardian_consumers import AsyncConsumer, Consumer, Halted, Outcome, PlainQueue, Policy, Publisher
from guardian_consumers.django import in_transaction, once, rewrite, with_fresh_connections
from guardian_consumers.processed.models import Processed
from queues.models import QueueSample
from tests.support.consumers import QUEUE, consuming, length, publish_raw, take
from tests.support.dying import ACKNOWLEDGE, COMMIT, NOTE, PUBLISH, STEPS, shipping
from tests.support.toolbox import stored_queue, wait_until

PROJECT = Path(__file__).resolve().parents[2]
INVOICES = "shop_test_invoices"


@pytest.fixture
def work_rows(transactional_db, monkeypatch):
    """Create a table for the work, and return a function that returns its messages."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", 0)  # threads close connections as they end
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE shop_work (message varchar(255))")

    def rows():
        with connection.cursor() as cursor:
            cursor.execute("SELECT message FROM shop_work ORDER BY message")
            return [message for (message,) in cursor.fetchall()]

    yield rows
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE shop_work")


@pytest.fixture
def invoices(amqp):
    """Return a function that takes all invoices from their queue and returns their orders and ids."""
    amqp.channel.exchange_declare("shop_test", "direct", durable=True)
    amqp.queue(INVOICES)
    amqp.channel.queue_bind(INVOICES, "shop_test", INVOICES)
    seen = []

    def out():
        while (got := amqp.channel.basic_get(INVOICES, auto_ack=True))[0]:
            _, properties, body = got
            seen.append((json.loads(body)["of"], properties.message_id))
        return sorted(seen)

    return out


def insert(message):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO shop_work (message) VALUES (%s)", [str(message.body)])


# Killed at each step

GAPS = {
    # killed before: rows and invoices at that time, and invoices at the end, with `once` and with rewriting
    COMMIT: (0, 0, {"once": 1, "rewrite": 1}),
    PUBLISH: (1, 0, {"once": 1, "rewrite": 1}),
    NOTE: (1, 1, {"once": 2, "rewrite": 2}),
    ACKNOWLEDGE: (1, 1, {"once": 1, "rewrite": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["once", "rewrite"])
def test_killed_at_any_step_work_is_stored_once_and_published_at_least_once(
    guard, consumer_settings, amqp, work_rows, invoices
):
    database = {name: connection.settings_dict[name] for name in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")}
    environment = {
        **os.environ,
        "RABBIT_URL": consumer_settings().url,
        "RABBIT_EXCHANGE_NAME": "shop_test",
        "DATABASE": json.dumps(database, default=str),
    }
    for step in STEPS:
        amqp.queue(f"shop_test_{step}", arguments={"x-queue-type": "classic"})
        amqp.channel.queue_bind(f"shop_test_{step}", "shop_test", f"shop_test_{step}")
        publish_raw(amqp, queue=f"shop_test_{step}", message_id=step)
    dying = [
        subprocess.Popen([sys.executable, "-m", "tests.support.dying", guard, step], cwd=PROJECT, env=environment)
        for step in STEPS
    ]
    try:
        assert [process.wait(30) for process in dying] == [-9] * len(STEPS)
    finally:
        for process in dying:
            process.kill()
    rows = work_rows()
    published = [of for of, _ in invoices()]
    assert {step: (rows.count(step), published.count(step)) for step in STEPS} == {
        step: then[:2] for step, then in GAPS.items()
    }

    settings = consumer_settings(policy=Policy())
    for step in STEPS:  # what the killed processes had received is redelivered
        with consuming(Consumer(settings, step, shipping(guard))) as consumer:
            wait_until(lambda: consumer.counts["done"] == 1)
        assert length(amqp, f"shop_test_{step}") == 0
    assert work_rows() == sorted(STEPS)
    published = [of for of, _ in invoices()]
    assert {step: published.count(step) for step in STEPS} == {step: then[2][guard] for step, then in GAPS.items()}
    if guard == "once":
        assert len(set(invoices())) == len(STEPS)  # both copies of a message have the same id
        assert Processed.objects.filter(publications__isnull=True).count() == len(STEPS)


# Guards


def is_waited_for():
    """Return whether another session of PostgreSQL waits for this one."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid)))"
        )
        return cursor.fetchone()[0]


@pytest.mark.usefixtures("each_consumer")
def test_a_message_delivered_twice_at_once_is_processed_once(consumer_settings, amqp, work_rows):
    both = threading.Barrier(2, timeout=10)
    calls = []

    @once
    def callback(message):
        calls.append(message.id)
        insert(message)
        if connection.vendor == "postgresql":
            wait_until(is_waited_for)

    def together(message):
        both.wait()
        callback(message)

    with consuming(Consumer(consumer_settings(), "orders", together)) as consumer:
        publish_raw(amqp, b"17", message_id="order-17")
        publish_raw(amqp, b"17", message_id="order-17")
        wait_until(lambda: consumer.counts["done"] == 2)
    assert (calls, work_rows()) == (["order-17"], ["17"])


def test_two_consumers_of_the_same_message_both_process_it(consumer_settings, amqp, work_rows):
    shop, stock = (
        Consumer(consumer_settings(), PlainQueue(key, ["orders"]), once(insert)) for key in ("shop", "stock")
    )
    with consuming(shop), consuming(stock):
        publish_raw(amqp, b"17", message_id="order-17")
        wait_until(lambda: shop.counts["done"] == stock.counts["done"] == 1)
    assert work_rows() == ["17", "17"]
    assert sorted(Processed.objects.values_list("consumer", "message_id")) == [
        ("shop_test_shop", "order-17"),
        ("shop_test_stock", "order-17"),
    ]


def test_equal_messages_without_an_id_are_processed_separately(consumer_settings, amqp, work_rows):
    @once
    def callback(message):
        insert(message)
        if not message.attempts:
            raise LookupError("not yet")  # during its delay it has an id made from its content

    with consuming(Consumer(consumer_settings(), "orders", callback)) as consumer:
        publish_raw(amqp, b"17")
        publish_raw(amqp, b"17")
        wait_until(lambda: consumer.counts["done"] == 2)
    assert work_rows() == ["17", "17"]


def test_a_key_identifies_messages_without_an_id(consumer_settings, amqp, work_rows):
    callback = once(key=lambda message: str(message.body["order"]))(insert)
    with consuming(Consumer(consumer_settings(), "orders", callback)) as consumer:
        publish_raw(amqp, b'{"order": 17}')
        wait_until(lambda: consumer.counts["done"] == 1)
        publish_raw(amqp, b'{"order": 17}', message_id="another")
        publish_raw(amqp, b'{"order": 18}')
        wait_until(lambda: consumer.counts["done"] == 3)
    assert work_rows() == ["{'order': 17}", "{'order': 18}"]


@pytest.mark.parametrize("key", ["a\0b", "é" * 300, "'; DROP TABLE shop_work; --"])
def test_any_key_can_be_stored(consumer_settings, amqp, work_rows, key):
    with consuming(Consumer(consumer_settings(), "orders", once(key=lambda message: key)(insert))) as consumer:
        publish_raw(amqp, b"1")
        wait_until(lambda: consumer.counts["done"] == 1)
        publish_raw(amqp, b"2")
        wait_until(lambda: consumer.counts["done"] == 2)
    assert work_rows() == ["1"]


def test_old_rows_are_pruned_and_recent_ones_stay(consumer_settings, amqp, work_rows):
    now = timezone.now()
    for number, days in enumerate((8, 6)):
        Processed.objects.create(consumer="x", message_id=str(number), at=now - timedelta(days=days))
    with consuming(Consumer(consumer_settings(), "orders", once(keep=timedelta(days=7))(insert))) as consumer:
        publish_raw(amqp, b"17", message_id="new")
        wait_until(lambda: consumer.counts["done"] == 1)
    assert set(Processed.objects.values_list("message_id", flat=True)) == {"1", "new"}


def test_rewriting_is_idempotent(transactional_db):
    now = timezone.now()
    queue, other = stored_queue("one"), stored_queue("other")
    QueueSample.objects.create(queue=other, at=now, length=9)
    for _ in range(2):
        rewrite(
            QueueSample.objects.filter(queue=queue),
            (QueueSample(queue=queue, at=now, length=number) for number in range(3)),
        )
    assert sorted(QueueSample.objects.values_list("queue__name", "length")) == [
        ("one", 0), ("one", 1), ("one", 2), ("other", 9),
    ]  # fmt: skip


def test_a_failed_rewrite_keeps_the_old_rows(transactional_db):
    Processed.objects.create(consumer="x", message_id="old")
    with pytest.raises(IntegrityError):
        rewrite(Processed.objects.all(), [Processed(consumer="x", message_id="new")] * 2)
    assert Processed.objects.get().message_id == "old"


# Failures


def handle_one(consumer_settings, amqp, callback, **changes):
    """Have one message handled and return the consumer."""
    with consuming(Consumer(consumer_settings(**changes), "orders", callback)) as consumer:
        publish_raw(amqp, b"17", message_id="order-17")
        wait_until(lambda: consumer.counts["done"] or consumer.counts["park"])
    return consumer


def no_such_queue(message):
    insert(message)
    message.publish({"of": 17}, "invoices")
    QueueSample.objects.create(queue_id=4711, at=timezone.now(), length=0)  # the foreign key is checked at the commit


def no_json(message):
    insert(message)
    message.publish({"of": object()}, "invoices")


def too_early(message):
    insert(message)
    message.publish({"of": 17}, "invoices")
    message.ack()


def rolled_back(message):
    insert(message)
    message.publish({"of": 17}, "invoices")
    transaction.set_rollback(True)


@pytest.mark.parametrize("guard", [in_transaction, once])
@pytest.mark.parametrize("callback", [no_such_queue, no_json, too_early, rolled_back])
def test_uncommitted_work_publishes_nothing_and_is_no_success(
    consumer_settings, amqp, work_rows, invoices, guard, callback
):
    consumer = handle_one(consumer_settings, amqp, guard(callback), policy=Policy(Outcome.PARK))
    assert consumer.counts["park"] == 1
    assert (work_rows(), invoices(), Processed.objects.count()) == ([], [], 0)


@pytest.mark.parametrize("guard", [in_transaction, once])
def test_a_swallowed_database_error_does_not_count_as_a_commit(consumer_settings, amqp, work_rows, invoices, guard):
    Processed.objects.create(consumer="x", message_id="1")

    @guard
    def callback(message):
        insert(message)
        with contextlib.suppress(IntegrityError), connection.cursor() as cursor:
            # Django does not notice. PostgreSQL refuses the rest of the transaction; SQLite continues.
            cursor.execute("INSERT INTO consumers_processed (consumer, message_id) VALUES ('x', '1')")

    consumer = handle_one(consumer_settings, amqp, callback, policy=Policy(Outcome.PARK))
    assert work_rows() == ["17"] * consumer.counts["done"]
    assert consumer.counts["done"] == (connection.vendor == "sqlite")


def lose_the_database():
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        cursor.execute("SELECT * FROM no_such_table")  # SQLite has no connection to lose, but the same error


@pytest.mark.parametrize("guard", [in_transaction, once])
def test_a_lost_database_is_retried_with_a_new_connection(consumer_settings, amqp, work_rows, invoices, guard):
    @guard
    def callback(message):
        insert(message)
        message.publish({"of": 17}, "invoices")
        if not message.attempts:
            lose_the_database()

    policy = Policy(Outcome.DISCARD, delays=(0.05,))
    consumer = handle_one(consumer_settings, amqp, callback, policy=policy, prefetch="young")
    assert (consumer.counts["retry"], consumer.counts["done"]) == (1, 1)
    assert work_rows() == ["17"]
    assert len(invoices()) == 1


def test_a_database_lost_after_the_work_is_done_changes_nothing(consumer_settings, amqp, work_rows, invoices, caplog):
    @once
    def callback(message):
        insert(message)
        message.publish({"of": 17}, "invoices")

    settings = consumer_settings()
    with Publisher(settings) as publisher:
        send = publisher.send

        def send_and_lose_the_database(routing_key, *publication, **options):
            send(routing_key, *publication, **options)
            if routing_key == INVOICES:  # a delayed message is sent without a connection
                connection.connection.close()  # without Django's knowledge

        publisher.send = send_and_lose_the_database
        with consuming(Consumer(settings, "orders", callback, publisher=publisher)) as consumer:
            publish_raw(amqp, b"17", message_id="order-17")
            wait_until(lambda: consumer.counts["done"])
    assert "Could not clean up the processed messages" in caplog.text
    assert (work_rows(), len(invoices())) == (["17"], 1)


@pytest.mark.usefixtures("each_consumer")
def test_a_publication_failed_after_the_commit_is_retried_with_all_its_properties_but_without_the_work(
    consumer_settings, amqp, work_rows, invoices
):
    amqp.channel.queue_unbind(INVOICES, "shop_test", INVOICES)

    @once
    def callback(message):
        insert(message)
        message.publish(
            b"\x00\xff", "invoices", mandatory=True, content_type="application/octet-stream", priority=3,
            headers={"of": "é", "n": 17}, correlation_id="c", message_id="invoice-17",
        )  # fmt: skip

    policy = Policy(Outcome.DISCARD, delays=(0.5, 5))
    with consuming(Consumer(consumer_settings(policy=policy), "orders", callback)) as consumer:
        publish_raw(amqp, b"17", message_id="order-17")
        wait_until(lambda: consumer.counts["retry"] == 1)
        assert (work_rows(), invoices()) == (["17"], [])
        amqp.channel.queue_bind(INVOICES, "shop_test", INVOICES)
        wait_until(lambda: consumer.counts["done"] == 1)
    assert work_rows() == ["17"]
    properties, body = take(amqp, INVOICES)
    assert (body, properties.content_type, properties.message_id, properties.delivery_mode) == (
        b"\x00\xff", "application/octet-stream", "invoice-17", 2,
    )  # fmt: skip
    assert (properties.priority, properties.correlation_id) == (3, "c")
    assert properties.headers.items() >= {"of": "é", "n": 17}.items()


def test_work_whose_message_was_parked_meanwhile_is_rolled_back(consumer_settings, amqp, work_rows):
    parked = threading.Event()

    @in_transaction
    def callback(message):
        insert(message)
        parked.wait(10)

    consumer = Consumer(consumer_settings(time_limit=0.2, policy=Policy(Outcome.PARK)), "orders", callback)
    consumer.start()
    publish_when_connected(amqp, consumer)
    ended, error = consumer.wait(10)  # finds the callback over its time limit and parks its message
    parked.set()
    wait_until(lambda: consumer.counts["late"] == 1)
    consumer.close()
    assert ended
    assert "did not return" in str(error)
    assert work_rows() == []


def publish_when_connected(amqp, consumer):
    wait_until(lambda: consumer.connected)
    publish_raw(amqp, b"17", message_id="order-17")


def test_threads_close_database_connections_past_their_age(consumer_settings, amqp, work_rows):
    left = []
    consumer = Consumer(consumer_settings(), "orders", in_transaction(insert))
    consumer.listeners.append(lambda *_: left.append(connections["default"].connection))
    with consuming(consumer):
        for number in range(10):
            publish_raw(amqp, b"%d" % number)
        wait_until(lambda: len(left) == 10)
    assert left == [None] * 10
    assert len(work_rows()) == 10


def test_work_in_a_transaction_that_returns_a_coroutine_stops_the_consumer(consumer_settings, amqp, work_rows):
    work = sync_to_async(insert)
    with consuming(Consumer(consumer_settings(), "orders", in_transaction(lambda message: work(message)))) as consumer:
        publish_raw(amqp)
        _, error = consumer.wait(10)
    assert isinstance(error, Halted)
    assert length(amqp, QUEUE) == 1


def test_a_coroutine_gets_a_fresh_connection_for_each_message(consumer_settings, amqp, work_rows):
    found = []

    @with_fresh_connections
    async def callback(message):
        found.append(await sync_to_async(lambda: connections["default"].connection)())
        await sync_to_async(insert)(message)

    with consuming(AsyncConsumer(consumer_settings(prefetch="young"), "orders", callback)) as consumer:
        for number in range(3):
            publish_raw(amqp, b"%d" % number)
        wait_until(lambda: consumer.counts["done"] == 3)
    assert found == [None] * 3
    assert work_rows() == ["0", "1", "2"]
