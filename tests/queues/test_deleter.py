"""The deleter on a real broker: fair between owners, never in the way of a pass, and finished once."""

import threading
import time
from datetime import timedelta

import pytest
from celery import signals
from django.db import connections
from django.utils import timezone

from accounts.models import PulseUser
from core import leases
from notifications import claims
from notifications.models import Notification
from queues import tasks
from queues.guard import deleter, monitor, once
from queues.guard.deleter_threads import keep_connection
from queues.guard.destroying import InUse, Target
from queues.models import Archive, Queue, QueueEvent, Watch
from rabbit.fetching import Fetch
from tests.support.faults import once_after, once_before
from tests.support.toolbox import call_before, calling_first, queue_events, queue_names, sent, wait_until

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def users(guarded, alice, bob):
    """Return a function that creates Pulse users of an owner."""

    def create(owner, *names):
        for name in names:
            PulseUser.objects.create(username=name, ready=True).owners.add(owner)

    return create


@pytest.fixture
def four(settings):
    settings.GUARDIAN_DELETERS = 4


@pytest.fixture
def slow_archives(monkeypatch):
    """Make the archive of each of Alice's queues take three seconds."""
    store = deleter.destroying.store_batch

    def store_slowly(archive, batch):
        if archive.queue_name.startswith("queue/alice"):
            time.sleep(3)
        store(archive, batch)

    monkeypatch.setattr(deleter.destroying, "store_batch", store_slowly)


def running():
    """Run the deleter in a thread, and return the thread."""

    def run():
        deleter.run()
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_one_owners_slow_queues_delay_neither_passes_nor_another_owners_deletion(
    users, alice, bob, amqp, four, slow_archives, settings, monkeypatch
):
    monkeypatch.setattr(deleter, "ROUND_SECONDS", 1)  # so that rounds end before their archives
    users(alice, *(f"alice-{number}" for number in range(6)))
    users(bob, "bob")
    settings.GUARDIAN_DELETE_BRAKE = 100
    for number in range(18):
        amqp.queue(f"queue/alice-{number % 6}/{number}", 12)
    assert len(monitor.run_pass().decided) == 18
    thread = running()
    wait_until(lambda: Archive.objects.exists())
    amqp.queue("queue/bob/builds", 11)
    report = monitor.run_pass()
    assert (len(report.decided), report.errors, report.seconds < 5) == (1, [], True)
    began = time.monotonic()
    wait_until(lambda: Queue.objects.get(name="queue/bob/builds").state == "gone")
    assert time.monotonic() - began < 8
    wait_until(lambda: any(one.kind == "deletion" and one.recipient == bob.email for one in claims.claim(100)))
    assert Queue.objects.filter(state="deleting").exists()
    thread.join()
    assert Archive.objects.filter(state="kept").count() == 19


def test_deletions_that_wait_count_for_the_brake_and_do_not_make_it_wider(users, alice, bob, amqp, settings):
    users(alice, "alice")
    users(bob, "bob")
    settings.GUARDIAN_DELETE_BRAKE = 4
    for number in range(3):
        amqp.queue(f"queue/alice/{number}", 11)
    assert len(monitor.run_pass().decided) == 3
    for number in range(3, 5):
        amqp.queue(f"queue/alice/{number}", 11)
    amqp.queue("queue/bob/builds", 11)
    report = monitor.run_pass()
    assert (len(report.decided), report.brake_held) == (1, True)
    assert dict(Queue.objects.exclude(block_reason="").values_list("name", "block_reason")) == {
        "queue/alice/3": "brake",
        "queue/alice/4": "brake",
    }
    for name in ("one", "two"):
        amqp.queue(f"queue/bob/{name}", 11)
    assert len(monitor.run_pass().decided) == 0  # as many of bob's as wait of alice's


def test_a_blocked_queue_whose_limit_is_raised_is_no_longer_blocked(users, alice, amqp, settings):
    users(alice, "alice")
    settings.GUARDIAN_DELETE_BRAKE = 1
    for number in range(2):
        amqp.queue(f"queue/alice/{number}", 11)
    assert once.run_once().brake_held
    Queue.objects.filter(name="queue/alice/0").update(max_length=20)
    once.run_once()
    assert dict(Queue.objects.values_list("name", "block_reason")) == {"queue/alice/0": "", "queue/alice/1": "brake"}


