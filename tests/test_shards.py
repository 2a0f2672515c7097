"""Passes sharded by vhost: none beside another, one budget for deletions, one message about the broker."""

import json
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import connection
from django.utils import timezone
from pika.exceptions import AMQPError

from accounts.models import AuditEntry, Owner
from benchmarks.passes import counted_requests
from queues import brake, lease, monitor, pruning, shards, tasks
from queues.deletion import Deletion
from queues.models import Lease, Notification, Pass, Queue, QueueEvent, Shard, Watch
from rabbit.management import BrokerAway, Management, NotThere
from rabbit.names import readable
from tests.conftest import Amqp
from tests.test_commands import ROOT, run, start, wait_until


@pytest.fixture
def vhosts(guarded, settings, management):
    """Guard three vhosts, the first of them the one that Pulse users have their queues in, each by itself."""
    names = [guarded, *(f"test-{uuid.uuid4().hex[:12]}-{end}" for end in ("b/ü'\n", 'c"%'))]
    for name in names[1:]:
        management.make_vhost(name)
    settings.GUARDIAN_VHOSTS = names
    settings.GUARDIAN_SHARD_BY_VHOST = True
    yield names
    for name in names[1:]:
        management.delete_vhost(name)


@pytest.fixture
def fill(vhosts, broker):
    """Put queues of this length into the vhost of this number, so many."""
    opened = {}

    def put(number, queues, messages, prefix="q"):
        amqp = opened.setdefault(number, Amqp(broker.amqp_url, vhosts[number]))
        for one in range(queues):
            amqp.queue(f"{prefix}{one}", messages)

    yield put
    for amqp in opened.values():
        with suppress(AMQPError):  # its vhost may have been deleted
            amqp.connection.close()


@pytest.fixture
def operator(db):
    return Owner.objects.create_user("olga@example.org", vouched=True, is_staff=True)


def run_round():
    return [monitor.run_shard(vhost) for vhost in shards.begin_round().vhosts]


def told():
    return list(Notification.objects.filter(queue=None).order_by("id").values_list("kind", flat=True))


def queues_on(management, vhosts):
    return sum(len(management.list_queues(vhost, {"columns": "name"})) for vhost in vhosts)


def at_once(*calls):
    """Call these at the same time, and return what they returned."""
    begin = threading.Barrier(len(calls))
    returned = []

    def run(call):
        begin.wait()
        try:
            returned.append(call())
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(returned) == len(calls)
    return returned


def test_the_shards_of_a_round_do_together_what_a_pass_over_the_whole_broker_does(vhosts, fill, management):
    fill(0, 2, 1)
    fill(1, 1, 6)
    fill(2, 1, 11)
    reports = {report.vhost: report for report in run_round()}
    assert reports.keys() == set(vhosts)
    assert [reports[vhost].queues for vhost in vhosts] == [2, 1, 1]
    assert [(reports[vhost].warned, reports[vhost].deleted) for vhost in vhosts] == [(0, 0), (1, 0), (0, 1)]
    assert sorted(Queue.objects.values_list("vhost", "state")) == sorted(
        [(vhosts[0], "ok"), (vhosts[0], "ok"), (vhosts[1], "warned"), (vhosts[2], "gone")]
    )
    assert set(Pass.objects.values_list("vhost", flat=True)) == set(vhosts)
    assert queues_on(management, vhosts) == 3
    assert not any(report.errors for report in run_round())


@pytest.fixture
def intervals(monkeypatch):
    """Record from when to when each pass was at it, as (vhost, begin, end)."""
    recall, file, begun, recorded = monitor._recall, monitor.file, {}, []

    def note_begin(vhost, held):
        watch = recall(vhost, held)
        begun[threading.get_ident()] = time.monotonic()
        return watch

    def note_end(report):
        recorded.append((report.vhost, begun[threading.get_ident()], time.monotonic()))
        file(report)

    monkeypatch.setattr(monitor, "_recall", note_begin)
    monkeypatch.setattr(monitor, "file", note_end)
    return recorded


def test_no_shard_runs_beside_itself_or_beside_a_pass_over_the_whole_broker(vhosts, fill, intervals):
    for number in range(3):
        fill(number, 5, 11)
    shards.begin_round()
    several = [lambda vhost=vhost: monitor.run_shard(vhost) for vhost in vhosts for _ in range(3)]
    ten = [lambda: monitor.run_shard(vhosts[0]) for _ in range(10)]
    reports = at_once(*several, *ten, monitor.run_pass, monitor.run_pass)
    assert sum(report.deleted for report in reports) == 15
    assert QueueEvent.objects.filter(kind="deleted").count() == 15
    assert len(intervals) == sum(not report.another_pass for report in reports)
    assert "" in {vhost for vhost, _, _ in intervals}
    for number, (one, one_begins, one_ends) in enumerate(intervals):
        for other, other_begins, other_ends in intervals[:number]:
            if one == other or "" in (one, other):
                assert one_ends <= other_begins or other_ends <= one_begins


