"""Workers of the message store: shares, leases, positions and handling of messages."""

import json
import logging
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from argparse import ArgumentParser
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kazoo.exceptions import ConnectionLoss

from guardian_store import (
    ClientError,
    Denied,
    HTTPTransport,
    Leases,
    Partition,
    Pinned,
    RetryLater,
    Worker,
    keep_failure,
)
from guardian_store import _deployment as guardian_store_deployment
from guardian_store import _ids as ids
from guardian_store import _leases as leases
from guardian_store import _partition_sharing as partition_sharing
from guardian_store import _worker as worker
from guardian_store import _zookeeper as zookeeper
from guardian_store._ids import Place
from guardian_store._leases import StoreLeases
from guardian_store._partition_sharing import CoordinationUnavailable, LeasesLost, Plan, plan_share
from guardian_store._zookeeper import ZooKeeperLeases
from message_store import applications, queues
from message_store import leases as store_leases
from message_store.database.store import DatabaseStore
from message_store.management.commands.work_store import Command
from message_store.models import Application, ApplicationKey, PartitionLease
from message_store.models import Worker as WorkerRow
from message_store.parameters import MessageRef
from message_store.queues import MessageInput
from message_store.store import STORES, StoreUnavailable, store
from message_store.worker import StoreTransport
from tests.support.proxy import Proxy
from tests.support.served import database_url, serving
from tests.support.toolbox import call_after, in_background, raising, wait_until
from tools.zookeeper import PrivateZooKeeper

pytestmark = pytest.mark.sqlite

PROJECT = Path(__file__).resolve().parents[2]
PARTITIONS = [Partition("default", "orders", number) for number in range(1, 7)]


@pytest.fixture(scope="module")
def private_zookeeper():
    with PrivateZooKeeper() as server:
        yield server


# Shares


def distribute(count, workers, holders):
    """Let each worker follow its plans until nothing changes; return the holder of each partition."""
    partitions = [Partition("default", f"queue {number % 7}", number) for number in range(count)]
    holders = dict(holders)
    for _ in range(2 * len(workers) + 2):
        idle = True
        for me in workers:
            planned = plan_share(partitions, workers, me, holders)
            for one in planned.release:
                del holders[one]
            for one in planned.acquire[: planned.max_acquire]:
                assert holders.get(one) not in workers
                holders[one] = me
            idle = idle and not planned.release and not planned.acquire[: planned.max_acquire]
        if idle:
            return {one: holders[one] for one in partitions}
    raise AssertionError("the distribution does not end")


@hypothesis_settings(max_examples=50)
@given(st.integers(0, 60), st.integers(1, 8), st.data())
def test_shares_are_even_and_partitions_move_only_if_needed(count, number, data):
    workers = list(range(number))
    before = distribute(count, workers, {})
    sizes = Counter(before.values())
    assert len(before) == count
    assert max((sizes[one] for one in workers), default=0) - min(sizes[one] for one in workers) <= 1

    came = distribute(count, [*workers, number], before)
    assert {came[one] for one in before if came[one] != before[one]} <= {number}

    if number > 1:
        gone = data.draw(st.sampled_from(workers))
        after = distribute(count, [one for one in workers if one != gone], before)
        assert {before[one] for one in before if after[one] != before[one]} <= {gone}


# Leases in the database, over HTTP and in ZooKeeper


@pytest.fixture
def over_http(live_server):
    """Return a function that returns a transport with a new key of an application."""
    with ExitStack() as at_end:

        def make(application="shop", address=live_server.url, **options):
            _, key = applications.create_key(applications.create_application(application))
            transport = HTTPTransport(address, application, key=key, **options)
            at_end.callback(transport.close)
            return transport

        yield make


def database_leases(seconds=10):
    return StoreLeases(StoreTransport("shop"), "mailer", seconds)


ODD_NAME = "ö,'\"{}%"


@pytest.fixture(params=["database", "http", "zookeeper"])
def coordination(request, transactional_db):
    """Return a function that creates a worker's leases."""
    made, consumer = [], f"c,%/{request.node.name}".replace("/", "ö")[:50]
    over_http = request.getfixturevalue("over_http") if request.param == "http" else None

    def make(application="shop", seconds=600):
        if request.param == "database":
            made.append(StoreLeases(StoreTransport(application), consumer, seconds))
        elif request.param == "http":
            for queue, partitions in (("orders", 6), (ODD_NAME, 200)):
                queues.create(application, queue, partitions=partitions)
            made.append(StoreLeases(over_http(application), consumer, seconds))
        else:
            hosts = request.getfixturevalue("private_zookeeper").hosts
            made.append(ZooKeeperLeases("default", application, consumer, seconds, hosts))
        made[-1].join()
        return made[-1]

    yield make
    for one in made:
        one.leave()


def take_shares(coordinations, partitions=PARTITIONS, rounds=3):
    for _ in range(rounds):
        for one in coordinations:
            planned = one.plan(partitions)
            one.release(planned.release)
            one.acquire(planned)
    return [len(one.leased) for one in coordinations]


def test_a_partition_has_one_worker_and_moves_when_released(coordination):
    first = coordination()
    assert take_shares([first]) == [6]
    second, third = coordination(), coordination()
    assert take_shares([second], rounds=1) == [0]  # the first worker has released none
    assert take_shares([first, second, third]) == [2, 2, 2]
    assert first.leased | second.leased | third.leased == set(PARTITIONS)
    kept = set(third.leased)
    first.leave()
    assert take_shares([second, third]) == [3, 3]
    assert kept < third.leased


def test_workers_of_another_application_have_separate_shares(coordination):
    odd = [Partition("default", ODD_NAME, number) for number in (199, 200)]
    shop, other = coordination(), coordination("other")
    assert take_shares([shop]) == [6]
    assert take_shares([other], odd) == [2]
    assert take_shares([shop]) == [6]
    assert other.leased == set(odd)
    other.renew()


