"""The last call before a deletion: when it is due, and that it comes once."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from notifications import sending
from notifications.models import Notification
from queues.guard import destroying, monitor, once
from queues.models import Queue, QueueSample
from queues.rules import last_call
from queues.rules.quiet import MessageKind
from queues.rules.rows import Registrations, StoredPulseUser
from queues.rules.thresholds import GONE, MemoryPressure, Thresholds
from rabbit.memory import NodeMemory
from tests.queues.test_comparison import RULES, InMemoryMonitor, listed_queue, snapshot
from tests.support.toolbox import queue_events, queue_lengths, sent, wait_until_equal

NAME = "queue/alice/a"
WARNING, LAST_CALL, RECOVERY = MessageKind.WARNING, MessageKind.LAST_CALL, MessageKind.RECOVERY
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def kinds_of(changes):
    return [message.kind for message in changes.messages]


def play(*lengths, seconds=5, history=None):
    """Pass over a queue with these lengths, with the thresholds 5 and 10, and return the messages of each pass."""
    history = history or InMemoryMonitor()
    return [kinds_of(history.run(snapshot(listed_queue(NAME, length)), seconds=seconds)) for length in lengths]


def test_it_is_sent_once_from_80_percent_of_the_way_to_the_limit():
    assert play(5, 8, 9, 10, 8, 10) == [[WARNING], [], [LAST_CALL], [], [], []]


def test_a_queue_that_comes_near_at_once_gets_it_instead_of_a_warning():
    changes = InMemoryMonitor().run(snapshot(listed_queue(NAME, 9)))
    assert kinds_of(changes) == [LAST_CALL]
    assert [event.kind for event in changes.events] == ["warned", "last_call"]


def test_it_comes_again_only_after_owners_know_that_the_queue_is_back_to_normal():
    assert play(9, 0, 9, 0, 9, 0) == [[LAST_CALL], [RECOVERY], [LAST_CALL], [], [], []]


def test_the_quiet_period_of_a_warning_does_not_delay_it():
    assert play(5, 0, 5, 9) == [[WARNING], [RECOVERY], [], [LAST_CALL]]


def test_it_is_true_until_the_quiet_period_ends():
    history = InMemoryMonitor()
    play(9, 0, 9, 0, history=history)
    assert play(0, 9, seconds=901, history=history) == [[MessageKind.SUMMARY], [LAST_CALL]]


def test_a_changed_limit_has_its_own_last_call():
    history = InMemoryMonitor()
    assert play(9, history=history) == [[LAST_CALL]]
    history.rows["/", NAME] = history.row(NAME)._replace(max_length=50)
    assert play(20, 41, 42, history=history) == [[], [LAST_CALL], []]


def test_a_limit_that_moves_with_memory_pressure_has_one_last_call():
    history = InMemoryMonitor(replace(RULES, policy=MemoryPressure(Thresholds(5, 105))))
    sent_at = []
    for used in (0.9, 0.88, 0.86, 0.84, 0.9):
        memory = {"rabbit@one": NodeMemory(used=int(used * 1000), watermark=1000)}
        shot = snapshot(listed_queue(NAME, 50))
        changes = history.run(shot, memory=memory, held={("/", NAME): 900})
        sent_at += [used for message in changes.messages if message.kind is LAST_CALL]
    assert sent_at == [0.9]


def test_a_queue_that_was_gone_gets_it_again():
    history = InMemoryMonitor()
    play(9, history=history)
    for _ in range(2):
        history.run(snapshot(listed_queue("other", 0)))
    assert history.row(NAME).state == GONE
    assert play(9, history=history) == [[LAST_CALL]]


@pytest.mark.parametrize(
    ("listed", "fields"),
    [
        ({}, {"unbounded": True}),
        ({}, {"block_reason": Queue.BlockReason.BRAKE}),
        ({"exclusive": True}, {}),
        ({"ready": None}, {}),
    ],
    ids=["unbounded", "blocked", "exclusive", "of unknown length"],
)
def test_a_queue_that_guardian_will_not_delete_gets_none(listed, fields):
    history = InMemoryMonitor().after(snapshot(listed_queue(NAME, 5)))
    history.rows["/", NAME] = history.row(NAME)._replace(**fields)
    assert kinds_of(history.run(snapshot(listed_queue(NAME, 9)._replace(**listed)))) == []


def test_a_registered_queue_gets_a_warning_only():
    history = InMemoryMonitor(agents=Registrations(queues={("/", NAME): 7}))
    assert play(9, history=history) == [[WARNING]]


def test_a_queue_that_the_broker_limits_gets_a_warning_only():
    history = InMemoryMonitor()
    for length, expected in ((9, [WARNING]), (10, []), (0, [RECOVERY])):
        changes = history.run(snapshot(listed_queue(NAME, length)))
        changes.withdraw_last_calls({("/", NAME)})
        assert kinds_of(changes) == expected
        assert "last_call" not in [event.kind for event in changes.events]


def test_a_queue_that_the_broker_limits_gets_its_warning_before_the_hold_off_is_over():
    history = InMemoryMonitor(pulse_users={"alice": StoredPulseUser(1, None, None, hold_off_minutes=60)})
    shown = []
    for length in (5, 9, 9):
        changes = history.run(snapshot(listed_queue("queue/alice/q", length)))
        changes.withdraw_last_calls({("/", "queue/alice/q")})
        shown.append(kinds_of(changes))
    assert shown == [[], [WARNING], []]


@pytest.mark.parametrize(
    ("samples", "is_soon"),
    [
        ([(100, 2_600)], True),
        ([(100, 2_900)], False),
        ([(20, 1_000)], False),
        ([(100, 1_000), (60, 3_000)], False),
        ([], False),
    ],
    ids=["within 30 minutes", "in an hour", "a young burst", "a burst that is over", "no samples"],
)
def test_a_growing_queue_gets_it_half_an_hour_before_its_limit(samples, is_soon):
    at = [(NOW - timedelta(seconds=seconds), length) for seconds, length in samples]
    assert last_call.is_soon(at, 3_000, 8_000, NOW) is is_soon


# With a broker, from here on.

passes = pytest.mark.usefixtures("guarded", "pulse_user")


@passes
def test_a_pass_compares_the_growth_of_a_warned_queue_with_its_samples(amqp, settings):
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 1_000
    amqp.queue(NAME, 7)
    once.run_once()
    assert sent("alice@example.org") == ["warning"]
    QueueSample.objects.update(at=NOW)
    Queue.objects.update(first_seen=NOW)
    queue = Queue.objects.get()
    earlier = Notification.objects.get(recipient="alice@example.org").created - timedelta(seconds=60)
    QueueSample.objects.create(queue=queue, at=earlier, length=1)
    amqp.publish(NAME, 100)
    once.run_once()
    assert sent("alice@example.org") == ["warning", "last-call"]
    assert queue_events(NAME) == ["warned", "last_call"]


@passes
def test_its_mail_is_in_the_thread_of_the_warning_and_says_what_is_archived(amqp, pulse_user, mailbox):
    amqp.queue(NAME, 5)
    once.run_once()
    sending.send_due()
    pulse_user.keeps_archives = False
    pulse_user.save()
    amqp.publish(NAME, 4)
    once.run_once()
    sending.send_due()
    warning, called = mailbox.to("alice@example.org")
    assert called.message["X-Guardian-Kind"] == "last-call"
    assert called.message["References"] == warning.message["References"]
    assert "because archives are switched off for it" in " ".join(called.text.split())


@passes
def test_it_promises_no_archive_of_messages_that_only_an_active_consumer_gets(amqp, guarded, management):
    amqp.queue(NAME, 9, arguments={"x-queue-type": "quorum", "x-single-active-consumer": True})
    amqp.channel.basic_consume(NAME, lambda *_: None)
    wait_until_equal(lambda: queue_lengths(management, guarded), {NAME: 9})
    monitor.run_pass()
    assert Notification.objects.get(recipient="alice@example.org").facts["why_not_archived"] == destroying.PASSED_OVER


@passes
def test_the_brokers_own_limit_makes_it_a_warning(amqp):
    amqp.queue(NAME, 9, arguments={"x-max-length": 9})
    monitor.run_pass()
    assert sent("alice@example.org") == ["warning"]
    assert queue_events(NAME) == ["warned"]