def test_shards_of_different_vhosts_run_beside_each_other(vhosts, monkeypatch):
    shards.begin_round()
    take, all_there = monitor.snapshot.take, threading.Barrier(len(vhosts), timeout=20)

    def wait_for_all(*arguments):
        all_there.wait()
        return take(*arguments)

    monkeypatch.setattr(monitor.snapshot, "take", wait_for_all)
    reports = at_once(*(lambda vhost=vhost: monitor.run_shard(vhost) for vhost in vhosts))
    assert [report.another_pass for report in reports] == [False] * 3


def test_a_pass_over_the_whole_broker_waits_for_a_shard_and_no_other_shard_begins_meanwhile(vhosts):
    with lease.lease(f"{monitor.SHARD_LEASES}{vhosts[0]}"):
        whole = threading.Thread(target=lambda: at_once(monitor.run_pass))
        whole.start()
        wait_until(lambda: Lease.objects.filter(lease.is_held(), name=monitor.LEASE).exists())
        assert monitor.run_shard(vhosts[1]).another_pass
        assert not Pass.objects.exists()
    whole.join()
    assert list(Pass.objects.values_list("vhost", flat=True)) == [""]


def test_a_pass_over_the_whole_broker_waits_no_longer_than_it_should_and_says_so(vhosts, monkeypatch):
    monkeypatch.setattr(monitor, "WAIT_FOR_SHARDS_SECONDS", 0.3)
    with lease.lease(f"{monitor.SHARD_LEASES}{vhosts[0]}"):
        report = monitor.run_pass()
        assert (report.another_pass, ["try again" in error for error in report.errors]) == (True, [True])
        with pytest.raises(SystemExit, match="1"):
            call_command("monitor_queues", "--once", "--force")
    assert not monitor.run_pass().another_pass


def test_a_shard_gives_way_between_two_batches_to_a_pass_over_the_whole_broker(vhosts, fill, monkeypatch, management):
    fill(0, 3, 11)
    monkeypatch.setattr("queues.deletion.BATCH", 1)
    look_again, whole = Deletion.look_again, []

    def wait(self, condemned, **how):
        if not whole:
            whole.append(threading.Thread(target=lambda: at_once(monitor.run_pass)))
            whole[0].start()
            wait_until(lambda: Lease.objects.filter(lease.is_held(), name=monitor.LEASE).exists())
        return look_again(self, condemned, **how)

    monkeypatch.setattr(Deletion, "look_again", wait)
    report = monitor.run_shard(vhosts[0])
    whole[0].join()
    assert (report.deleted, report.errors) == (
        1,
        ["gave way to a pass over the whole broker, which goes on with 2 queues"],
    )
    assert Pass.objects.get(vhost="").deleted == 2
    assert queues_on(management, vhosts) == 0


def test_a_lease_that_a_killed_shard_left_keeps_nobody_waiting_once_it_has_run_out(vhosts):
    past = timezone.now() - timedelta(seconds=1)
    Lease.objects.create(name=f"{monitor.SHARD_LEASES}{vhosts[0]}", holder=uuid.uuid4(), expires_at=past)
    assert not monitor.run_pass().another_pass
    assert not monitor.run_shard(vhosts[0]).another_pass


# The one budget


def test_shards_that_are_together_over_the_limit_are_held_and_stay_so(vhosts, fill, settings, management):
    settings.GUARDIAN_DELETE_BRAKE = 5
    for number in range(3):
        fill(number, 3, 11)
    reports = run_round()
    assert [(report.deleted, report.brake_held) for report in reports] == [(3, False), (0, True), (0, True)]
    for _ in range(3):
        reports = run_round()
        assert sum(report.deleted for report in reports) == 0
        assert sum(report.brake_held for report in reports) == 2
    assert queues_on(management, vhosts) == 6
    assert told().count("brake") == 1
    facts = Notification.objects.get(kind="brake").facts
    assert (facts["count"], facts["already"]) == (3, 3)
    stands = brake.brake()
    assert (stands.queues, stands.released, stands.since is not None) == (6, 0, True)


def test_several_shards_at_once_take_no_more_than_the_budget(vhosts, fill, settings, management):
    settings.GUARDIAN_DELETE_BRAKE = 7
    for number in range(3):
        fill(number, 3, 11)
    shards.begin_round()
    reports = at_once(*(lambda vhost=vhost: monitor.run_shard(vhost) for vhost in vhosts))
    assert sorted(report.deleted for report in reports) == [0, 3, 3]
    assert queues_on(management, vhosts) == 3


def test_the_limit_is_by_all_queues_that_are_known(vhosts, fill, settings, monkeypatch):
    settings.GUARDIAN_DELETE_BRAKE = 0
    fill(0, 9, 1)
    fill(1, 3, 1)
    run_round()
    fill(1, 3, 11)
    assert sum(report.deleted for report in run_round()) == 3  # a quarter of twelve, and all of that vhost


