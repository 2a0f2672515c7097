"""Limits that end: what returns, when, and who is notified."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from notifications.mails import compose
from notifications.models import Notification
from queues.actions import single
from queues.guard.limits_end import end_limits
from queues.guard.once import run_once
from queues.models import Queue
from queues.rules.temporary_limits import Step, next_step
from rabbit.snapshot import Snapshot
from tests.support.api import Program
from tests.support.toolbox import queue_events, queue_names, queue_row, sent, stored_queue

NAME = "queue/alice/builds"
DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
OLD = {"unbounded": False, "warn_length": None, "max_length": 10}


@pytest.mark.parametrize(
    ("length", "phase", "ended_for", "old", "step"),
    [
        (20, "", -DAY - SECOND, OLD, None),
        (20, "", -DAY, OLD, Step.ANNOUNCE),
        (20, "announced", -SECOND, OLD, None),
        (20, "announced", SECOND, OLD, Step.KEEP),
        (20, "", SECOND, OLD, Step.KEEP),
        (20, "kept", DAY, OLD, None),
        (10, "kept", DAY, OLD, Step.RESTORE),
        (10, "announced", SECOND, OLD, Step.RESTORE),
        (None, "kept", DAY, OLD, None),
        (20, "announced", SECOND, {**OLD, "unbounded": True}, Step.RESTORE),
        (8001, "announced", SECOND, {**OLD, "max_length": None}, Step.KEEP),
    ],
)
def test_old_limits_return_for_a_queue_within_them(length, phase, ended_for, old, step):
    now = timezone.now()
    queue = queue_row(
        NAME, ready=length, unacknowledged=0, max_length=50_000, limits_until=now - ended_for, limits_before=old,
        limits_phase=phase,
    )  # fmt: skip
    assert next_step(queue, now) is step


@pytest.fixture
def raised(db, operator):
    """Return a queue whose limits were raised until tomorrow."""
    queue = stored_queue(NAME, ready=3, unacknowledged=0, warn_length=5, max_length=10)
    single.set_limits(queue, operator, max_length=50, limits_until=timezone.now() + DAY)
    return queue


def test_limits_that_end_store_the_first_ones_and_a_change_without_an_end_is_permanent(raised, operator):
    before = {"unbounded": False, "warn_length": 5, "max_length": 10}
    assert raised.limits_before == before
    single.set_limits(raised, operator, max_length=60, limits_until=timezone.now() + 2 * DAY)
    assert Queue.objects.get().limits_before == before
    single.set_limits(raised, operator, limits_until=timezone.now() + 3 * DAY)
    assert (Queue.objects.get().max_length, Queue.objects.get().limits_before) == (60, before)
    single.set_limits(raised, operator, max_length=70)
    ended = Queue.objects.get()
    assert (ended.max_length, ended.limits_until, ended.limits_before) == (70, None, None)


@pytest.mark.parametrize("given", [{"limits_until": DAY}, {"max_length": 9000, "limits_until": -SECOND},
                                   {"max_length": 9000, "limits_until": 400 * DAY}])  # fmt: skip
def test_an_end_without_a_change_and_one_that_is_past_or_far_away_are_refused(db, operator, given):
    queue = stored_queue(NAME, ready=3, unacknowledged=0)
    with pytest.raises(ValidationError) as error:
        single.set_limits(queue, operator, **{**given, "limits_until": timezone.now() + given["limits_until"]})
    assert list(error.value.message_dict) == ["limits_until"]
    assert Queue.objects.get().max_length is None


def test_a_queue_that_is_too_long_keeps_the_raised_limit_until_it_has_been_within_the_old_one(
    guarded, pulse_user, amqp, operator
):
    amqp.queue(NAME, 1)
    run_once()
    single.set_limits(Queue.objects.get(), operator, max_length=50, limits_until=timezone.now() + DAY / 2)
    amqp.publish(NAME, 19)
    run_once()
    assert sent("alice@example.org") == sent("ops@example.org") == ["warning", "limits-end"]
    Queue.objects.update(limits_until=timezone.now() - SECOND)
    for _ in range(3):
        report = run_once()
        assert (report.deleted, report.brake_held) == (0, False)
    assert sent("alice@example.org")[2:] == ["limits-end"]
    assert "until it has been within 10 messages" in compose(Notification.objects.latest("id")).body
    amqp.take(NAME, 10)
    run_once()
    queue = Queue.objects.get()
    assert (queue.max_length, queue.limits_until, queue.limits_before, queue.limits_phase) == (None, None, None, "")
    assert sent("alice@example.org")[3:] == ["limits-end"]
    assert queue_events(NAME) == ["adjusted", "warned", "prolonged", "ended"]
    amqp.publish(NAME, 1)
    assert run_once().deleted == 1


def test_past_the_raised_limit_a_queue_is_deleted_as_before(guarded, pulse_user, amqp, operator, management):
    amqp.queue(NAME, 1)
    run_once()
    single.set_limits(Queue.objects.get(), operator, max_length=20, limits_until=timezone.now() + DAY)
    amqp.publish(NAME, 20)
    Queue.objects.update(limits_until=timezone.now() - SECOND)
    assert run_once().deleted == 1
    assert queue_names(management, guarded) == set()


def test_limits_do_not_end_by_a_length_that_is_older_than_the_list(raised):
    Queue.objects.update(limits_until=timezone.now() - SECOND)
    listing = Snapshot(
        [queue_row(NAME, ready=20, unacknowledged=0)], {}, frozenset(), frozenset(), True, True, [], [], 0.0
    )
    assert end_limits(listing, timezone.now()) == []
    assert Queue.objects.get().max_length == 50


def test_ending_many_limits_takes_as_many_statements_as_ending_one(db):
    statements = []
    for number in (1, 30):
        Queue.objects.all().delete()
        rows = [
            stored_queue(
                f"{NAME}-{n}", ready=n, unacknowledged=0, max_length=50_000, limits_before={**OLD, "max_length": 15},
                limits_until=timezone.now(),
            )
            for n in range(number)
        ]  # fmt: skip
        listing = Snapshot(rows, {}, frozenset(), frozenset(), True, True, [], [], 0.0)
        with CaptureQueriesContext(connection) as captured:
            assert len(end_limits(listing, timezone.now())) == number
        statements.append(len(captured))
    assert statements[0] == statements[1]


def test_operators_set_an_end_through_the_api(raised, operator):
    program, path = Program(operator), f"queues/{raised.uuid.hex}/"
    until = (timezone.now() + 2 * DAY).isoformat()
    assert program.patch(path, {"max_length": 60, "limits_until": until}).json()["limits_until"] is not None
    assert program.get(path).json()["limits_until"] is not None
    refused = program.patch(path, {"max_length": 70, "limits_until": "2020-01-01T00:00:00Z"})
    assert (refused.status_code, list(refused.json())) == (400, ["limits_until"])


def test_the_page_of_limits_keeps_the_end_that_it_shows(raised, operator, client):
    client.force_login(operator)
    path = f"/queues/{raised.uuid}/limits/"
    page = client.get(path)
    assert "Until" in page.text
    form = page.context["form"]
    fields = {field.html_name: field.as_hidden().partition('value="')[2].partition('"')[0] for field in form}
    client.post(path, {**fields, **{f"initial-{name}": value for name, value in fields.items()}, "max_length": 60})
    queue = Queue.objects.get()
    assert (queue.max_length, queue.limits_before["max_length"]) == (60, 10)
    assert "then 10 messages again" in client.get(f"/queues/{raised.uuid}/").text
    refused = client.post(path, {**fields, "max_length": 70, "limits_until": "2020-01-01T00:00"})
    assert "within a year from now" in refused.text
