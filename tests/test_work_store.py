"""Workers of the message store: who gets what, one at a time, what is recorded, and what becomes of a message."""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kazoo.exceptions import ConnectionLoss

from guardian_store import ids
from message_store import leases, partition_sharing, queues, worker, zookeeper
from message_store.database import DatabaseStore
from message_store.leases import DatabaseLeases
from message_store.management.commands.work_store import Command
from message_store.models import Application, PartitionLease
from message_store.models import Worker as WorkerRow
from message_store.partition_sharing import CoordinationUnavailable, LeasesLost, Partition, Plan, plan_share
from message_store.queues import MessageInput, MessageRef
from message_store.store import STORES, StoreUnavailable, store
from message_store.worker import Worker, keep_failure
from message_store.zookeeper import ZooKeeperLeases
from tests.proxy import Proxy
from tests.toolbox import wait_until
from tools.processes import StartError
from tools.zookeeper import PrivateZooKeeper

PROJECT = Path(__file__).resolve().parent.parent
PARTITIONS = [Partition("shop", "orders", number) for number in range(1, 7)]


@pytest.fixture(scope="module")
def private_zookeeper():
    with PrivateZooKeeper() as server:
        yield server


# Who gets what


def shared_out(count, workers, holders):
    """Have each worker do what it plans, time after time, until nobody has anything to do; return who holds what."""
    partitions = [Partition("shop", f"queue {number % 7}", number) for number in range(count)]
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
    raise AssertionError("it never ends")


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(1, 8), st.data())
def test_shares_are_even_and_nothing_moves_that_need_not(count, number, data):
    workers = list(range(number))
    before = shared_out(count, workers, {})
    sizes = Counter(before.values())
    assert len(before) == count
    assert max((sizes[one] for one in workers), default=0) - min(sizes[one] for one in workers) <= 1

    came = shared_out(count, [*workers, number], before)
    assert {came[one] for one in before if came[one] != before[one]} <= {number}

    if number > 1:
        gone = data.draw(st.sampled_from(workers))
        after = shared_out(count, [one for one in workers if one != gone], before)
        assert {before[one] for one in before if after[one] != before[one]} <= {gone}


# Leases, in the database and by ZooKeeper


@pytest.fixture(params=["database", "zookeeper"])
def coordination(request, transactional_db):
    """Give a function that makes one worker's view of the leases."""
    made = []
    if request.param == "zookeeper":
        hosts = request.getfixturevalue("private_zookeeper").hosts

    def make(application="shop", seconds=600, consumer=f"mailer/{request.node.name}"[-50:]):
        if request.param == "database":
            made.append(DatabaseLeases(application, consumer, seconds))
        else:
            made.append(ZooKeeperLeases(application, consumer, seconds, hosts))
        made[-1].join()
        return made[-1]

    yield make
    for one in made:
        one.leave()


def have(coordinations, partitions=PARTITIONS, rounds=3):
    for _ in range(rounds):
        for one in coordinations:
            planned = one.plan(partitions)
            one.release(planned.release)
            one.acquire(planned)
    return [len(one.leased) for one in coordinations]


def test_a_partition_is_one_workers_and_goes_to_another_when_it_is_released_or_its_worker_leaves(coordination):
    first = coordination()
    assert have([first]) == [6]
    second, third = coordination(), coordination()
    assert second.acquire(second.plan(PARTITIONS)) == set()  # the first has not released any
    assert have([first, second, third]) == [2, 2, 2]
    assert first.leased | second.leased | third.leased == set(PARTITIONS)
    kept = set(third.leased)
    first.leave()
    assert have([second, third]) == [3, 3]
    assert kept < third.leased


def test_another_applications_workers_have_shares_of_their_own_also_with_the_same_consumer_and_odd_names(coordination):
    odd = [Partition("a,b/c.%", "ö\n'\"{}", number) for number in (199, 200)]
    shop, other = coordination(), coordination("a,b/c.%")
    assert have([shop]) == [6]
    assert have([other], odd) == [2]
    assert have([shop]) == [6]
    assert other.leased == set(odd)
    other.renew()


def test_of_two_that_try_for_the_same_partitions_each_is_one_workers(coordination):
    first, second = coordination(), coordination()
    plans = [one.plan(PARTITIONS)._replace(max_acquire=6) for one in (first, second)]
    first.acquire(plans[0])
    assert second.acquire(plans[1]) == set()
    assert first.leased == set(PARTITIONS)