def test_one_of_two_workers_acquires_a_partition(coordination):
    first, second = coordination(), coordination()
    plans = [one.plan(PARTITIONS)._replace(max_acquire=6) for one in (first, second)]
    first.acquire(plans[0])
    second.acquire(plans[1])
    assert (first.leased, second.leased) == (set(PARTITIONS), set())


def test_a_worker_whose_leases_expired_joins_again(coordination, monkeypatch):
    later = 0
    clock = partition_sharing.clock
    for module in (partition_sharing, leases):
        monkeypatch.setattr(module, "clock", lambda: clock() + later)
    first, second = coordination(), coordination()
    assert take_shares([first, second]) == [3, 3]
    later = 3600
    if isinstance(first, ZooKeeperLeases):
        first._client.stop()  # this ends its session
    assert not first.leases_valid
    second.renew()
    assert take_shares([second]) == [6]
    with pytest.raises(LeasesLost):
        first.renew()
    with pytest.raises(LeasesLost):
        first.plan(PARTITIONS)
    first.join()
    assert first.leased == set()
    assert take_shares([first, second]) == [3, 3]


def test_a_late_worker_keeps_leases_that_nobody_acquired(transactional_db, monkeypatch):
    now = 1000.0
    for module in (partition_sharing, leases):
        monkeypatch.setattr(module, "clock", lambda: now)
    first = database_leases()
    first.join()
    take_shares([first])
    now += 9
    assert not first.leases_valid
    first.renew()
    assert first.leases_valid
    second = database_leases()
    second.join()
    second.plan(PARTITIONS)
    now += 3600  # for both: the second worker was stopped too
    first.renew()
    second.plan(PARTITIONS)
    assert WorkerRow.objects.count() == 2
    assert first.leased == set(PARTITIONS)
    now += 11
    assert take_shares([second], rounds=1) == [6]
    with pytest.raises(LeasesLost):
        first.renew()
    with pytest.raises(LeasesLost):  # nobody would ever release what it leases now
        first.acquire(Plan([], PARTITIONS, 6))


def test_a_release_that_is_executed_late_takes_no_partition_from_its_worker(database_store, live_server, over_http):
    queues.create("shop", "orders", partitions=6)
    with Proxy.before(live_server.url) as proxy:
        first = StoreLeases(over_http(address=proxy.url(live_server.url)), "mailer", 600)
        first.join()
        take_shares([first])
        late = first._worker_id
        proxy.cut_after(0)
        with pytest.raises(LeasesLost):
            first.release(PARTITIONS[:1])
        proxy.forward()
        first.join()
        assert WorkerRow.objects.count() == 1
        assert take_shares([first]) == [6]
        StoreTransport("shop").release("mailer", late, [one[1:] for one in PARTITIONS])
        assert take_shares([first], rounds=1) == [6]


@pytest.mark.parametrize("left", ["without a holder", "by a worker without a row"])
def test_leases_from_before_an_upgrade_are_free(transactional_db, left):
    holder = None if left == "without a holder" else uuid.uuid4()
    for one in PARTITIONS:
        PartitionLease.objects.create(
            application="shop", consumer="mailer", queue=one.queue, partition=one.number, holder=holder
        )
    one = database_leases()
    one.join()
    assert take_shares([one]) == [6]


def test_the_statements_of_database_leases_do_not_grow(transactional_db, django_assert_max_num_queries):
    many = [Partition("default", f"queue {number}", 1) for number in range(150)]
    first = database_leases()
    first.join()
    with django_assert_max_num_queries(9):
        assert take_shares([first], many, rounds=1) == [150]
    with django_assert_max_num_queries(2):
        assert take_shares([first], many, rounds=1) == [150]
    take_shares([first], PARTITIONS, rounds=2)
    assert PartitionLease.objects.count() == 6


@pytest.mark.parametrize("between", [0.5, 0.7])
def test_a_late_answer_about_leases_is_ignored(transactional_db, monkeypatch, between):
    """A worker that was suspended during a query finds an old answer when it continues."""
    now = 1000.0
    for module in (partition_sharing, leases):
        monkeypatch.setattr(module, "clock", lambda: now)
    one = database_leases()
    one.join()
    keep = one._renew

    def stopped():
        nonlocal now
        keep()
        now += between * 10

    monkeypatch.setattr(one, "_renew", stopped)
    if between < partition_sharing.VALID_FRACTION:
        one.renew()
        assert one.leases_valid
    else:
        with pytest.raises(CoordinationUnavailable, match="too long"):
            one.renew()


def test_a_new_session_releases_no_leases_of_others(private_zookeeper):
    """After an expired session, kazoo continues with a new one."""
    first, second = (ZooKeeperLeases("default", "shop", "late", 60, private_zookeeper.hosts) for _ in range(2))
    first.join()
    try:
        take_shares([first])
        second.join()
        first._client.delete(first._worker_path())
        for partition in PARTITIONS:
            first._client.delete(first._lease_path(partition))
        assert take_shares([second]) == [6]
        with pytest.raises(LeasesLost):
            first.release(PARTITIONS[:1])
        assert take_shares([second], rounds=1) == [6]
        second._client.delete(second._lease_path(PARTITIONS[0]))
        second.release(PARTITIONS[:1])
        second._client.delete(second._path + "/leases", recursive=True)
        with pytest.raises(LeasesLost):
            second.acquire(Plan([], PARTITIONS[:1], 1))
    finally:
        for one in (first, second):
            one.leave()