def test_a_new_round_has_a_new_budget_and_begins_when_all_have_decided(vhosts, fill, settings):
    settings.GUARDIAN_DELETE_BRAKE = 4
    fill(0, 3, 11)
    begun = shards.begin_round()
    monitor.run_shard(vhosts[0])
    assert Watch.objects.get().round == 1
    shards.begin_round()
    assert Watch.objects.get().round == 1
    fill(0, 2, 11)
    assert monitor.run_shard(vhosts[0]).brake_held
    Queue.objects.update(unbounded=True)
    for vhost in begun.vhosts:
        monitor.run_shard(vhost)
    shards.begin_round()
    assert (Watch.objects.get().round, brake.brake()) == (2, brake.Brake())
    Queue.objects.update(unbounded=False)
    assert monitor.run_shard(vhosts[0]).deleted == 2


def test_a_round_that_a_shard_never_decides_in_ends_by_itself(vhosts):
    shards.begin_round()
    Watch.objects.update(round_at=timezone.now() - shards.ROUND_LASTS)
    shards.begin_round()
    assert Watch.objects.get().round == 2


class Killed(BaseException):
    """As sudden as SIGKILL, for this process."""


@pytest.mark.parametrize("step", ["the decision", "the deletion"])
def test_a_shard_that_is_killed_neither_loses_nor_doubles_what_it_took(
    vhosts, fill, settings, monkeypatch, management, step
):
    settings.GUARDIAN_DELETE_BRAKE = 5
    fill(0, 3, 11)
    fill(1, 2, 11)
    shards.begin_round()

    def die(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch:
        if step == "the decision":
            patch.setattr(monitor, "_remember_shard", die)
        else:
            patch.setattr(Deletion, "carry_out", die)
        with pytest.raises(Killed):
            monitor.run_shard(vhosts[0])
    assert Shard.objects.get(vhost=vhosts[0]).reserved == (0 if step == "the decision" else 3)
    assert monitor.run_shard(vhosts[0]).deleted == 3
    assert Shard.objects.get(vhost=vhosts[0]).reserved == 3
    assert monitor.run_shard(vhosts[1]).deleted == 2
    fill(2, 1, 11)
    assert monitor.run_shard(vhosts[2]).brake_held
    assert queues_on(management, vhosts) == 1


def test_what_a_pass_over_the_whole_broker_keeps_no_shard_takes_for_its_own_few(vhosts, fill, settings, management):
    settings.GUARDIAN_DELETE_BRAKE = 5
    for number in range(3):
        fill(number, 2, 11)
    assert monitor.run_pass().brake_held
    assert all(report.brake_held for report in run_round())
    assert queues_on(management, vhosts) == 6
    assert told().count("brake") == 1
    assert monitor.run_pass(force=True).deleted == 6
    assert brake.brake() == brake.Brake()
    assert not any(report.brake_held for report in run_round())


def test_what_went_in_this_round_counts_as_seen(vhosts, fill, settings):
    settings.GUARDIAN_DELETE_BRAKE = 0
    fill(2, 18, 1)
    run_round()
    fill(0, 4, 11)
    fill(1, 2, 11)
    shards.begin_round()
    reports = [monitor.run_shard(vhost) for vhost in (vhosts[2], *vhosts[:2])]
    assert [(report.deleted, report.brake_held) for report in reports] == [(0, False), (4, False), (2, False)]


def test_a_pass_over_the_whole_broker_deletes_nothing_that_the_brake_keeps_beside_what_shards_took(
    vhosts, fill, settings, management
):
    settings.GUARDIAN_DELETE_BRAKE = 3
    fill(0, 3, 11)
    fill(1, 3, 11)
    shards.begin_round()
    assert [(report.deleted, report.brake_held) for report in map(monitor.run_shard, vhosts[:2])] == [
        (3, False),
        (0, True),
    ]
    for _ in range(2):
        report = monitor.run_pass()
        assert (report.deleted, report.brake_held) == (0, True)
    assert queues_on(management, vhosts) == 3


def test_a_brake_that_keeps_nothing_does_not_hold(vhosts, fill, settings):
    run_round()
    Watch.objects.update(brake_since=timezone.now(), braked=0)
    run_round()
    assert brake.brake() == brake.Brake()
    settings.GUARDIAN_DELETE_BRAKE = 1
    fill(0, 2, 11)
    assert [report.brake_held for report in run_round()].count(True) == 1
    assert told() == ["brake"]


# The brake's release


def these(*pairs):
    """Name the first queues of each of these vhosts, as many as are said beside it."""
    return [(vhost, f"q{number}") for vhost, queues in pairs for number in range(queues)]


def test_a_release_lets_all_shards_delete_what_it_names_and_once(vhosts, fill, settings, operator, management):
    settings.GUARDIAN_DELETE_BRAKE = 1
    for number in range(3):
        fill(number, 2, 11)
    run_round()
    brake.release_brake(operator, these(*((vhost, 2) for vhost in vhosts)))
    assert (brake.brake().queues, brake.brake().released, brake.brake().released_by) == (6, 6, operator.email)
    assert sum(report.deleted for report in run_round()) == 6
    assert brake.brake() == brake.Brake()
    for number in range(3):
        fill(number, 2, 11)
    assert all(report.brake_held for report in run_round())
    assert queues_on(management, vhosts) == 6
    assert told().count("brake") == 2


def test_what_a_release_does_not_name_stays_in_each_shard(vhosts, fill, settings, operator, management):
    settings.GUARDIAN_DELETE_BRAKE = 1
    for number in range(3):
        fill(number, 3, 11)
    run_round()
    brake.release_brake(operator, these((vhosts[0], 1), (vhosts[1], 3)))
    assert {report.vhost: report.deleted for report in run_round()} == {vhosts[0]: 1, vhosts[1]: 3, vhosts[2]: 0}
    assert (brake.brake().queues, brake.brake().released) == (5, 0)
    assert told().count("brake") == 2  # a release that was not enough in one of the vhosts that it names
    assert sum(report.deleted for report in run_round()) == 0
    assert queues_on(management, vhosts) == 5


@pytest.fixture
def held(guarded, amqp, settings):
    """Have the brake hold three queues, with passes over the whole broker."""
    settings.GUARDIAN_DELETE_BRAKE = 2
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert monitor.run_pass().brake_held
    return guarded


def long_ones(guarded, queues=3, prefix="long"):
    return [(guarded, f"{prefix}-{number}") for number in range(queues)]


def test_a_release_lets_the_next_pass_delete_what_it_names_once(held, amqp, operator):
    brake.release_brake(operator, long_ones(held))
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (3, False)
    assert brake.brake() == brake.Brake()
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert monitor.run_pass().brake_held
    assert told() == ["brake", "brake"]


def test_a_release_lets_nothing_go_that_it_does_not_name(held, amqp, operator, management):
    brake.release_brake(operator, long_ones(held))
    for number in range(3):
        amqp.channel.queue_purge(f"long-{number}")
        amqp.queue(f"precious-{number}", 11)
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (0, True)
    assert queues_on(management, [held]) == 6


def test_beside_what_a_release_names_the_brake_holds_for_the_others_as_it_does_without(held, amqp, operator):
    brake.release_brake(operator, long_ones(held))
    for number in range(3):
        amqp.queue(f"more-{number}", 11)
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (3, True)
    assert (brake.brake().queues, brake.brake().released) == (3, 0)
    assert told() == ["brake", "brake"]
    Queue.objects.filter(name="more-0").update(unbounded=True)
    assert monitor.run_pass().deleted == 2


def test_others_that_are_few_go_with_what_a_release_names(held, amqp, operator):
    brake.release_brake(operator, long_ones(held))
    for number in range(2):
        amqp.queue(f"more-{number}", 11)
    assert monitor.run_pass().deleted == 5


def test_a_release_that_is_not_needed_any_more_is_used_up(held, amqp, operator):
    brake.release_brake(operator, long_ones(held))
    amqp.channel.queue_purge("long-0")
    assert monitor.run_pass().deleted == 2
    for number in range(3):
        amqp.queue(f"long-{number}", 11)
    assert monitor.run_pass().brake_held


def test_a_release_holds_for_ten_minutes(held, operator):
    brake.release_brake(operator, long_ones(held))
    Watch.objects.update(released_at=timezone.now() - brake.RELEASE_HOLDS)
    assert brake.brake().released == 0
    assert monitor.run_pass().brake_held


def die(*arguments, **options):
    raise Killed


@pytest.mark.parametrize("step", ["the decision", "the deletion"])
def test_a_release_outlives_a_pass_that_is_killed(held, operator, monkeypatch, step):
    brake.release_brake(operator, long_ones(held))
    with monkeypatch.context() as patch:
        patch.setattr(*((monitor, "_remember", die) if step == "the decision" else (Deletion, "carry_out", die)))
        with pytest.raises(Killed):
            monitor.run_pass()
    assert brake.brake().released == (3 if step == "the decision" else 0)
    report = monitor.run_pass()
    assert (report.deleted, report.brake_held) == (3, False)
    assert told() == ["brake"]


def test_a_release_outlives_a_shard_that_is_killed_after_its_decision(vhosts, fill, settings, operator, monkeypatch):
    settings.GUARDIAN_DELETE_BRAKE = 1
    fill(0, 3, 11)
    run_round()
    brake.release_brake(operator, these((vhosts[0], 3)))
    with monkeypatch.context() as patch:
        patch.setattr(Deletion, "carry_out", die)
        with pytest.raises(Killed):
            monitor.run_shard(vhosts[0])
    shards.begin_round()
    report = monitor.run_shard(vhosts[0])
    assert (report.deleted, report.brake_held) == (3, False)
    assert told() == ["brake"]


def test_a_release_that_is_given_during_a_pass_is_for_the_next_one(held, operator, monkeypatch):
    brake.release_brake(operator, long_ones(held, 1))
    remember = monitor._remember

    def release_another(*arguments):
        brake.release_brake(operator, long_ones(held))
        remember(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(monitor, "_remember", release_another)
        assert monitor.run_pass().deleted == 3  # the others are two, which the brake allows
    assert brake.brake().released == 3


def test_what_a_release_lets_go_and_the_second_look_cannot_confirm_goes_later_and_is_released_once(
    held, amqp, operator, monkeypatch
):
    amqp.queue("unsure", 11)
    for _ in range(11):
        amqp.channel.basic_get("unsure", auto_ack=False)
    take = monitor.snapshot.take
    with monkeypatch.context() as patch:
        patch.setattr(monitor.snapshot, "take", lambda *arguments: take(*arguments)._replace(exact=False))
        look = monitor.run_pass(dry_run=True)
        condemned = {(one["vhost"], one["queue"]) for one in look.condemned}
        assert condemned == {*long_ones(held), (held, "unsure")}
        brake.release_brake(operator, condemned)
        report = monitor.run_pass()
        assert (report.deleted, report.kept, report.brake_held) == (3, 1, False)
    assert monitor.run_pass().deleted == 1
    assert brake.brake() == brake.Brake()


def test_a_dry_run_names_what_the_brake_keeps(held):
    report = monitor.run_pass(dry_run=True)
    assert [(one["vhost"], one["queue"]) for one in report.condemned] == long_ones(held)
    assert (report.would_delete, report.brake_held) == ([], True)


def test_a_release_is_noted_with_who_gave_it(held, operator):
    brake.release_brake(operator, long_ones(held))
    entry = AuditEntry.objects.get(deed="released the brake")
    assert (entry.actor, entry.additional_data["queues"]) == (operator, 3)


def test_where_the_brake_does_not_hold_there_is_nothing_to_release(guarded, amqp, operator):
    assert brake.brake() == brake.Brake()
    amqp.queue("short", 1)
    monitor.run_pass()
    brake.release_brake(operator, [(guarded, "short")])
    assert brake.brake() == brake.Brake()
    assert not AuditEntry.objects.filter(deed="released the brake").exists()


def test_a_release_has_to_name_a_queue(held, operator):
    with pytest.raises(ValueError, match="name the queues"):
        brake.release_brake(operator, [])


def test_a_short_list_does_not_say_that_the_brake_is_off(held, operator, monkeypatch):
    since = brake.brake().since
    brake.release_brake(operator, long_ones(held))
    monitor.run_pass(dry_run=True)
    with monkeypatch.context() as patch:
        patch.setattr(Management, "list_queues", lambda *_: [])
        assert not monitor.run_pass().brake_held
    assert (brake.brake().since, brake.brake().queues, brake.brake().released) == (since, 3, 3)
    Watch.objects.update(**brake.USED_UP)
    assert monitor.run_pass().brake_held
    assert told().count("brake") == 1


def test_the_mail_of_the_brake_says_where_to_release_it(held, settings, mailbox):
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    call_command("send_notifications", "--once")
    (mail,) = [mail for mail in mailbox.mails if "brake" in mail.subject]
    assert "https://guardian.example.org/admin/" in mail.text
    assert "3 of 3 queues" in mail.text


# What a shard looks at


@pytest.fixture
def unlistable(monkeypatch):
    """Call it with the vhosts that the broker gives no list of from then on."""
    listed, vhosts = Management.list_queues, set()

    def fail(self, vhost, *arguments):
        if vhost in vhosts:
            raise BrokerAway("no answer")
        return listed(self, vhost, *arguments)

    monkeypatch.setattr(Management, "list_queues", fail)

    def these(*names):
        vhosts.clear()
        vhosts.update(names)

    return these


def test_a_vhost_that_cannot_be_listed_leaves_its_queues_as_they_were_and_the_others_are_judged(
    vhosts, fill, unlistable
):
    for number in range(3):
        fill(number, 2, 1)
    run_round()
    before = list(Queue.objects.filter(vhost=vhosts[1]).values())
    fill(2, 2, 11)
    unlistable(vhosts[1])
    for _ in range(2):
        reports = {report.vhost: report for report in run_round()}
        assert "could not be listed" in reports[vhosts[1]].errors[0]
    assert list(Queue.objects.filter(vhost=vhosts[1]).values()) == before
    assert set(Queue.objects.filter(vhost=vhosts[2]).values_list("state", flat=True)) == {"gone"}
    assert monitor.is_due()


def test_vhosts_that_cannot_be_listed_are_told_once_all_together_and_again_when_they_can_be(
    vhosts, unlistable, mailbox, settings
):
    run_round()
    listed_at = Shard.objects.get(vhost=vhosts[1]).listed_at
    unlistable(*vhosts[1:])
    for _ in range(shards.FAILURES_TOLD):
        run_round()
        assert told() == []
    for _ in range(3):
        run_round()
    assert told() == ["outage"]
    assert Shard.objects.get(vhost=vhosts[1]).listed_at == Shard.objects.get(vhost=vhosts[1]).outage_since == listed_at
    assert Watch.objects.get().outage_since is None
    unlistable()
    run_round()
    run_round()
    run_round()
    assert told() == ["outage", "outage-over"]
    assert not Shard.objects.filter(outage_since__isnull=False).exists()
    call_command("send_notifications", "--once")
    lost, back = mailbox.mails[-2:]
    assert lost.subject == "[Guardian] 2 vhosts can't be listed"
    assert back.subject == "[Guardian] 2 vhosts can be listed again"
    for mail in (lost, back):
        assert all(f"- {readable(vhost)}" in mail.text for vhost in vhosts[1:])
        assert vhosts[0] not in mail.text


def test_what_the_brake_keeps_in_a_vhost_that_cannot_be_listed_holds_up_no_other(
    vhosts, fill, settings, unlistable, management
):
    settings.GUARDIAN_DELETE_BRAKE = 5
    fill(0, 6, 11)
    assert [report.brake_held for report in run_round()].count(True) == 1
    unlistable(vhosts[0])
    monitor.run_shard(vhosts[0])
    fill(1, 1, 11)
    assert {report.vhost: report.deleted for report in run_round()}[vhosts[1]] == 1
    assert brake.brake().since is None
    assert Watch.objects.get().round == 2
    unlistable()
    assert {report.vhost: report.brake_held for report in run_round()}[vhosts[0]]
    assert (brake.brake().queues, told()) == (6, ["brake"])
    assert queues_on(management, vhosts) == 6


@pytest.mark.parametrize("what", ["an empty list", "a list without lengths"])
def test_a_list_that_says_nothing_of_what_the_brake_keeps_does_not_release_it(
    vhosts, fill, settings, monkeypatch, management, what
):
    settings.GUARDIAN_DELETE_BRAKE = 5
    fill(0, 4, 11)
    fill(1, 4, 11)
    assert monitor.run_pass().brake_held
    run_round()
    listed = Management.list_queues

    def say_nothing(self, vhost, *arguments):
        rows = listed(self, vhost, *arguments)
        if vhost != vhosts[0]:
            return rows
        return [] if what == "an empty list" else [{**row, "messages_ready": None} for row in rows]

    with monkeypatch.context() as patch:
        patch.setattr(Management, "list_queues", say_nothing)
        for _ in range(2):
            assert sum(report.deleted for report in run_round()) == 0
    assert brake.brake().queues == 8
    for _ in range(2):
        assert sum(report.deleted for report in run_round()) == 0
    assert queues_on(management, vhosts) == 8


def test_vhosts_that_lose_too_many_queues_together_have_to_confirm_it(vhosts, fill, settings, monkeypatch):
    settings.GUARDIAN_DELETE_BRAKE = 5
    for number in range(3):
        fill(number, 6, 1)
    run_round()
    listed = Management.list_queues
    monkeypatch.setattr(Management, "list_queues", lambda *arguments: listed(*arguments)[:1])
    assert [sum(report.gone for report in run_round()) for _ in range(3)] == [0, 0, 10]
    assert sum(report.gone for report in run_round()) == 5


def test_a_vhost_that_the_broker_has_and_says_that_it_has_not_counts_as_one_that_cannot_be_listed(
    vhosts, fill, settings, monkeypatch
):
    settings.GUARDIAN_DELETE_BRAKE = 1
    fill(0, 2, 11)
    run_round()
    before = Shard.objects.get(vhost=vhosts[0])
    assert before.braked == 2

    def deny(self, vhost, *arguments):
        raise NotThere("no such vhost")

    with monkeypatch.context() as patch:
        patch.setattr(Management, "list_queues", deny)
        assert monitor.run_shard(vhosts[0]).errors
    after = Shard.objects.get(vhost=vhosts[0])
    assert (after.failures, after.braked, after.listed_at) == (1, 2, before.listed_at)


def test_what_shards_remember_from_before_a_pass_over_the_whole_broker_is_no_outage(vhosts, unlistable):
    run_round()
    unlistable(*vhosts)
    for vhost in vhosts:
        monitor.run_shard(vhost)
    unlistable()
    monitor.run_pass()
    report = shards.begin_round().report
    assert (report.away, report.errors, told(), monitor.is_due()) == (False, [], [], True)


def test_a_vhost_is_remembered_from_the_round_that_first_meets_it(vhosts):
    before = timezone.now() - timedelta(seconds=5)
    shards.begin_round()
    made = dict(Shard.objects.values_list("vhost", "made_at"))
    assert made.keys() == set(vhosts)
    assert all(made_at > before for made_at in made.values())
    run_round()
    assert dict(Shard.objects.values_list("vhost", "made_at")) == made


def test_where_no_vhost_can_be_listed_that_is_an_outage_told_once(vhosts, monkeypatch, broker):
    def fail(self, vhost, *arguments):
        raise BrokerAway("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Management, "list_queues", fail)
        for _ in range(4):
            run_round()
    assert told() == ["outage"]
    run_round()
    run_round()
    assert told() == ["outage", "outage-over"]


def test_a_broker_that_is_away_is_told_once_and_the_wait_grows(vhosts, fill, settings, broker, monkeypatch):
    fill(0, 1, 1)
    run_round()
    there = settings.RABBITMQ_MANAGEMENT_URL
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    for vhost in vhosts:
        assert monitor.run_shard(vhost).away
    assert told() == []
    waits = []
    for _ in range(3):
        assert shards.begin_round().vhosts == []
        waits.append(monitor.seconds_to_wait())
    assert waits == [10, 20, 40]
    assert not monitor.is_due()
    assert told() == ["outage"]
    settings.RABBITMQ_MANAGEMENT_URL = there
    run_round()
    assert told() == ["outage", "outage-over"]
    assert (monitor.is_due(), monitor.seconds_to_wait()) == (True, settings.GUARDIAN_POLL_SECONDS)


def test_the_rows_of_a_vhost_that_is_deleted_become_gone_and_what_was_remembered_of_it_goes(
    vhosts, fill, management, settings
):
    settings.GUARDIAN_VHOSTS = ["*"]
    fill(0, 1, 1)
    fill(1, 2, 1)
    run_round()
    management.delete_vhost(vhosts[1])
    try:
        gone = [sum(report.gone for report in run_round()) for _ in range(3)]
        assert gone == [0, 0, 2]
        assert set(Queue.objects.filter(vhost=vhosts[1]).values_list("state", flat=True)) == {"gone"}
        assert vhosts[1] not in {report.vhost for report in run_round()}
        assert not Shard.objects.filter(vhost=vhosts[1]).exists()
        assert not Lease.objects.filter(name__endswith=vhosts[1]).exists()
        assert told() == []
    finally:
        management.make_vhost(vhosts[1])


def test_the_lease_that_a_killed_shard_left_goes_with_its_vhost(vhosts):
    past = timezone.now() - timedelta(seconds=1)
    Lease.objects.create(name=f"{monitor.SHARD_LEASES}gone", holder=uuid.uuid4(), expires_at=past)
    Shard.objects.create(vhost="gone")
    run_round()
    assert not Lease.objects.filter(name__endswith="gone").exists()
    assert not Shard.objects.filter(vhost="gone").exists()


def test_a_vhost_that_is_guarded_no_more_lets_its_rows_go(vhosts, fill, settings):
    fill(1, 1, 1)
    run_round()
    settings.GUARDIAN_VHOSTS = vhosts[:1]
    assert sum(report.gone for report in run_round()) == 1
    assert [report.vhost for report in run_round()] == vhosts[:1]


def test_only_lists_of_one_kind_in_a_row_make_a_queue_gone(vhosts, fill, management):
    fill(0, 2, 1)
    monitor.run_pass()
    run_round()
    Watch.objects.update(nodes=["another@node"])  # a pass over the whole broker, with other nodes running
    management.delete_queue(vhosts[0], "q0")
    assert [monitor.run_shard(vhosts[0]).gone for _ in range(2)] == [0, 1]
    management.delete_queue(vhosts[0], "q1")
    monitor.run_shard(vhosts[0])
    assert Watch.objects.get().nodes == []
    assert monitor.run_pass().gone == 0


def test_misnamed_exchanges_are_looked_for_in_the_vhost_of_pulse_users_alone(vhosts, broker):
    for vhost in vhosts[:2]:
        Amqp(broker.amqp_url, vhost).channel.exchange_declare("queue/alice/events", "topic")
    reports = {report.vhost: report.misnamed_exchanges for report in run_round()}
    assert [reports[vhost] for vhost in vhosts] == [["queue/alice/events"], [], []]
    assert Watch.objects.get().misnamed_exchanges == ["queue/alice/events"]


def test_what_shards_say_of_the_broker_is_told_once_by_the_round(vhosts):
    run_round()
    run_round()
    since = timezone.now() - timedelta(minutes=1)
    Shard.objects.exclude(vhost=vhosts[0]).update(unresponsive_since=since, refused_since=since)
    Shard.objects.filter(vhost=vhosts[1]).update(listed_at=since)
    for _ in range(2):
        shards.begin_round()
    watch = Watch.objects.get()
    assert (watch.unresponsive_since, watch.refused_since, watch.listed_at) == (since, since, since)
    run_round()
    shards.begin_round()
    assert told() == ["unresponsive", "responsive"]


def test_whoever_has_waited_longest_comes_first(vhosts):
    run_round()
    monitor.run_shard(vhosts[1])
    monitor.run_shard(vhosts[0])
    assert shards.begin_round().vhosts == [vhosts[2], vhosts[1], vhosts[0]]


def test_two_rounds_are_not_begun_at_once(vhosts):
    with lease.lease(shards.LEASE):
        begun = shards.begin_round()
    assert (begun.vhosts, begun.report.another_pass) == ([], True)


def test_the_reports_of_shards_are_kept_for_a_day(vhosts):
    now = timezone.now()
    for age, vhost in ((2, ""), (2, vhosts[0]), (0, vhosts[1])):
        Pass.objects.create(at=now - timedelta(days=age), vhost=vhost)
    pruning.prune()
    assert set(Pass.objects.values_list("vhost", flat=True)) == {"", vhosts[1]}


# Without sharding


@pytest.mark.parametrize(("messages", "statements"), [(0, 12), (1, 15)])
def test_a_steady_pass_over_the_whole_broker_costs_no_more_than_without_shards(
    guarded, amqp, django_assert_num_queries, messages, statements
):
    amqp.queue("q", 1)
    monitor.run_pass()
    monitor.run_pass()
    amqp.publish("q", messages)
    with counted_requests() as sent, django_assert_num_queries(statements):
        monitor.run_pass()
    assert len(sent) == 3


# The task and the command


def test_the_task_hands_over_a_pass_for_each_vhost(vhosts, monkeypatch, settings):
    handed_over = []
    monkeypatch.setattr(tasks.monitor_vhost, "apply_async", lambda args, expires: handed_over.append((*args, expires)))
    tasks.monitor_queues()
    assert sorted(handed_over) == sorted((vhost, settings.GUARDIAN_POLL_SECONDS) for vhost in vhosts)
    assert settings.CELERY_TASK_ROUTES[tasks.monitor_vhost.name] == {"queue": "guarding"}
    tasks.monitor_vhost(vhosts[0])
    assert Pass.objects.get().vhost == vhosts[0]


def test_the_task_hands_over_nothing_while_the_broker_is_away(vhosts, monkeypatch, settings):
    monkeypatch.setattr(tasks.monitor_vhost, "apply_async", lambda *_, **__: pytest.fail("handed over"))
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    tasks.monitor_queues()
    tasks.monitor_queues()
    assert Pass.objects.count() == 1


@pytest.fixture
def sharded(environment, vhosts):
    """Return the environment in which another process guards two of these vhosts, each by itself."""
    return environment | {"GUARDIAN_SHARD_BY_VHOST": "true", "GUARDIAN_VHOSTS": f"{vhosts[0]},{vhosts[2]}"}


def test_the_command_runs_the_shards_one_after_the_other_and_says_whose_each_report_is(vhosts, fill, sharded):
    fill(0, 1, 11)
    fill(2, 2, 1)
    process = start(sharded, "monitor_queues", "--json")
    try:
        wait_until(lambda: Pass.objects.count() > 3 or process.poll() is not None)
    finally:
        process.terminate()
        out, err = process.communicate(timeout=30)
    reports = [json.loads(line) for line in out.splitlines()]
    assert (process.returncode, {report["vhost"] for report in reports}) == (0, {vhosts[0], vhosts[2]}), err
    assert sum(report["deleted"] for report in reports) == 1
    assert Lease.objects.filter(lease.is_held()).count() == 0


def test_once_the_command_goes_over_all_vhosts_at_once(vhosts, fill, sharded):
    fill(0, 1, 1)
    fill(2, 2, 1)
    code, out, err = run(sharded, "monitor_queues", "--once", "--json")
    assert (code, json.loads(out)["vhost"], json.loads(out)["queues"]) == (0, "", 3), err


@pytest.mark.slow
def test_two_workers_share_the_vhosts_and_do_nothing_twice(vhosts, fill, sharded, tmp_path):
    sharded |= {"GUARDIAN_VAR_DIR": str(tmp_path), "GUARDIAN_POLL_SECONDS": "1"}
    celery = [sys.executable, "-m", "celery", "-A", "guardian_site"]
    one = ["worker", "--concurrency", "1", "--without-mingle", "--without-gossip", "--queues", "guarding", "--hostname"]
    processes = [
        subprocess.Popen([*celery, *part], cwd=ROOT, env=sharded, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        for part in ([*one, "one@%h"], [*one, "two@%h"], ["beat"])
    ]
    guarded = {vhosts[0], vhosts[2]}
    try:
        wait_until(lambda: set(Pass.objects.values_list("vhost", flat=True)) == guarded, seconds=60)
        fill(0, 4, 11)
        fill(2, 4, 11)
        wait_until(lambda: QueueEvent.objects.filter(kind="deleted").count() >= 8, seconds=60)
        passes = Pass.objects.count()
        wait_until(lambda: Pass.objects.count() > passes + 4, seconds=60)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
    assert QueueEvent.objects.filter(kind="deleted").count() == 8
    assert Notification.objects.filter(kind="deletion").count() == 8
    for vhost in guarded:
        times = list(Pass.objects.filter(vhost=vhost).order_by("at").values_list("at", "seconds"))
        ends = [at + timedelta(seconds=seconds) for at, seconds in times]
        assert all(end <= next_at for end, (next_at, _) in zip(ends, times[1:], strict=False))
