"""Writing many rows in one statement, on either database."""

import uuid

import pytest
from django.utils import timezone

from queues import bulk
from queues.models import Queue, QueueEvent

pytestmark = pytest.mark.django_db

FIELDS = (
    "uuid", "vhost", "name", "type", "durable", "auto_delete", "exclusive", "node", "ready", "unacknowledged", "state",
    "misses", "said", "recovery_said", "folded", "registered", "unbounded", "first_seen", "last_seen",
)  # fmt: skip
NOW = timezone.now()


def rows(*names):
    return [
        (uuid.uuid4(), "/", name, "classic", True, False, False, "", 2**40, None, "ok", 0, "ok", False, 0, False, False,
         NOW, NOW)
        for name in names
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3000])
def test_any_number_of_rows_is_one_statement(django_assert_num_queries, count):
    with django_assert_num_queries(1):
        returned = bulk.insert(Queue, FIELDS, rows(*(f"q{n}" for n in range(count))), returning=("id", "name"))
    assert len(returned) == Queue.objects.count() == count
    with django_assert_num_queries(1):
        bulk.update(Queue, ("ready", "state"), [(id_, 7, "warned") for id_, _ in returned])
    assert Queue.objects.filter(ready=7, state="warned").count() == count


def test_no_rows_are_no_statement(django_assert_num_queries):
    with django_assert_num_queries(0):
        bulk.insert(Queue, FIELDS, [])
        bulk.update(Queue, ("ready",), [])


def test_every_kind_of_value_comes_back_as_it_went_in():
    name = "a'b\"c\\d\ne%s{}\u202eé"
    (row,) = rows(name)
    ((id_,),) = bulk.insert(Queue, FIELDS, [row], returning=("id",))
    queue = Queue.objects.get(id=id_)
    assert (queue.uuid, queue.name, queue.ready, queue.unacknowledged) == (row[0], name, 2**40, None)
    assert (queue.durable, queue.exclusive, queue.first_seen) == (True, False, NOW)
    facts = {"a": [1, None, "x'y"], "b": {"c": 1.5}}
    bulk.insert(
        QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), [(id_, "/", name, "gone", NOW, facts)]
    )
    assert QueueEvent.objects.get().details == facts


def test_an_update_can_set_a_value_to_nothing():
    ((id_,),) = bulk.insert(Queue, FIELDS, rows("q"), returning=("id",))
    bulk.update(Queue, ("ready", "quiet_until"), [(id_, None, NOW)])
    bulk.update(Queue, ("quiet_until",), [(id_, None)])
    queue = Queue.objects.get()
    assert (queue.ready, queue.quiet_until) == (None, None)


def test_among_finds_the_rows_with_these_keys_and_no_others():
    bulk.insert(Queue, FIELDS, rows("a", "b", "c"))
    found = Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), [("/", "a"), ("/", "z"), ("other", "b")]))
    assert [queue.name for queue in found] == ["a"]