def test_renewing_a_lease_asks_the_leader(private_zookeeper, monkeypatch):
    """The connected server may be cut off from the other servers without knowing it."""
    one = ZooKeeperLeases("default", "shop", "led", 60, private_zookeeper.hosts)
    one.join()
    one.renew()
    asked = one._client.handler.async_result()
    asked.set_exception(ConnectionLoss())
    monkeypatch.setattr(one._client, "sync_async", lambda path: asked)
    with pytest.raises(CoordinationUnavailable):
        one.renew()
    one.leave()


def test_an_unavailable_database_is_reported_by_leases(transactional_db):
    def fail(*_):
        raise OperationalError("no route to host")

    first = database_leases()
    first.join()
    with connection.execute_wrapper(fail):
        for ask in (first.renew, lambda: first.plan(PARTITIONS), first.join):
            with pytest.raises(CoordinationUnavailable, match="no route"):
                ask()
        first.leave()


def test_leases_last_as_long_as_the_negotiated_session(private_zookeeper):
    for asked, agreed in ((60, 4), (2, 2)):
        one = ZooKeeperLeases("default", "shop", "mailer", asked, private_zookeeper.hosts)
        one.join()
        assert one.seconds == pytest.approx(agreed, abs=0.01)
        one.leave()


def test_an_unavailable_zookeeper_is_reported_in_time(monkeypatch):
    monkeypatch.setattr(zookeeper, "MAX_JOIN_SECONDS", 0.5)
    one = ZooKeeperLeases("default", "shop", "mailer", 3600, "127.0.0.1:1")
    with pytest.raises(CoordinationUnavailable):
        one.join()
    with pytest.raises(LeasesLost):
        one.renew()


# Handling of messages


@pytest.fixture
def database_store(transactional_db, settings):
    settings.ZOOKEEPER_HOSTS = ""


@pytest.fixture(params=["in process", "http"])
def transport(request, database_store):
    """Return a worker's access to the store."""
    return request.getfixturevalue("over_http")() if request.param == "http" else StoreTransport("shop")


def post(queue, *bodies, partition=1):
    return [
        one.id for one in queues.post_all(queue, [MessageInput(str(body).encode(), None, partition) for body in bodies])
    ]


def errors():
    """Return the messages of the error queue, if it exists."""
    return [message for queue in queues.queues("shop") if queue.name == "errors" for message in queues.read(queue)]


class RecordingJob:
    """A job that records messages, and raises for the named bodies."""

    def __init__(self, *bad):
        self.messages = []
        self.bad = bad

    def __call__(self, message, context):
        self.messages.append(message)
        if message.text in self.bad:
            raise LookupError(f"there is no {message.text}")

    def bodies(self, partition=None):
        return [one.text for one in self.messages if partition in (None, one.partition)]


def new_worker(job, *transports, consumer="mailer", **options):
    given = {"refresh_seconds": 0.05, "polls_per_second": 40.0, "sharing": Leases(600), **options}
    return Worker(consumer, job, *transports or [StoreTransport("shop")], **given)


@contextmanager
def run_workers(*workers):
    """Run workers in threads, stop them at the end, and raise the first exception."""
    running = [in_background(one.run) for one in workers]
    try:
        yield
    finally:
        for one in workers:
            one.stop()
        errors = [call.exception(30) for call in running]
    for error in filter(None, errors):
        raise error


def test_messages_are_handled_in_order_and_positions_recorded_at_the_end(transport):
    queue = queues.create("shop", "orders", partitions=2)
    last = [post(queue, *range(250), partition=number)[-1] for number in (1, 2)]
    job = RecordingJob()
    with run_workers(new_worker(job, transport)):
        wait_until(lambda: len(job.messages) == 500)
    for number in (1, 2):
        assert job.bodies(number) == [str(body) for body in range(250)]
    assert queues.positions(queue, "mailer") == {1: last[0], 2: last[1]}
    [new] = post(queue, "new")
    again = RecordingJob()
    with run_workers(new_worker(again, transport)):
        wait_until(lambda: again.messages)
    assert again.messages == [(new.hex, "orders", 1, b"new", "", "default")]


def test_job_and_failure_handler_get_the_context(transport):
    queue = queues.create("shop", "orders")
    post(queue, "good", "bad")
    seen = []

    @contextmanager
    def context():
        seen.append("begin")
        yield "a connection"
        seen.append("end")

    def job(message, context):
        seen.append(("job", message.body, context))
        if message.body == b"bad":
            raise LookupError("no")

    def failure(message, context, queue, exception):
        seen.append(("failure", message.body, context, queue.name, str(exception)))

    with run_workers(new_worker(job, transport, context=context, failure=failure)):
        wait_until(lambda: len(seen) == 4)
    assert seen == [
        "begin",
        ("job", b"good", "a connection"),
        ("job", b"bad", "a connection"),
        ("failure", b"bad", "a connection", "orders", "no"),
        "end",
    ]


def test_a_failure_is_logged_and_the_next_message_follows(database_store, caplog):
    post(queues.create("shop", "orders"), "1", "2", "3")
    job = RecordingJob("2")
    with run_workers(new_worker(job)):
        wait_until(lambda: len(job.messages) == 3)
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "partition 1 of queue 'orders' of 'shop'" in record.getMessage()
    assert "there is no 2" in record.getMessage()
    assert record.exc_info