def test_who_is_taken_for_gone_learns_it_and_begins_anew_under_another_name(coordination, monkeypatch):
    later = 0
    clock = partition_sharing.clock
    for module in (partition_sharing, leases):
        monkeypatch.setattr(module, "clock", lambda: clock() + later)
    first, second = coordination(), coordination()
    assert have([first, second]) == [3, 3]
    later = 3600
    if isinstance(first, ZooKeeperLeases):
        first._client.stop()  # and with it its session
    assert not first.leases_valid
    second.renew()
    assert have([second]) == [6]
    with pytest.raises(LeasesLost):
        first.renew()
    with pytest.raises(LeasesLost):
        first.plan(PARTITIONS)
    first.join()
    assert first.leased == set()
    assert have([first, second]) == [3, 3]


def test_a_worker_that_is_late_and_that_nobody_missed_still_has_what_it_held(transactional_db, monkeypatch):
    now = 1000.0
    for module in (partition_sharing, leases):
        monkeypatch.setattr(module, "clock", lambda: now)
    first = DatabaseLeases("shop", "mailer", 10)
    first.join()
    have([first])
    now += 9
    assert not first.leases_valid
    first.renew()
    assert first.leases_valid
    second = DatabaseLeases("shop", "mailer", 10)
    second.join()
    second.plan(PARTITIONS)
    now += 3600  # for both: the second was stopped, too, and has not looked in between
    first.renew()
    second.plan(PARTITIONS)
    assert WorkerRow.objects.count() == 2
    assert first.leased == set(PARTITIONS)
    now += 11
    planned = second.plan(PARTITIONS)
    assert len(second.acquire(planned)) == 6
    with pytest.raises(LeasesLost):
        first.renew()


def test_leases_in_the_database_cost_the_same_statements_for_many_partitions_and_gone_ones_go(
    transactional_db, django_assert_max_num_queries
):
    many = [Partition("shop", f"queue {number}", 1) for number in range(150)]
    first = DatabaseLeases("shop", "mailer", 10)
    first.join()
    with django_assert_max_num_queries(9):
        assert have([first], many, rounds=1) == [150]
    with django_assert_max_num_queries(2):
        assert have([first], many, rounds=1) == [150]
    have([first], PARTITIONS, rounds=2)
    assert PartitionLease.objects.count() == 6


@pytest.mark.parametrize("between", [0.5, 0.7])
def test_an_answer_that_came_too_late_is_not_gone_by(transactional_db, monkeypatch, between):
    """A worker that was stopped with its question on the way finds an old answer when it goes on."""
    now = 1000.0
    for module in (partition_sharing, leases):
        monkeypatch.setattr(module, "clock", lambda: now)
    one = DatabaseLeases("shop", "mailer", 10)
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


def test_who_has_another_session_releases_nothing_of_others(private_zookeeper):
    """As kazoo goes on by itself with another session after one that expired."""
    first, second = (ZooKeeperLeases("shop", "late", 60, private_zookeeper.hosts) for _ in range(2))
    first.join()
    try:
        have([first])
        second.join()
        first._client.delete(first._worker_path())
        for partition in PARTITIONS:
            first._client.delete(first._lease_path(partition))
        assert have([second]) == [6]
        with pytest.raises(LeasesLost):
            first.release(PARTITIONS[:1])
        assert have([second], rounds=1) == [6]
        second._client.delete(second._lease_path(PARTITIONS[0]))
        second.release(PARTITIONS[:1])
        second._client.delete(second._path + "/leases", recursive=True)
        with pytest.raises(LeasesLost):
            second.acquire(Plan([], PARTITIONS[:1], 1))
    finally:
        for one in (first, second):
            one.leave()


def test_the_leader_is_asked_whether_a_worker_is_there(private_zookeeper, monkeypatch):
    """Of several servers the one that is connected to may be cut off from the others, and know nothing of it."""
    one = ZooKeeperLeases("shop", "led", 60, private_zookeeper.hosts)
    one.join()
    one.renew()
    asked = one._client.handler.async_result()
    asked.set_exception(ConnectionLoss())
    monkeypatch.setattr(one._client, "sync_async", lambda path: asked)
    with pytest.raises(CoordinationUnavailable):
        one.renew()
    one.leave()