def test_a_deletion_says_how_long_the_queue_was_when_it_was_deleted(amqp, guarded):
    amqp.queue("queue/alice/builds", 11)
    monitor.run_pass()
    amqp.queue("queue/alice/builds", 3)
    deleter.run()
    assert QueueEvent.objects.get(kind="deleted").details["length"] == 14


@pytest.mark.parametrize("another", [{"cluster": "another"}, {"nodes": ["rabbit@elsewhere"]}], ids=str)
def test_a_decision_about_another_broker_is_taken_back(amqp, guarded, another):
    amqp.queue("queue/alice/builds", 11)
    monitor.run_pass()
    Watch.objects.update(**another)
    assert deleter.run().deleted == 0
    monitor.run_pass()
    queue = Queue.objects.get()
    assert (queue.state, queue.block_reason) == ("warned", "settings")


def test_a_queue_whose_pulse_user_is_adopted_while_it_waits_is_judged_anew_as_theirs(users, alice, amqp):
    amqp.queue("queue/alice/builds", 11)
    monitor.run_pass()
    users(alice, "alice")
    PulseUser.objects.update(max_length=20)
    monitor.run_pass()
    queue = Queue.objects.get()
    assert (queue.state, queue.pulse_user, deleter.run().deleted) == ("warned", PulseUser.objects.get(), 0)


def test_the_command_waits_for_a_deleter_that_runs_elsewhere_and_reports_the_rest_as_pending(
    amqp, guarded, monkeypatch
):
    monkeypatch.setattr(once, "WAIT_SECONDS", 1)
    amqp.queue("a", 11)
    with leases.lease(deleter.LEASE):
        report = once.run_once()
    assert (report.deleted, report.pending) == (0, 1)
    monkeypatch.setattr(once, "WAIT_SECONDS", 20)
    amqp.queue("b", 11)
    with leases.lease(deleter.LEASE) as lease:
        elsewhere = threading.Timer(1, lambda: (lease.release(), running()))
        elsewhere.start()
        report = once.run_once()
    assert (report.deleted, report.pending) == (1, 0)


def test_a_full_vhost_is_guarded_by_the_connection_that_the_deleter_keeps(amqp, guarded, management, four):
    tasks.delete_queues()
    for name in ("a", "b", "c"):
        amqp.queue(name, 11)
    management._put("vhost-limits", guarded, "max-connections", json={"value": 1})
    try:
        monitor.run_pass()
        outcome = deleter.run()
    finally:
        management._delete("vhost-limits", guarded, "max-connections")
    assert (outcome.deleted, outcome.errors) == (3, [])


def test_a_kept_connection_is_closed_when_the_address_leads_to_another_cluster(amqp, guarded):
    monitor.run_pass()
    [session] = keep_connection()._idle
    assert keep_connection()._idle == [session]
    Watch.objects.update(cluster="another")
    assert keep_connection()._idle != [session]
    assert not session.is_connected


def test_slow_facts_about_one_queue_delay_no_other_deletion(users, alice, bob, amqp, four, monkeypatch):
    users(alice, "alice")
    users(bob, "bob")
    gather, is_gathering, answer = deleter._gather, threading.Event(), threading.Event()

    def gather_slowly(queues):
        if queues[0].name == "queue/bob/builds":
            is_gathering.set()
            answer.wait(20)
        return gather(queues)

    store = deleter.destroying.store_batch

    def store_slowly(archive, batch):
        is_gathering.wait(20)
        store(archive, batch)

    monkeypatch.setattr(deleter, "_gather", gather_slowly)
    monkeypatch.setattr(deleter.destroying, "store_batch", store_slowly)
    amqp.queue("queue/alice/builds", 11)
    monitor.run_pass()
    thread = running()
    wait_until(lambda: Archive.objects.exists())
    amqp.queue("queue/bob/builds", 11)
    monitor.run_pass()
    wait_until(lambda: Queue.objects.get(name="queue/alice/builds").state == "gone")
    assert Queue.objects.get(name="queue/bob/builds").state == "deleting"
    answer.set()
    thread.join()
    assert Queue.objects.get(name="queue/bob/builds").state == "gone"