def test_a_failed_message_is_kept_for_30_days_in_the_error_queue(transport, monkeypatch):
    orders = queues.create("shop", "orders")
    queues.post(orders, MessageInput(b"\xff\x00", content_type="image/png"))
    queues.post(orders, MessageInput(b'{"messages": []}', content_type="application/json; charset=utf-8"))
    queues.post(orders, MessageInput(b"\xff", content_type="application/json"))
    post(orders, "bad")
    job, ttls = RecordingJob("bad"), []
    push = type(store()).push
    monkeypatch.setattr(
        type(store()), "push", lambda self, queue, some: ttls.append(some[0].ttl) or push(self, queue, some)
    )

    def undecodable(message, context):
        job.messages.append(message)
        raise LookupError("no")

    with run_workers(new_worker(undecodable, transport, failure=keep_failure)):
        wait_until(lambda: len(errors()) == 4)
        post(orders, "more")
        wait_until(lambda: len(job.messages) == 5)
    assert [(one.body, one.content_type) for one in errors()] == [
        (b"\xff\x00", "image/png"),
        (b'{"messages": []}', "application/json; charset=utf-8"),
        (b"\xff", "application/json"),
        (b"bad", ""),
        (b"more", ""),
    ]
    assert set(ttls) - {queues.DEFAULT_TTL_SECONDS} == {30 * 24 * 3600}
    assert {one.queue for one in job.messages} == {"orders"}


def store_message(queue, body, content_type="application/json"):
    """Store a message without a batch around it, which would need room of its own."""
    ref = MessageRef(1, ids.message_id(Place(store().now(), 0)))
    queues.overwrite(queue, [ref], MessageInput(body, content_type=content_type))


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"bad", " text/plain"),
        (b"bad", "text/plain\t"),
        (b"[%s]" % b",".join([b'""'] * 200), "application/json"),  # smaller as base64 than as text
    ],
)
def test_a_failed_message_is_kept_whatever_its_content_type(database_store, over_http, settings, body, content_type):
    settings.MESSAGE_STORE_MAX_BODY = 1000
    store_message(queues.create("shop", "orders"), body, content_type)
    with run_workers(new_worker(RecordingJob(body.decode()), over_http(), failure=keep_failure)):
        wait_until(errors)
    assert [(one.body, one.content_type) for one in errors()] == [(body, content_type)]


@pytest.mark.parametrize("in_process", [False, True], ids=["over HTTP", "in process"])
def test_a_failed_message_waits_while_the_application_has_no_room(database_store, over_http, settings, in_process):
    post(queues.create("shop", "orders"), "bad")
    settings.MESSAGE_STORE_MAX_BYTES = 1
    job, transport = RecordingJob("bad"), over_http()
    with run_workers(new_worker(job, StoreTransport("shop") if in_process else transport, failure=keep_failure)):
        wait_until(lambda: len(job.messages) == 2)
        settings.MESSAGE_STORE_MAX_BYTES = 0
        wait_until(errors)


@pytest.mark.parametrize(
    "limit", [(queues, "MAX_CONSUMERS"), (store_leases, "MAX_WORKERS")], ids=["positions", "leases"]
)
def test_a_worker_over_http_waits_at_a_limit_of_the_application(database_store, over_http, monkeypatch, caplog, limit):
    queue = queues.create("shop", "orders")
    post(queue, "first")
    monkeypatch.setattr(*limit, 0)
    with run_workers(new_worker(RecordingJob(), over_http(), sharing=Leases(1))):
        wait_until(lambda: "quota" in caplog.text)
        monkeypatch.undo()
        wait_until(lambda: queues.positions(queue, "mailer"))


def test_a_worker_in_process_reads_no_more_bytes_at_once_than_a_response_has(database_store, monkeypatch):
    post(queues.create("shop", "orders"), "first", "second", "third")
    monkeypatch.setattr(queues, "BATCH_BYTES", 6)
    transport = StoreTransport("shop")
    page = transport.read(transport.queues(["orders"])["orders"], 1, None, 10)
    assert ([message.body for message in page.messages], page.more) == ([b"first", b"second"], True)


def test_a_failed_message_whose_copy_is_too_large_is_logged_and_the_next_follows(
    database_store, over_http, settings, caplog
):
    settings.MESSAGE_STORE_MAX_BODY = 1000
    orders = queues.create("shop", "orders")
    store_message(orders, b"[%s]" % (b" " * 998))
    post(orders, "bad")
    job = RecordingJob("bad", f"[{' ' * 998}]")
    with run_workers(new_worker(job, over_http(), failure=keep_failure)):
        wait_until(errors)
    assert [one.body for one in errors()] == [b"bad"]
    large = job.messages[0].id
    assert f"Message {large} is not copied to the queue 'errors', which refuses it: body: More bytes" in caplog.text
    assert next(iter(queues.read(orders))).id.hex == large


async def send_later(message, context):
    """Do nothing."""


def send_each(message, context):
    """Yield nothing."""
    yield


async def send_each_later(message, context):
    """Yield nothing."""
    yield


@pytest.mark.parametrize("job", [send_later, send_each, send_each_later])
def test_a_job_that_would_do_nothing_is_an_error(database_store, job):
    with pytest.raises(ValueError, match="A job that is a coroutine"):
        new_worker(job)
    queue = queues.create("shop", "orders")
    post(queue, "Dune")
    with pytest.raises(TypeError, match="A job that is a coroutine"):
        new_worker(lambda *given: job(*given)).run()
    assert queues.positions(queue, "mailer") == {}


def test_a_worker_that_is_stopped_before_it_begins_ends_without_errors(transport, caplog):
    one = new_worker(print, transport)
    one.stop()
    one.run()
    assert not any(one.levelno > logging.INFO for one in caplog.records)


@pytest.mark.parametrize("by", ["the job", "the failure handler"])
def test_a_message_is_handled_again_after_retry_later(database_store, by):
    post(queues.create("shop", "orders"), "1", "bad", "3")
    handled, waits = [], []

    def retry(which):
        if which == by and len(waits) < 2:
            waits.append(one._deployments[0]._failures)
            raise RetryLater("the mail server is down")

    def job(message, context):
        handled.append(message.text)
        if message.text == "bad":
            retry("the job")
            raise LookupError

    one = new_worker(job, failure=lambda *_: retry("the failure handler"))
    with run_workers(one):
        wait_until(lambda: "3" in handled)
    assert handled == ["1", "bad", "bad", "bad", "3"]
    assert waits == [0, 1]  # it waits longer each time