def test_a_database_that_is_away_is_said_to_be_away(transactional_db):
    def fail(*_):
        raise OperationalError("no route to host")

    first = DatabaseLeases("shop", "mailer", 10)
    first.join()
    with connection.execute_wrapper(fail):
        for ask in (first.renew, lambda: first.plan(PARTITIONS), first.join):
            with pytest.raises(CoordinationUnavailable, match="no route"):
                ask()
        first.leave()


def test_a_session_lasts_as_long_as_zookeeper_agrees_to(private_zookeeper):
    for asked, agreed in ((60, 4), (2, 2)):
        one = ZooKeeperLeases("shop", "mailer", asked, private_zookeeper.hosts)
        one.join()
        assert one.seconds == pytest.approx(agreed, abs=0.01)
        one.leave()


def test_a_zookeeper_that_is_away_is_said_to_be_away_however_long_leases_last(monkeypatch):
    monkeypatch.setattr(zookeeper, "MAX_JOIN_SECONDS", 0.5)
    one = ZooKeeperLeases("shop", "mailer", 3600, "127.0.0.1:1")
    with pytest.raises(CoordinationUnavailable):
        one.join()
    with pytest.raises(LeasesLost):
        one.renew()


def test_a_machine_without_zookeeper_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.zookeeper.JAR", tmp_path / "zookeeper.jar")
    with pytest.raises(StartError, match="apt-get install zookeeper"):
        PrivateZooKeeper()


# What a worker does with messages


@pytest.fixture
def database_store(transactional_db, settings):
    settings.ZOOKEEPER_HOSTS = ""


def put(queue, *bodies, partition=1):
    return [
        one.id for one in queues.post_all(queue, [MessageInput(str(body).encode(), None, partition) for body in bodies])
    ]


class Done:
    """A job that keeps the messages, and raises for those that are named."""

    def __init__(self, *bad):
        self.messages = []
        self.bad = bad

    def __call__(self, message, context):
        self.messages.append(message)
        if message.body.decode() in self.bad:
            raise LookupError(f"there is no {message.body.decode()}")

    def bodies(self, partition=None):
        return [one.body.decode() for one in self.messages if partition in (None, one.partition)]


def at_work(job, consumer="mailer", **options):
    return Worker(consumer, job, application="shop", **{"refresh_seconds": 0.05, "lease_seconds": 600, **options})


@contextmanager
def working(*workers):
    """Have these work in threads, and hand over at the end. What one raises is raised here."""
    raised = []

    def run(one):
        try:
            one.run()
        except Exception as error:
            raised.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(one,)) for one in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for one in workers:
            one.stop()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_messages_are_handled_in_order_and_how_far_is_recorded_at_the_end_for_whoever_comes_next(database_store):
    queue = queues.create("shop", "orders", partitions=2)
    last = [put(queue, *range(250), partition=number)[-1] for number in (1, 2)]
    job = Done()
    with working(at_work(job)):
        wait_until(lambda: len(job.messages) == 500)
    for number in (1, 2):
        assert job.bodies(number) == [str(body) for body in range(250)]
    assert queues.positions(queue, "mailer") == {1: last[0], 2: last[1]}
    put(queue, "new")
    again = Done()
    with working(at_work(again)):
        wait_until(lambda: again.messages)
    [message] = again.messages
    assert (message.body, message.queue, message.partition) == (b"new", "orders", 1)
    assert message.timestamp == ids.timestamp(message.id)


def test_the_context_is_around_the_work_and_what_it_gives_is_handed_to_job_and_failure(database_store):
    queue = queues.create("shop", "orders")
    put(queue, "good", "bad")
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

    with working(at_work(job, context=context, failure=failure)):
        wait_until(lambda: len(seen) == 4)
    assert seen == [
        "begin",
        ("job", b"good", "a connection"),
        ("job", b"bad", "a connection"),
        ("failure", b"bad", "a connection", "orders", "no"),
        "end",
    ]


def test_a_failure_is_logged_and_the_next_message_follows(database_store, caplog):
    put(queues.create("shop", "orders"), "1", "2", "3")
    job = Done("2")
    with working(at_work(job)):
        wait_until(lambda: len(job.messages) == 3)
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "partition 1 of queue 'orders' of 'shop'" in record.getMessage()
    assert "there is no 2" in record.getMessage()
    assert record.exc_info