def test_a_worker_that_stops_begins_no_more_deletions(amqp, guarded, monkeypatch):
    def stop():
        signals.worker_shutting_down.send("worker", sig="SIGTERM", how="Warm", exitcode=0)

    monkeypatch.setattr(tasks, "_is_stopping", bytearray(1))
    once_before(monkeypatch, "the first batch", stop)
    for name in ("a", "b"):
        amqp.queue(name, 11)
    monitor.run_pass()
    for _ in range(2):
        tasks.delete_queues()
    assert dict(Queue.objects.values_list("name", "state")) == {"a": "gone", "b": "deleting"}


def test_no_warning_is_sent_while_an_owner_purges_the_queue(users, alice, amqp, guarded):
    users(alice, "alice")
    amqp.queue("queue/alice/builds", 11)
    monitor.run_pass()
    target = Target(guarded, "queue/alice/builds", "classic", Archive.Reason.PURGED)
    with deleter.destroying.lock_messages(target.vhost, target.name):
        assert deleter.run().deleted == 0
    assert (sent("alice@example.org"), Queue.objects.get().state) == ([], "deleting")
    assert deleter.run().deleted == 1


def test_operators_are_notified_once_of_deletions_that_are_late(amqp, guarded, settings):
    amqp.queue("a", 11)
    monitor.run_pass()
    Queue.objects.update(decided_at=timezone.now() - timedelta(seconds=61))
    for _ in range(2):
        monitor.run_pass()
    assert sent("ops@example.org") == ["late"]
    assert Notification.objects.get().facts["running"] is False
    assert deleter.run().deleted == 1
    monitor.run_pass()
    assert Watch.objects.get().late_since is None


def test_a_deletion_that_could_not_begin_is_tried_again_in_the_next_round(amqp, guarded, monkeypatch):
    def refuse():
        raise InUse("another request moves its messages")

    monkeypatch.setattr(deleter, "ROUND_SECONDS", -1)
    amqp.queue("a", 11)
    monitor.run_pass()
    call_before(monkeypatch, deleter.destroying, "delete_queue", refuse)
    assert deleter.run().deleted == 1


def test_refusals_are_over_only_when_all_deletions_were_tried(amqp, guarded, settings, monkeypatch):
    settings.GUARDIAN_DELETERS = 1
    monkeypatch.setattr(deleter, "ROUND_SECONDS", -1)
    for name in ("a", "b"):
        amqp.queue(name, 11)
    monitor.run_pass()
    Watch.objects.update(refused_since=timezone.now())
    since = []
    with calling_first(Fetch, "delete_queue", lambda: since.append(Watch.objects.get().refused_since)):
        assert deleter.run().deleted == 2
    assert None not in since
    assert Watch.objects.get().refused_since is None


@pytest.mark.parametrize(("seen", "why_not"), [(0, deleter.WAITED), (59, "")], ids=["it runs", "it was killed"])
def test_a_queue_with_twice_its_limit_that_has_waited_for_a_running_deleter_is_deleted_without_a_copy(
    amqp, guarded, seen, why_not
):
    amqp.queue("a", 21)
    monitor.run_pass()
    now = timezone.now()
    before = now - timedelta(minutes=2)
    Queue.objects.update(decided_at=before)
    Watch.objects.update(deleter_since=before, deleter_seen_at=now - timedelta(seconds=seen))
    assert deleter.run().deleted == 1
    assert QueueEvent.objects.get(kind="deleted").details["why_not_archived"] == why_not


def test_a_list_that_was_begun_before_an_outcome_says_nothing(amqp, guarded, monkeypatch, management):
    amqp.queue("a", 11)
    monitor.run_pass()
    outcomes = []
    once_after(monkeypatch, "the list", lambda: outcomes.append(deleter.run().deleted))
    monitor.run_pass()
    assert (outcomes, Queue.objects.get().state, queue_events("a")) == ([1], "gone", ["condemned", "deleted"])
    assert queue_names(management, guarded) == set()


def test_a_queue_that_takes_long_is_not_deleted_by_a_limit_that_was_raised_meanwhile(
    users, alice, amqp, guarded, monkeypatch
):
    users(alice, "alice")
    amqp.queue("queue/alice/builds", 11)
    once_before(monkeypatch, "the first batch", lambda: Queue.objects.update(max_length=20))
    report = once.run_once()
    assert (report.deleted, report.kept, amqp.ready("queue/alice/builds")) == (0, 1, 11)
    assert not Archive.objects.exists()