def test_a_failing_failure_handler_ends_the_worker(database_store):
    queue = queues.create("shop", "orders")
    [first, *_] = post(queue, "1", "bad", "3")

    def failure(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        new_worker(RecordingJob("bad"), failure=failure).run()
    assert not WorkerRow.objects.exists()
    assert queues.positions(queue, "mailer") == {1: first}


def test_a_failure_in_the_error_queue_is_not_stored_again(database_store):
    post(queues.create("shop", "errors"), "bad", "2")
    job = RecordingJob("bad")
    with run_workers(new_worker(job, queues=["errors"], failure=keep_failure)):
        wait_until(lambda: len(job.messages) == 2)
    assert [one.body for one in errors()] == [b"bad", b"2"]


def test_an_error_while_recording_positions_releases_the_leases(database_store):
    post(queues.create("shop", "orders"), "1")
    one = new_worker(lambda *_: one.stop(), consumer="thorough")
    with raising(type(store()), "advance_positions", ZeroDivisionError), pytest.raises(ZeroDivisionError):
        one.run()
    assert not WorkerRow.objects.exists()
    assert "heartbeats of thorough" not in {thread.name for thread in threading.enumerate()}


def test_a_worker_that_keeps_losing_leases_backs_off(database_store, monkeypatch):
    queues.create("shop", "orders")
    waits = []

    def lose(self, planned):
        raise LeasesLost("no access")

    def wait(seconds):
        waits.append(seconds)
        one._deployments[0]._resume_at = 0.0
        if len(waits) == 9:
            one.stop()

    monkeypatch.setattr(StoreLeases, "acquire", lose)
    one = new_worker(RecordingJob())
    monkeypatch.setattr(one, "_wait", wait)
    one.run()
    assert all(
        full / 2 - 0.02 <= wait <= full for full, wait in zip([0.05 * 2**n for n in range(8)], waits, strict=False)
    )
    assert 4.98 <= waits[8] <= 10


def test_workers_share_new_queues_partitions_and_workers(database_store, over_http):
    """Leases last ten minutes, so partitions move only by release. The second worker is in this process."""
    orders = queues.create("shop", "orders", partitions=4)
    jobs = [RecordingJob(), RecordingJob()]
    first, second = new_worker(jobs[0], over_http()), new_worker(jobs[1])

    def all_done():
        return sorted(one.body for job in jobs for one in job.messages)

    with run_workers(first):
        wait_until(lambda: len(first.partitions) == 4)
        post(orders, "1")
        wait_until(lambda: len(all_done()) == 1)
        with run_workers(second):
            wait_until(lambda: len(first.partitions) == len(second.partitions) == 2)
            for number in range(1, 5):
                post(orders, *range(10, 20), partition=number)
            wait_until(lambda: len(all_done()) == 41)
            orders = queues.update(orders, partitions=6)
            invoices = queues.create("shop", "invoices", partitions=2)
            wait_until(lambda: len(first.partitions) == len(second.partitions) == 4)
            post(orders, "2", partition=6)
            post(invoices, "3", partition=2)
            wait_until(lambda: len(all_done()) == 43)
        wait_until(lambda: len(first.partitions) == 8)
        post(orders, *range(20, 30), partition=2)
        wait_until(lambda: len(all_done()) == 53)
        store().remove("shop", "orders")
        again = queues.create("shop", "orders")
        wait_until(lambda: len(first.partitions) == 3)
        post(again, "4")
        wait_until(lambda: len(all_done()) == 54)
    assert len(all_done()) == 54  # no message was handled twice
    assert jobs[1].messages


@pytest.mark.parametrize(
    ("new_position", "expected"),
    [
        (lambda given: {"1": given[4].hex}, ["5", "6", "7", "8", "9"]),
        (lambda given: {"1": given[9].hex}, []),
        (lambda given: None, [str(number) for number in range(10)]),
    ],
    ids=["back", "unchanged", "removed"],
)
def test_a_worker_continues_from_a_position_set_meanwhile(transport, monkeypatch, new_position, expected):
    monkeypatch.setattr(guardian_store_deployment, "RECORD_INTERVAL_SECONDS", 0.05)
    queue = queues.create("shop", "orders")
    given = post(queue, *range(10))
    job = RecordingJob()
    with run_workers(new_worker(job, transport)):
        wait_until(lambda: queues.positions(queue, "mailer").get(1) == given[-1])
        if (at := new_position(given)) is None:
            queues.delete_positions(queue, "mailer")
        else:
            queues.set_positions(queue, "mailer", at)
        wait_until(lambda: len(job.messages) == 10 + len(expected))
        post(queue, "new")
        wait_until(lambda: "new" in job.bodies())
    assert job.bodies()[10:] == [*expected, "new"]


def test_messages_before_a_position_set_forward_are_skipped(database_store):
    queue = queues.create("shop", "orders")
    given = post(queue, *range(50))
    seen = []

    def job(message, context):
        seen.append(message.body.decode())
        if message.body == b"3":
            queues.set_positions(queue, "mailer", {"1": given[40].hex})
            wait_until(lambda: partition_sharing.clock() > one._deployments[0]._record_at)  # positions are due

    one = new_worker(job)
    with run_workers(one):
        wait_until(lambda: "49" in seen)
    assert seen == [str(number) for number in [*range(4), *range(41, 50)]]


class Fragile(DatabaseStore):
    """A store that can be made unavailable, and can delay messages."""

    away = False
    delay = 0

    def positions(self, *args):
        if Fragile.away:
            raise StoreUnavailable("no route to host")
        return super().positions(*args)


def test_a_worker_waits_for_an_unavailable_store_and_its_delay(transactional_db, settings, caplog, monkeypatch):
    monkeypatch.setitem(STORES, "fragile", f"{__name__}.Fragile")
    settings.MESSAGE_STORE = "fragile"
    settings.ZOOKEEPER_HOSTS = ""
    queue = queues.create("shop", "orders")
    job = RecordingJob()
    monkeypatch.setattr(Fragile, "away", True)
    monkeypatch.setattr(Fragile, "delay", 3600)
    post(queue, "1")
    one = new_worker(job)
    [deployment] = one._deployments
    with run_workers(one):
        wait_until(lambda: deployment._failures > 2)
        Fragile.away = False
        wait_until(lambda: not deployment._failures)
        wait_until(lambda: one.partitions == [Partition("default", "orders", 1)])
        wait_until(lambda: deployment._polls["orders"].wait > guardian_store_deployment.MAX_POLL_SECONDS / 5)
        assert job.messages == []
        Fragile.delay = 0
        wait_until(lambda: job.messages)
    assert [record.getMessage() for record in caplog.records if record.name == guardian_store_deployment.__name__] == [
        "The worker waits: storage: no route to host",
        "The worker continues.",
    ]


def test_idle_partitions_cost_a_few_requests_a_second(database_store, over_http):
    for number in range(3):
        queues.create("shop", f"queue {number}", partitions=200)
    transport, requests = over_http(), []
    request = transport.client.request
    transport.client.request = lambda *names, **options: requests.append(names) or request(*names, **options)
    intervals = {"refresh_seconds": worker.REFRESH_SECONDS, "polls_per_second": worker.POLLS_PER_SECOND}
    one = new_worker(RecordingJob(), transport, **intervals)
    with run_workers(one):
        wait_until(lambda: len(one.partitions) == 600)
        begun, before = time.monotonic(), len(requests)
        time.sleep(1)
        assert len(requests) - before <= 8 * (time.monotonic() - begun)


def test_a_message_in_one_of_many_idle_partitions_is_handled_soon(transport):
    queue = queues.create("shop", "orders", partitions=200)
    job = RecordingJob()
    one = new_worker(job, transport)
    with run_workers(one):
        wait_until(lambda: len(one.partitions) == 200)
        post(queue, "1", partition=150)
        wait_until(lambda: job.messages, seconds=5)


def test_pinned_partitions_are_handled_without_leases(transport):
    queue = queues.create("shop", "orders", partitions=3)
    queues.create("shop", "other")
    given = {number: post(queue, number, partition=number)[0] for number in (1, 2, 3)}
    pinned = Pinned([Partition("default", "orders", 2), Partition("default", "orders", 3), PARTITIONS[5]])
    job = RecordingJob()
    with run_workers(new_worker(job, transport, sharing=pinned)):
        wait_until(lambda: len(job.messages) == 2)
        assert not WorkerRow.objects.exists()
    assert sorted(job.bodies()) == ["2", "3"]
    assert queues.positions(queue, "mailer") == {2: given[2], 3: given[3]}


@pytest.mark.parametrize(
    ("application", "consumer", "error"),
    [("shop", "a/b", "can't be a name"), ("shpo", "mailer", "no such application")],
)
def test_a_pinned_worker_ends_where_waiting_is_useless(database_store, live_server, application, consumer, error):
    queues.create("shop", "orders")
    _, key = applications.create_key(applications.create_application("shop"))
    with closing(HTTPTransport(live_server.url, application, key=key)) as transport:
        one = new_worker(print, transport, consumer=consumer, sharing=Pinned([Partition("default", "orders", 1)]))
        with pytest.raises(ClientError, match=error):
            one.run()


def test_two_workers_with_the_same_pinned_partition_never_move_its_position_back(database_store):
    """Case A9."""
    queue = queues.create("shop", "orders")
    given = post(queue, *range(10))
    begun, goes_on = threading.Event(), threading.Event()
    seen = []

    def slow(message, context):
        begun.set()
        goes_on.wait(30)

    late = new_worker(slow, sharing=Pinned(PARTITIONS[:1]))
    with run_workers(late):
        begun.wait(30)
        with run_workers(new_worker(lambda message, _: seen.append(message.id), sharing=Pinned(PARTITIONS[:1]))):
            wait_until(lambda: len(seen) == 10)
        assert queues.positions(queue, "mailer") == {1: given[-1]}
        late.stop()
        goes_on.set()
    assert queues.positions(queue, "mailer") == {1: given[-1]}


def test_a_worker_reads_several_deployments_though_one_is_down(database_store, live_server, over_http):
    """Two applications stand for two deployments."""
    messages = {}
    for name in ("shop", "market"):
        queues.create(name, "orders")
        messages[name] = queues.post(queues.find(name, "orders"), MessageInput(name.encode()))
    job = RecordingJob()
    with Proxy.before(live_server.url) as proxy:
        market = over_http("market", deployment="market", timeout=1)
        down = HTTPTransport(proxy.url(live_server.url), "shop", key="x", deployment="down", timeout=1)
        proxy.close_next(10**6)
        with run_workers(new_worker(job, down, market, over_http(deployment="shop"))):
            wait_until(lambda: len(job.messages) == 2)
    assert {(one.deployment, one.queue, one.text) for one in job.messages} == {
        ("shop", "orders", "shop"),
        ("market", "orders", "market"),
    }
    for name, last in messages.items():
        assert queues.positions(queues.find(name, "orders"), "mailer") == {1: last.id}


@pytest.mark.slow
def test_a_worker_without_network_stops_before_another_gets_its_partition(database_store, live_server, over_http):
    """Its job goes on meanwhile, and it has read more messages than it handles."""
    queue = queues.create("shop", "orders")
    last = post(queue, *range(50))[-1]
    handled = []

    def job(name):
        def handle(message, context):
            handled.append((time.monotonic(), name, message.text))
            time.sleep(0.04)

        return handle

    with Proxy.before(live_server.url) as proxy:
        transport, cut = over_http(timeout=1), over_http(timeout=1, address=proxy.url(live_server.url))
        first = new_worker(job("first"), cut, sharing=Leases(1.5))
        second = new_worker(job("second"), transport, sharing=Leases(1.5))
        with run_workers(first):
            wait_until(lambda: len(handled) > 5)
            with run_workers(second):
                proxy.close_next(10**6)
                wait_until(lambda: queues.positions(queue, "mailer") == {1: last}, seconds=30)
    ends = {name: at for at, name, _ in handled}
    begins = {name: at for at, name, _ in reversed(handled)}
    assert ends["first"] + 0.04 < begins["second"]
    assert sorted({int(text) for *_, text in handled}) == list(range(50))
    assert [text for _, name, text in handled if name == "second"][-1] == "49"


def test_deployments_of_a_worker_have_different_names():
    for transports in ([], [StoreTransport("shop"), StoreTransport("market")]):
        with pytest.raises(ValueError, match="different deployments"):
            Worker("mailer", print, *transports)


def test_a_revoked_key_ends_the_worker(database_store, over_http):
    post(queues.create("shop", "orders"), "1")
    one = new_worker(lambda *_: ApplicationKey.objects.all().delete(), over_http())
    with pytest.raises(Denied):
        one.run()


# The command


@pytest.mark.parametrize(
    ("arguments", "error_text"),
    [
        (["tests.support.working.handle"], "is not of the form MODULE:FUNCTION"),
        (["tests.nowhere:handle"], "No module named 'tests.nowhere'"),
        (["tests.support.working:NOTES"], "is not a function"),
        (["tests.support.working:handle", "--context", "tests.support.working:none"], "can't be imported"),
        (["tests.support.working:handle", "--batch", "0"], "--batch must be from 1 to 1000"),
        (["tests.support.working:handle", "--queue", "a/b"], "--queue: "),
        (["tests.support.working:handle", "--pin", "orders"], "--pin orders: "),
        (["tests.support.working:handle", "--consumer", "x" * 51], "--consumer: Longer than maximum length 50"),
        (["tests.support.working:handle", "--application", "shpo"], "application shpo does not exist"),
        (["tests.support.working:handle"], "hosts of ZooKeeper are malformed"),
        (["asyncio:sleep"], "is a coroutine or generator function"),
    ],
)
def test_invalid_arguments_of_the_command_exit_with_2(transactional_db, settings, arguments, error_text):
    Application.objects.create(name="shop")
    settings.ZOOKEEPER_HOSTS = "127.0.0.1:port"
    with pytest.raises(CommandError, match=error_text) as raised:
        call_command("work_store", *arguments[:1], "--application", "shop", *arguments[1:])
    assert raised.value.returncode == 2


def test_the_command_pins_partitions(transactional_db, monkeypatch):
    Application.objects.create(name="shop")
    runs = []
    monkeypatch.setattr(Worker, "run", lambda self: runs.append(self._deployments[0].coordination._pinned))
    call_command("work_store", "tests.support.working:handle", "--application=shop", "--pin=orders:2", "--pin=a:b:1")
    assert runs == [{Partition("default", "orders", 2), Partition("default", "a:b", 1)}]


# docs/message-store-workers.md

GUIDE = (PROJECT / "docs" / "message-store-workers.md").read_text()


[COMMAND] = re.findall(r"^    \.venv/bin/python (manage\.py .*)$", GUIDE, re.MULTILINE)
[PROGRAM, *_] = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def start_guides_worker(server, program, **settings):
    """Start a program of the guide as a user does, with a new key."""
    _, key = applications.create_key(applications.create_application("shop"))
    return subprocess.Popen(
        [sys.executable, *program], cwd=PROJECT, env={**os.environ, "GUARDIAN": server.url, "KEY": key, **settings},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "consumer"), [(shlex.split(COMMAND), "send"), (["-c", PROGRAM], "mailer")], ids=["in process", "http"]
)
def test_a_worker_of_the_guide_prints_messages_and_ends_by_a_signal(database_store, live_server, program, consumer):
    queue = queues.create("shop", "orders")
    [last] = post(queue, "a book")
    settings = {"DATABASE_URL": database_url(), "ZOOKEEPER_HOSTS": ""}
    with start_guides_worker(live_server, program, **settings) as process:
        try:
            assert process.stdout.readline() == "orders 1 a book\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert queues.positions(queue, consumer) == {1: last}
    assert not WorkerRow.objects.exists()