def test_a_failure_is_kept_for_thirty_days_as_it_was_in_a_queue_that_is_not_worked_on(database_store, monkeypatch):
    orders = queues.create("shop", "orders")
    queues.post(orders, MessageInput(b"\xff\x00", content_type="image/png"))
    put(orders, "bad")
    job, ttls = Done("bad"), []
    push = type(store()).push
    monkeypatch.setattr(
        type(store()), "push", lambda self, queue, some: ttls.append(some[0].ttl) or push(self, queue, some)
    )

    def undecodable(message, context):
        job.messages.append(message)
        raise LookupError("no")

    with working(at_work(undecodable, failure=keep_failure)):
        wait_until(lambda: len(job.messages) == 2)
        wait_until(lambda: len(queues.queues("shop")) == 2)
        put(orders, "more")
        wait_until(lambda: len(job.messages) == 3)
    kept = queues.read(queues.find("shop", "errors")).messages
    assert [(one.body, one.content_type) for one in kept] == [(b"\xff\x00", "image/png"), (b"bad", ""), (b"more", "")]
    assert set(ttls) - {queues.DEFAULT_TTL_SECONDS} == {30 * 24 * 3600}
    assert {one.queue for one in job.messages} == {"orders"}


def test_a_message_whose_failure_could_not_be_kept_is_handled_again(database_store):
    queue = queues.create("shop", "orders")
    put(queue, "1", "bad", "3")
    job, failures = Done("bad"), []

    def failure(*_):
        failures.append(len(job.messages))
        if len(failures) < 3:
            raise StoreUnavailable("away")

    with working(at_work(job, failure=failure)):
        wait_until(lambda: "3" in job.bodies())
    assert job.bodies() == ["1", "bad", "bad", "bad", "3"]


