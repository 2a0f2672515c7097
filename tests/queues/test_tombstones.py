"""Queues that Guardian removed with their owner are gone immediately, and passes do not report them."""

import pytest
from django.utils import timezone

from accounts.models import PulseUser
from queues.actions import limit_requests, tombstones
from queues.models import Queue, QueueEvent
from tests.support.toolbox import queue_row

pytestmark = pytest.mark.usefixtures("pulse_user")


def rows(vhost, names, **fields):
    now = timezone.now()
    return Queue.objects.bulk_create(
        queue_row(name, vhost=vhost, ready=3, unacknowledged=1, consumers=0, unattended_since=now, **fields)
        for name in names
    )


def removed():
    events = QueueEvent.objects.filter(kind="removed").order_by("queue_name")
    return [(event.vhost, event.queue_name, event.by, event.details) for event in events]


@pytest.mark.parametrize("queues", [1, 60])
def test_the_queues_of_a_removed_pulse_user_are_gone(queues, django_assert_max_num_queries):
    pulse_user = PulseUser.objects.get()
    rows("/", [f"queue/alice/{number}" for number in range(queues)], pulse_user=pulse_user)
    rows("/", ["celery"])
    with django_assert_max_num_queries(11):  # four of them start and end transactions
        assert tombstones.forget_queues_of(pulse_user) == queues
    assert Queue.objects.filter(state="gone").count() == queues
    assert QueueEvent.objects.filter(kind="removed", details__with="alice").count() == queues
    assert Queue.objects.get(name="celery").state == "ok"


@pytest.mark.parametrize("state", ["warned", "gone"])
def test_who_takes_the_name_of_a_deleted_pulse_user_gets_no_limits_and_no_history(state, alice):
    pulse_user = PulseUser.objects.get()
    now = timezone.now()
    [queue] = rows("/", ["queue/alice/a"], pulse_user=pulse_user, state=state, notified_state="warned",
                   unbounded=True, max_length=9, limits_until=now, limits_before={}, acknowledged_at=now,
                   acknowledged_by=alice)  # fmt: skip
    queue.events.create(
        vhost="/", queue_name=queue.name, kind="asked", at=now, by=alice, details={"reason": "secret", "wanted": 99}
    )
    queue.samples.create(at=now, length=4)
    queue.moves.create(total=1, created=now, by=alice)
    tombstones.forget_queues_of(pulse_user)
    queue.refresh_from_db()
    assert {field: getattr(queue, field) for field in tombstones.OF_OWNERS} == tombstones.OF_OWNERS
    assert not queue.events.exclude(kind="removed").exists()
    assert not limit_requests.open_requests().exists()
    assert not queue.samples.exists()
    assert not queue.moves.exists()
    assert QueueEvent.objects.get(kind="asked").queue_name == "queue/alice/a"


@pytest.mark.parametrize("queues", [1, 60])
def test_queues_are_marked_gone_by_name_in_constant_statements(queues, django_assert_max_num_queries):
    names = [f"consumer_{number}" for number in range(queues)]
    rows("one", names)
    rows("other", names)
    names_in_one = [("one", name) for name in names]
    with django_assert_max_num_queries(5):  # two of them start and end the transaction
        assert tombstones.forget([*names_in_one, *names_in_one, ("one", "never seen"), ("none", names[0])]) == queues
    assert set(Queue.objects.filter(state="gone").values_list("vhost", "name")) == set(names_in_one)
    first = Queue.objects.get(vhost="one", name=names[0])
    assert (first.length, first.consumers, first.unattended_since) == (None, None, None)
    assert removed()[0] == ("one", names[0], None, {"length": 4, "why": "unregistered"})
    assert tombstones.forget(names_in_one) == 0


def test_marking_no_queues_takes_no_statement(django_assert_num_queries):
    with django_assert_num_queries(0):
        assert tombstones.forget([]) == 0


def test_the_queues_of_a_removed_vhost_are_gone():
    rows("one", ["consumer_1", "guardian.dlq"])
    rows("other", ["consumer_1"])
    assert tombstones.forget_vhost("one") == 2
    assert not Queue.objects.filter(vhost="one").exclude(state="gone").exists()
    assert Queue.objects.get(vhost="other").state == "ok"
    assert [details["why"] for *_, details in removed()] == ["vhost", "vhost"]