BOOKKEEPER = ["docs/examples/bookkeeper.py"]


@pytest.mark.slow
def test_the_bookkeeper_books_each_order_once_and_keeps_what_it_cannot_book(database_store, live_server, tmp_path):
    queue = queues.create("shop", "orders")
    orders = [json.dumps({"customer": f"c{number}", "cents": number}) for number in range(20)]
    last = post(queue, "no order", *orders)[-1]
    books = tmp_path / "books.sqlite3"

    def booked():
        with closing(sqlite3.connect(books)) as connection:
            return [customer for (customer,) in connection.execute("SELECT customer FROM orders ORDER BY rowid")]

    with start_guides_worker(live_server, BOOKKEEPER, BOOKS=str(books)) as process:
        try:
            for _ in range(2):  # the second time, each message comes again
                queues.delete_positions(queue, "bookkeeper")
                wait_until(lambda: queues.positions(queue, "bookkeeper") == {1: last}, seconds=30)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert booked() == [f"c{number}" for number in range(20)]
    assert [one.body for one in errors()] == [b"no order"] * 2
    assert not WorkerRow.objects.exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"KEY": "wrong"}, "InvalidApplicationKey: There is no such key"),
        ({"GUARDIAN": "guardian.example.org"}, "GUARDIAN: 'guardian.example.org' is not an address such as https://"),
    ],
)
def test_the_bookkeeper_ends_with_2_if_trying_again_is_useless(database_store, live_server, tmp_path, given, says):
    with start_guides_worker(live_server, BOOKKEEPER, BOOKS=str(tmp_path / "b"), **given) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert says in errors
    assert "Traceback" not in errors