def test_what_handles_failures_and_fails_ends_the_worker_before_that_message_and_others_have_its_share(database_store):
    queue = queues.create("shop", "orders")
    [first, *_] = put(queue, "1", "bad", "3")

    def failure(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        at_work(Done("bad"), failure=failure).run()
    assert not WorkerRow.objects.exists()
    assert queues.positions(queue, "mailer") == {1: first}


def test_a_failure_in_the_error_queue_is_not_kept_in_it_again(database_store):
    errors = queues.create("shop", "errors")
    put(errors, "bad", "2")
    job = Done("bad")
    with working(at_work(job, queues=["errors"], failure=keep_failure)):
        wait_until(lambda: len(job.messages) == 2)
    assert [one.body for one in queues.read(errors).messages] == [b"bad", b"2"]


def test_whatever_recording_raises_at_the_end_others_have_the_share_and_nothing_beats_on(database_store, monkeypatch):
    put(queues.create("shop", "orders"), "1")

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(type(store()), "advance_positions", fail)
    one = at_work(lambda *_: one.stop(), "thorough")
    with pytest.raises(ZeroDivisionError):
        one.run()
    assert not WorkerRow.objects.exists()
    assert "heartbeats of thorough" not in {thread.name for thread in threading.enumerate()}


def test_who_loses_what_it_held_again_and_again_tries_less_and_less_often(database_store, monkeypatch):
    queues.create("shop", "orders")
    waits = []

    def lose(self, planned):
        raise LeasesLost("no access")

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 9:
            one.stop()

    monkeypatch.setattr(DatabaseLeases, "acquire", lose)
    one = at_work(Done())
    monkeypatch.setattr(one, "_wait", wait)
    one.run()
    assert all(full / 2 <= wait <= full for full, wait in zip([0.05 * 2**n for n in range(8)], waits, strict=False))
    assert 5 <= waits[8] <= 10


def test_of_many_queues_a_look_reads_the_positions_of_some_in_turn(database_store, monkeypatch):
    monkeypatch.setattr(worker, "POSITIONS_PER_REFRESH", 3)
    for number in range(7):
        queues.create("shop", f"q{number}", partitions=2)
    one, read = at_work(Done()), []
    positions = type(store()).positions
    monkeypatch.setattr(
        type(store()), "positions", lambda self, queue, *rest: read.append(queue.name) or positions(self, queue, *rest)
    )
    one._coordination.join()
    one._refresh()
    assert sorted(read) == [f"q{number}" for number in range(7)]  # of what is new, all
    del read[:]
    for _ in range(3):
        one._refresh()
    assert Counter(read) == {f"q{number}": 2 if number in (3, 4) else 1 for number in range(7)}
    one._coordination.leave()


def test_what_is_held_is_handed_over_at_once_and_new_workers_queues_and_partitions_are_found(database_store):
    """With leases of ten minutes nothing goes from one to another but by being handed over."""
    orders = queues.create("shop", "orders", partitions=4)
    jobs = [Done(), Done()]
    first, second = (at_work(job) for job in jobs)

    def all_done():
        return sorted(one.body for job in jobs for one in job.messages)

    with working(first):
        wait_until(lambda: len(first.partitions) == 4)
        put(orders, "1")
        wait_until(lambda: len(all_done()) == 1)
        with working(second):
            wait_until(lambda: len(first.partitions) == len(second.partitions) == 2)
            for number in range(1, 5):
                put(orders, *range(10, 20), partition=number)
            wait_until(lambda: len(all_done()) == 41)
            orders = queues.update(orders, partitions=6)
            invoices = queues.create("shop", "invoices", partitions=2)
            wait_until(lambda: len(first.partitions) == len(second.partitions) == 4)
            put(orders, "2", partition=6)
            put(invoices, "3", partition=2)
            wait_until(lambda: len(all_done()) == 43)
        wait_until(lambda: len(first.partitions) == 8)
        put(orders, *range(20, 30), partition=2)
        wait_until(lambda: len(all_done()) == 53)
        store().remove("shop", "orders")
        again = queues.create("shop", "orders")
        wait_until(lambda: len(first.partitions) == 3)
        put(again, "4")
        wait_until(lambda: len(all_done()) == 54)
    assert len(all_done()) == 54  # nothing twice
    assert jobs[1].messages


@pytest.mark.parametrize(
    ("where", "then"),
    [
        (lambda given: {"1": given[4].hex}, ["5", "6", "7", "8", "9"]),
        (lambda given: {"1": given[9].hex}, []),
        (lambda given: None, [str(number) for number in range(10)]),
    ],
    ids=["back", "where it is", "removed"],
)
def test_a_worker_goes_on_from_where_its_position_was_set_meanwhile(database_store, monkeypatch, where, then):
    monkeypatch.setattr(worker, "RECORD_INTERVAL_SECONDS", 0.05)
    queue = queues.create("shop", "orders")
    given = put(queue, *range(10))
    job = Done()
    with working(at_work(job)):
        wait_until(lambda: queues.positions(queue, "mailer").get(1) == given[-1])
        if (at := where(given)) is None:
            queues.delete_positions(queue, "mailer")
        else:
            queues.set_positions(queue, "mailer", at)
        wait_until(lambda: len(job.messages) == 10 + len(then))
        put(queue, "new")
        wait_until(lambda: "new" in job.bodies())
    assert job.bodies()[10:] == [*then, "new"]


def test_messages_before_a_position_that_was_set_forward_are_left_out_also_of_what_was_read_already(database_store):
    queue = queues.create("shop", "orders")
    given = put(queue, *range(50))
    seen = []

    def job(message, context):
        seen.append(message.body.decode())
        if message.body == b"3":
            queues.set_positions(queue, "mailer", {"1": given[40].hex})
            wait_until(lambda: partition_sharing.clock() > one._refresh_at)  # the next look is due

    one = at_work(job)
    with working(one):
        wait_until(lambda: "49" in seen)
    assert seen == [str(number) for number in [*range(4), *range(41, 50)]]


def test_a_position_is_moved_only_from_where_it_was_known(database_store):
    queue = queues.create("shop", "orders", partitions=3)
    a, b, c = put(queue, 1, 2, 3)
    used = store()
    assert used.advance_positions(queue, "mailer", {1: (None, a), 2: (None, a)}) == {1, 2}
    assert used.advance_positions(queue, "mailer", {1: (b, c), 2: (a, b), 3: (None, c)}) == {2, 3}
    assert used.advance_positions(queue, "mailer", {1: (None, c), 3: (b, a)}) == set()
    assert queues.positions(queue, "mailer") == {1: a, 2: b, 3: c}
    assert used.advance_positions(queue, "mailer", {}) == set()


class Fragile(DatabaseStore):
    """A store that is away when told so, and one whose messages aren't to be shown at once."""

    away = False
    delay = 0

    def read(self, *args, **options):
        if Fragile.away:
            raise StoreUnavailable("no route to host")
        return super().read(*args, **options)


def test_a_store_that_is_away_is_waited_for_and_its_delay_obeyed(transactional_db, settings, caplog, monkeypatch):
    monkeypatch.setitem(STORES, "fragile", f"{__name__}.Fragile")
    settings.MESSAGE_STORE = "fragile"
    settings.ZOOKEEPER_HOSTS = ""
    monkeypatch.setattr(worker, "MAX_POLL_SECONDS", 0.1)
    queue = queues.create("shop", "orders")
    job = Done()
    monkeypatch.setattr(Fragile, "away", True)
    monkeypatch.setattr(Fragile, "delay", 3600)
    put(queue, "1")
    one = at_work(job)
    with working(one):
        wait_until(lambda: one._failures > 2)
        assert one.partitions == [Partition("shop", "orders", 1)]
        Fragile.away = False
        wait_until(lambda: not one._failures)
        wait_until(lambda: one._leased[one.partitions[0]].wait == 0.1)
        assert job.messages == []
        Fragile.delay = 0
        wait_until(lambda: job.messages)
    assert [record.getMessage() for record in caplog.records if record.name == worker.__name__] == [
        "The worker waits: no route to host",
        "The worker continues.",
    ]


def test_with_nothing_to_do_it_waits_twice_as_long_each_time_up_to_a_bound(database_store):
    queue = queues.create("shop", "orders")
    one = at_work(Done())
    held = worker._LeasedPartition(queue, 1, None, None)
    waits = []
    for number in range(11):
        if number == 9:
            one._leased = dict.fromkeys(range(2000), held)  # so many that they are read less often
        now = partition_sharing.clock()
        assert not one._handle_batch(PARTITIONS[0], held, None)
        assert held.wait / 2 <= held.due - now
        assert held.due - partition_sharing.clock() <= held.wait
        waits.append(held.wait)
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 4, 4])


