"""Reminders of a queue that stays over its threshold, warnings that wait, and what an owner gets in a week."""

from dataclasses import replace
from datetime import timedelta

import pytest

from queues.rules.quiet import MessageKind
from queues.rules.rows import StoredPulseUser
from queues.rules.thresholds import WARNED
from tests.queues.test_comparison import RULES, InMemoryMonitor, listed_queue, snapshot

DAILY = replace(RULES, reminder_interval=timedelta(hours=24))
HOUR = 3600
NAME = "queue/alice/a"
WARNING, LAST_CALL = MessageKind.WARNING, MessageKind.LAST_CALL
REMINDER, RECOVERY = MessageKind.REMINDER, MessageKind.RECOVERY


def kinds(changes):
    return [message.kind for message in changes.messages]


def run(monitor, *lengths, seconds=HOUR):
    """Run a pass for each of these lengths of one queue, at this interval, and return the kinds of the messages."""
    return [
        kind for length in lengths for kind in kinds(monitor.run(snapshot(listed_queue(NAME, length)), seconds=seconds))
    ]


def test_owners_are_reminded_once_a_day_until_the_queue_is_back_to_normal():
    monitor = InMemoryMonitor(DAILY)
    assert run(monitor, *[7] * 24) == [WARNING]
    assert run(monitor, 7) == [REMINDER]
    assert run(monitor, *[7] * 48) == [REMINDER] * 2
    assert run(monitor, 1, *[1] * 48) == [RECOVERY]


def test_without_an_interval_nobody_is_reminded():
    assert run(InMemoryMonitor(), *[7] * 72) == [WARNING]


def test_an_acknowledged_warning_is_not_repeated_and_the_next_one_is():
    monitor = InMemoryMonitor(DAILY)
    run(monitor, 7)
    monitor.rows["/", NAME] = monitor.row(NAME)._replace(acknowledged_at=monitor.now)
    assert run(monitor, *[7] * 48) == []
    assert run(monitor, 1, 7) == [RECOVERY, WARNING]
    assert run(monitor, *[7] * 24) == [REMINDER]


def test_queues_are_reminded_of_together():
    monitor = InMemoryMonitor(DAILY)
    sent = []
    for hour in range(73):
        lengths = {"early": 7, "late": 7 if hour >= 10 else 1, "later": 7 if hour >= 20 else 1}
        changes = monitor.run(snapshot(*(listed_queue(*one) for one in lengths.items())), seconds=HOUR)
        reminded = sorted(one.queue.name for one in changes.messages if one.kind is REMINDER)
        sent += [(hour, reminded)] if reminded else []
    assert sent == [
        (24, ["early", "late"]),
        (48, ["early", "late", "later"]),
        (72, ["early", "late", "later"]),
    ]


def test_each_owner_is_reminded_after_their_own_queues_alone():
    pulse_users = {"alice": StoredPulseUser(1, None, None), "bob": StoredPulseUser(2, None, None)}
    monitor = InMemoryMonitor(DAILY, pulse_users)
    for hour in range(25):
        late = listed_queue("queue/bob/late", 7 if hour >= 10 else 1)
        changes = monitor.run(snapshot(listed_queue(NAME, 7), late), seconds=HOUR)
    assert [(one.kind, one.queue.name) for one in changes.messages] == [(REMINDER, NAME)]


def test_a_warning_waits_until_the_queue_has_been_over_for_the_hold_off():
    monitor = InMemoryMonitor(DAILY, {"alice": StoredPulseUser(1, None, None, hold_off_minutes=10)})
    assert run(monitor, 7, seconds=60) == []
    assert monitor.row(NAME).state == WARNED
    assert run(monitor, *[7] * 9, seconds=60) == []
    assert run(monitor, 7, seconds=60) == [WARNING]


def test_a_deletion_does_not_wait_for_the_hold_off():
    monitor = InMemoryMonitor(DAILY, {"alice": StoredPulseUser(1, None, None, hold_off_minutes=60)})
    run(monitor, 7, seconds=60)
    assert len(monitor.run(snapshot(listed_queue(NAME, 11))).deletable) == 1


QUIET_PERIODS = 7 * 86_400 // RULES.quiet_seconds


def hovers(second):
    """Cross the threshold every four minutes."""
    return 4 if second // 240 % 2 else 6


def grows(second):
    """Grow from empty past the deletion limit in four days. Guardian deletes the queue then, and it begins again."""
    return second * 11 // (4 * 86_400) % 11


def stuck(second):
    """Stay over the warning threshold."""
    return 6


@pytest.mark.parametrize(
    ("length_at", "hold_off", "at_most"),
    [
        (hovers, 0, {WARNING: QUIET_PERIODS, RECOVERY: QUIET_PERIODS}),
        (hovers, 5, {}),
        (grows, 0, {WARNING: 2, LAST_CALL: 2, REMINDER: 3, RECOVERY: 1}),
        (stuck, 0, {WARNING: 1, REMINDER: 6}),
        (stuck, 60, {WARNING: 1, REMINDER: 6}),
    ],
    ids=["hovers", "hovers, held off", "grows", "stuck", "stuck, held off"],
)
def test_what_an_owner_gets_about_a_queue_in_a_week(length_at, hold_off, at_most):
    monitor = InMemoryMonitor(DAILY, {"alice": StoredPulseUser(1, None, None, hold_off_minutes=hold_off)})
    got = [kind for second in range(0, 7 * 86_400, 30) for kind in run(monitor, length_at(second), seconds=30)]
    counts = {kind: got.count(kind) for kind in MessageKind if kind in got}
    assert all(number <= at_most.get(kind, 0) for kind, number in counts.items()), counts