def test_the_guide_names_each_option_of_the_command():
    parser = ArgumentParser()
    Command().add_arguments(parser)
    options = {action.option_strings[0] for action in parser._actions if action.option_strings} - {"-h"}
    assert set(re.findall(r"^\| `(--[a-z]+) ", GUIDE, re.MULTILINE)) == options


# Processes


class Processes:
    """Worker processes with their logs and notes about each message."""

    def __init__(self, directory, **environment):
        self.directory = directory
        self.notes = directory / "notes"
        self.notes.touch()
        self.environment = {**os.environ, "WORKING_NOTES": str(self.notes), **environment}
        self.started = []

    def start(self, **environment):
        with (self.directory / f"log{len(self.started)}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.working_http"], cwd=PROJECT,
                env={**self.environment, **environment}, stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(process)
        return process

    def log(self, process):
        return (self.directory / f"log{self.started.index(process)}").read_text()

    def read(self):
        """Return the notes in order of time."""
        lines = self.notes.read_text().splitlines()
        return sorted(map(tuple, map(json.loads, lines)), key=lambda one: one[-1])

    def done(self):
        """Return process, partition and body of each handled message."""
        return [tuple(rest[:3]) for what, *rest in self.read() if what == "end"]

    def shares(self):
        """Return for each process the number of partitions whose latest message it began."""
        latest = {partition: pid for what, pid, partition, *_ in self.read() if what == "begin"}
        counted = Counter(latest.values())
        return [counted[process.pid] for process in self.started]