# The command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tests.working.handle"], "is not of the form MODULE:FUNCTION"),
        (["tests.nowhere:handle"], "No module named 'tests.nowhere'"),
        (["tests.working:NOTES"], "is not a function"),
        (["tests.working:handle", "--context", "tests.working:none"], "can't be imported"),
        (["tests.working:handle", "--failure", "mail"], "is not of the form MODULE:FUNCTION"),
        (["tests.working:handle", "--batch", "0"], "--batch must be from 1 to 1000"),
        (["tests.working:handle", "--lease", "0.1"], "--lease must be from 1"),
        (["tests.working:handle", "--queue", "a/b"], "--queue: "),
        (["tests.working:handle", "--consumer", "x" * 51], "--consumer: Longer than maximum length 50"),
        (["tests.working:handle", "--application", "shpo"], "application shpo does not exist"),
        (["tests.working:handle"], "ZOOKEEPER_HOSTS is malformed"),
    ],
)
def test_what_the_command_can_not_use_it_says_and_ends_with_code_2(transactional_db, settings, arguments, said):
    Application.objects.create(name="shop")
    settings.ZOOKEEPER_HOSTS = "127.0.0.1:port"
    with pytest.raises(CommandError, match=said) as raised:
        call_command("work_store", *arguments[:1], "--application", "shop", *arguments[1:])
    assert raised.value.returncode == 2


# The guide, docs/message-store-workers.md

GUIDE = (PROJECT / "docs" / "message-store-workers.md").read_text()


