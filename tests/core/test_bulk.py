"""Writing many rows in one statement, on either database."""

import uuid

import pytest
from django.db import connection
from django.utils import timezone

from core import bulk
from queues.models import Queue, QueueEvent

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite]

FIELDS = (
    "uuid", "vhost", "name", "type", "durable", "auto_delete", "exclusive", "node", "ready", "unacknowledged", "state",
    "misses", "notified_state", "recovery_notified", "merged", "registered", "unbounded", "first_seen", "last_seen",
)  # fmt: skip
NOW = timezone.now()


def rows(*names):
    return [
        (uuid.uuid4(), "/", name, "classic", True, False, False, "", 2**40, None, "ok", 0, "ok", False, 0, False, False,
         NOW, NOW)
        for name in names
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3000])
def test_any_number_of_rows_takes_one_statement(django_assert_num_queries, count):
    with django_assert_num_queries(1):
        returned = bulk.insert(Queue, FIELDS, rows(*(f"q{n}" for n in range(count))), returning=("id", "name"))
    assert len(returned) == Queue.objects.count() == count
    with django_assert_num_queries(1):
        bulk.update(Queue, ("ready", "state"), [(id_, 7, "warned") for id_, _ in returned])
    assert Queue.objects.filter(ready=7, state="warned").count() == count


def test_no_rows_take_no_statement(django_assert_num_queries):
    with django_assert_num_queries(0):
        bulk.insert(Queue, FIELDS, [])
        bulk.update(Queue, ("ready",), [])


def test_special_texts_are_stored_unchanged_beside_each_other():
    names = ["a\\", '"', "{b,c}", "NULL", "", " ", ",", "\\N", "'", "%s", "\t\n", "é\u202e"]
    facts = [{}, {"a": names[0]}, {"c": '"', "d": None}, {"b": [1.5, True]}]
    inserted = bulk.insert(Queue, FIELDS, rows(*names), returning=("id", "name"))
    assert sorted(name for _, name in inserted) == sorted(names)
    assert sorted(Queue.objects.values_list("name", flat=True)) == sorted(names)
    given = [(id_, "/", name, "gone", NOW, facts[n % 4]) for n, (id_, name) in enumerate(inserted)]
    bulk.insert(QueueEvent, ("queue", "vhost", "queue_name", "kind", "at", "details"), given)
    events = {one.queue_id: (one.queue_name, one.at, one.details) for one in QueueEvent.objects.all()}
    assert events == {id_: (name, at, details) for id_, _, name, _, at, details in given}
    bulk.update(
        Queue,
        ("ready", "quiet_until"),
        [(id_, n or None, NOW if n % 2 else None) for n, (id_, _) in enumerate(inserted)],
    )
    assert [Queue.objects.get(id=id_).ready for id_, _ in inserted[:3]] == [None, 1, 2]
    assert [Queue.objects.get(id=id_).quiet_until for id_, _ in inserted[:3]] == [None, NOW, None]


def test_values_equal_in_all_rows_are_written_to_each():
    inserted = bulk.insert(Queue, FIELDS, rows("a", "b", "c"), returning=("id",))
    bulk.update(
        Queue,
        ("ready", "notified_state", "quiet_until", "recovery_notified"),
        [(id_, 5, "warned", NOW, True) for (id_,) in inserted],
    )
    after = set(
        Queue.objects.values_list(
            "ready", "unacknowledged", "notified_state", "quiet_until", "recovery_notified", "merged"
        )
    )
    assert after == {(5, None, "warned", NOW, True, 0)}
    ids = [(id_,) for (id_,) in inserted]
    assert Queue.objects.filter(bulk.among(Queue, ("vhost", "notified_state"), [("/", "warned")] * 3)).count() == 3
    assert Queue.objects.filter(bulk.among(Queue, ("id",), ids[:1] * 2)).count() == 1


def test_an_update_can_set_null():
    ((id_,),) = bulk.insert(Queue, FIELDS, rows("q"), returning=("id",))
    bulk.update(Queue, ("ready", "quiet_until"), [(id_, None, NOW)])
    bulk.update(Queue, ("quiet_until",), [(id_, None)])
    queue = Queue.objects.get()
    assert (queue.ready, queue.quiet_until) == (None, None)


ODD = "a'b\"c\\d\ne%s{},\u202eé"


@pytest.mark.parametrize(
    "keys",
    [
        [("/", ODD)],
        [("/", ODD), ("/", ODD)],
        [("/", ODD), ("/", "z")],
        [("/", ODD), ("other", "b")],
        [("/", ODD), ("other", ODD)],
    ],
    ids=["one", "the same twice", "another name", "another vhost and name", "another vhost"],
)
def test_among_finds_exactly_the_rows_with_these_keys(keys):
    bulk.insert(Queue, FIELDS, rows(ODD, "b", "c"))
    found = Queue.objects.filter(bulk.among(Queue, ("vhost", "name"), keys))
    assert [queue.name for queue in found] == [ODD]


def test_postgresql_never_joins_every_row_with_every_key():
    if connection.vendor != "postgresql":
        pytest.skip("SQLite takes the index in any case")
    numbers = bulk.insert(Queue, FIELDS, rows(*(f"q{n}" for n in range(1000))), returning=("id", "vhost", "name"))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE queues_queue")  # its statistics say that no row is gone
    for by, keys in ((("id",), [row[:1] for row in numbers]), (("vhost", "name"), [row[1:] for row in numbers])):
        plan = Queue.objects.filter(bulk.among(Queue, by, keys), state="gone").explain()
        assert "Join" not in plan
        assert "Nested Loop" not in plan