def check(notes, lost):
    """Check that each partition's messages were handled in order by one process at a time, without gaps.

    Messages begun by ``lost`` processes (killed, or with lost leases) may be handled again.
    """
    for partition in {one[2] for one in notes}:
        holder, latest, open_jobs = None, -1, set()
        for what, pid, _, body, _ in (one for one in notes if one[2] == partition):
            if what == "end":
                open_jobs.discard((pid, body))
                continue
            assert {by for by, _ in open_jobs} <= lost - {pid}, f"two at once, at {body} of partition {partition}"
            if holder in lost:
                assert body <= latest + 1, f"left out before {body} of partition {partition}"
            else:
                assert body == latest + 1, f"not in order, at {body} of partition {partition}"
            holder, latest = pid, body
            open_jobs.add((pid, body))


@pytest.mark.slow
@pytest.mark.parametrize("leases_in", ["the store", pytest.param("zookeeper", marks=pytest.mark.soak)])
def test_partitions_have_one_worker_though_one_is_killed_and_one_cut_off(database_store, request, tmp_path, leases_in):
    """The worker is cut off from the store by stopping it for longer than its lease."""
    _, key = applications.create_key(applications.create_application("shop"))
    queue = queues.create("shop", "orders", partitions=6)
    posted = Counter()

    def feed():
        """Post messages to idle partitions, and return the shares."""
        done = Counter(partition for _, partition, _ in processes.done())
        for number in range(1, 7):
            if posted[number] - done[number] < 5:
                post(queue, *range(posted[number], posted[number] + 5), partition=number)
                posted[number] += 5
        return processes.shares()

    hosts = request.getfixturevalue("private_zookeeper").hosts if leases_in == "zookeeper" else ""
    proxy, stop = Proxy.before(f"http://{hosts or 'nowhere:1'}"), tmp_path / "stop"
    isolated = {"ZOOKEEPER_HOSTS": f"127.0.0.1:{proxy.port}"} if hosts else {"WORKING_STOP": str(stop)}
    with serving() as port:
        processes = Processes(tmp_path, ZOOKEEPER_HOSTS=hosts, GUARDIAN=f"http://127.0.0.1:{port}", KEY=key)
        try:
            killed, cut, third = processes.start(), processes.start(**isolated), processes.start()
            with proxy:
                wait_until(lambda: feed() == [2, 2, 2], 60)
                killed.kill()
                if hosts:
                    proxy.close_next(10**6)
                else:
                    stop.touch()
                wait_until(lambda: feed() == [0, 0, 6], 60)
                if hosts:
                    proxy.forward()
                else:
                    cut.send_signal(signal.SIGCONT)
                wait_until(lambda: feed() == [0, 3, 3], 60)
                wait_until(lambda: "rejoins" in processes.log(cut))
                for process in (cut, third):
                    process.terminate()
                for process in (cut, third):
                    process.wait(30)
        finally:
            for process in processes.started:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes.started] == [-9, 0, 0]
    check(processes.read(), {one.pid for one in processes.started if "rejoins" in processes.log(one)} | {killed.pid})
    recorded = queues.positions(queue, "handle")
    for number in range(1, 7):
        handled = {body for _, partition, body in processes.done() if partition == number}
        assert handled == set(range(len(handled)))
        [message] = queues.read_ids(queue, [MessageRef(number, recorded[number])])
        begun = [body for what, _, partition, body, _ in processes.read() if (what, partition) == ("begin", number)]
        assert int(message.body) == begun[-1]
    assert not WorkerRow.objects.exists()


def test_a_position_that_is_deleted_after_its_move_is_answered_as_moved(monkeypatch, database_store):
    queue = queues.create("shop", "orders")
    [given] = post(queue, 1)
    call_after(monkeypatch, DatabaseStore, "advance_positions", lambda: store().delete_positions(queue, "mailer"))
    moves = {"1": {"from": None, "to": given.hex}}
    assert queues.advance_positions(queue, "mailer", moves) == {1: given}
    assert queues.positions(queue, "mailer") == {}