def test_the_worker_of_the_guide_prints_what_is_posted_and_ends_by_a_signal(database_store):
    [command] = re.findall(r"^    \.venv/bin/python (manage\.py .*)$", GUIDE, re.MULTILINE)
    Application.objects.create(name="shop")
    queue = queues.create("shop", "orders")
    [last] = put(queue, "a book")
    environment = {**os.environ, "DATABASE_URL": database_url(), "ZOOKEEPER_HOSTS": ""}
    process = subprocess.Popen(
        [sys.executable, *shlex.split(command)], cwd=PROJECT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "orders 1 a book\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert queues.positions(queue, "send") == {1: last}
    assert not WorkerRow.objects.exists()


def test_the_guide_names_each_option_of_the_command():
    parser = ArgumentParser()
    Command().add_arguments(parser)
    options = {action.option_strings[0] for action in parser._actions if action.option_strings} - {"-h"}
    assert set(re.findall(r"^\| `(--[a-z]+) ", GUIDE, re.MULTILINE)) == options


# Processes


def database_url():
    database = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{database['NAME']}"
    return "postgres://{USER}:{PASSWORD}@{HOST}:{PORT}/{NAME}".format(**database)


class Processes:
    """Worker processes with their logs, and what they noted of each message."""

    def __init__(self, directory, **environment):
        self.directory = directory
        self.notes = directory / "notes"
        self.notes.touch()
        self.environment = {
            **os.environ,
            "DATABASE_URL": database_url(),
            "WORKING_NOTES": str(self.notes),
            **environment,
        }
        self.started = []

    def start(self, **environment):
        with (self.directory / f"log{len(self.started)}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "manage.py", "work_store", "tests.working:handle", "--application", "shop",
                 "--lease", "2", "--batch", "10"],
                cwd=PROJECT, env={**self.environment, **environment}, stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(process)
        return process

    def log(self, process):
        return (self.directory / f"log{self.started.index(process)}").read_text()

    def read(self):
        """Return what was noted, in the order in which it happened."""
        lines = self.notes.read_text().splitlines()
        return sorted(map(tuple, map(json.loads, lines)), key=lambda one: one[-1])

    def done(self):
        """Return what was handled: process, partition and body."""
        return [tuple(rest[:3]) for what, *rest in self.read() if what == "end"]

    def shares(self):
        """Return how many partitions each process was the last to begin a message of, by its number here."""
        latest = {partition: pid for what, pid, partition, *_ in self.read() if what == "begin"}
        counted = Counter(latest.values())
        return [counted[process.pid] for process in self.started]


def check(notes, lost):
    """Make sure that in each partition messages were handled in order, by one process at a time, none left out.

    ``lost``: the processes that were killed or lost what they held. What they had begun may be done again.
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


@pytest.mark.parametrize("kept_by", ["database", pytest.param("zookeeper", marks=pytest.mark.soak)])
def test_of_three_workers_one_is_killed_and_one_cut_off_and_each_partition_is_still_one_workers(
    database_store, request, tmp_path, kept_by
):
    """Cut off from the database is: stopped for longer than its lease. It goes on as if nothing had happened, then."""
    Application.objects.create(name="shop")
    queue = queues.create("shop", "orders", partitions=6)
    posted = Counter()

    def feed():
        """See to it that each partition has something to do, and return who has how many of them."""
        done = Counter(partition for _, partition, _ in processes.done())
        for number in range(1, 7):
            if posted[number] - done[number] < 5:
                put(queue, *range(posted[number], posted[number] + 5), partition=number)
                posted[number] += 5
        return processes.shares()

    hosts = request.getfixturevalue("private_zookeeper").hosts if kept_by == "zookeeper" else ""
    processes = Processes(tmp_path, ZOOKEEPER_HOSTS=hosts)
    proxy, stop = Proxy.before(f"http://{hosts or 'nowhere:1'}"), tmp_path / "stop"
    apart = {"ZOOKEEPER_HOSTS": f"127.0.0.1:{proxy.port}"} if hosts else {"WORKING_STOP": str(stop)}
    try:
        killed, cut, third = processes.start(), processes.start(**apart), processes.start()
        with proxy:
            wait_until(lambda: feed() == [2, 2, 2], 60)
            killed.kill()
            if kept_by == "database":
                stop.touch()
            else:
                proxy.close_next(10**6)
            wait_until(lambda: feed() == [0, 0, 6], 60)
            if kept_by == "database":
                cut.send_signal(signal.SIGCONT)
            else:
                proxy.forward()
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
    notes = processes.read()
    check(notes, {one.pid for one in processes.started if "rejoins" in processes.log(one)} | {killed.pid})
    recorded = queues.positions(queue, "handle")
    for number in range(1, 7):
        handled = {body for _, partition, body in processes.done() if partition == number}
        assert handled == set(range(len(handled)))
        [message] = queues.read_ids(queue, [MessageRef(recorded[number], number)]).messages
        assert int(message.body) == [body for what, _, of, body, _ in notes if (what, of) == ("begin", number)][-1]
    assert not WorkerRow.objects.exists()
