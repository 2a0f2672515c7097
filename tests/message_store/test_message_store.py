"""The contract of every message store. Add a new store to ``STORES``: it must pass the same tests."""

import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from guardian_store import _ids as ids
from guardian_store._ids import TICKS_PER_SECOND, Place, place
from message_store import queues, tasks
from message_store import store as stores
from message_store.cassandra.cluster import ClusterClock
from message_store.database import dialects
from message_store.database import store as database
from message_store.database.dialects import DIALECTS
from message_store.models import Discarded, MessageRow, PartitionRow, Position, PrincipalRow
from message_store.store import MessageStore, NewMessage, NoQueue, QueueExists, StoredQueue, StoreUnavailable
from tests.support.toolbox import BackgroundCall, in_background, in_parallel, wait_until_blocked

pytestmark = pytest.mark.sqlite

STORES = [pytest.param("database", marks=pytest.mark.django_db(transaction=True)), pytest.param("cassandra")]
DATABASE_STORE_ONLY = pytest.mark.parametrize("store", STORES[:1], indirect=True)

HOUR = 3600
ELSEWHERE = uuid.UUID("00000000-0000-1000-8000-010000000000")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> MessageStore:
    if request.param == "cassandra":
        found: MessageStore = request.getfixturevalue("cassandra_store")
        return found
    return database.DatabaseStore()


@pytest.fixture
def queue(store: MessageStore) -> StoredQueue:
    return store.register("app", "queue", partitions=3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the stores' clock this many seconds ahead."""
    right, on_the_server, in_cluster = time.time_ns, DIALECTS["postgresql"], ClusterClock.now

    def set_ahead(seconds: int) -> None:
        monkeypatch.setattr(ClusterClock, "now", lambda self: in_cluster(self) + seconds * TICKS_PER_SECOND)
        monkeypatch.setattr("guardian_store._ids.time.time_ns", lambda: right() + seconds * 1_000_000_000)
        ahead = replace(on_the_server, now=f"({on_the_server.now} + {seconds * TICKS_PER_SECOND})")
        monkeypatch.setitem(DIALECTS, "postgresql", ahead)

    return set_ahead


def new(body: bytes | str, partition: int = 1, ttl: int = HOUR, content_type: str = "text/plain") -> NewMessage:
    return NewMessage(body.encode() if isinstance(body, str) else body, partition, ttl, content_type)


def push(store: MessageStore, queue: StoredQueue, *bodies: str, partition: int = 1, ttl: int = HOUR) -> list[uuid.UUID]:
    return store.push(queue, [new(body, partition, ttl) for body in bodies])


def bodies(store: MessageStore, queue: StoredQueue, partition: int = 1, **options: Any) -> list[str]:
    return [message.body.decode() for message in store.read(queue, partition, **{"limit": 1000, **options})]


# Queues


def test_a_queue_is_found_as_it_was_registered(store):
    made = store.register(
        "app", "ünï/'\"", partitions=200, type="public", consistency="very_strong", principals=["app:x", "bid:a@b.org"]
    )
    assert (made.application, made.name, made.partitions) == ("app", "ünï/'\"", 200)
    assert (made.type, made.consistency, made.principals) == ("public", "very_strong", ("app:x", "bid:a@b.org"))
    assert abs(made.created.timestamp() - time.time()) < 60
    assert store.find("app", made.name) == made
    assert store.queues("app") == [made]


def test_a_queue_name_is_unique_within_its_application(store, queue):
    push(store, queue, "kept")
    with pytest.raises(QueueExists):
        store.register("app", "queue", partitions=9, principals=["app:x"])
    assert store.find("app", "queue") == queue
    assert store.register("other", "queue").key != queue.key
    assert bodies(store, queue) == ["kept"]


def test_concurrent_registrations_create_one_queue(store):
    made = in_parallel(*[lambda: store.register("app", "queue", principals=["app:x"])] * 6)
    assert [type(one) for one in made].count(QueueExists) == 5
    assert [one for one in made if isinstance(one, StoredQueue)] == [store.find("app", "queue")]


@pytest.mark.parametrize("name", ["Queue", "queue ", "", "other"])
def test_a_missing_queue_raises_no_queue(store, queue, name):
    for ask in (store.find, store.update, store.remove):
        with pytest.raises(NoQueue):
            ask("app", name)
    with pytest.raises(NoQueue):
        store.find("other", "queue")


def test_an_update_changes_only_the_given_fields(store, queue):
    changed = store.update("app", "queue", type="public", principals=["app:x"])
    assert changed == store.find("app", "queue")
    assert (changed.partitions, changed.type, changed.consistency) == (3, "public", "strong")
    assert (changed.principals, changed.created, changed.key) == (("app:x",), queue.created, queue.key)
    assert store.update("app", "queue", consistency="weak").principals == ("app:x",)
    assert store.update("app", "queue", principals=[]).principals == ()


def test_partitions_can_grow_but_not_shrink(store, queue):
    push(store, queue, "before", partition=3)
    assert store.update("app", "queue", partitions=5).partitions == 5
    assert store.update("app", "queue", partitions=4).partitions == 5
    push(store, queue, "after", partition=5)
    assert [bodies(store, queue, partition) for partition in range(1, 6)] == [[], [], ["before"], [], ["after"]]


def test_concurrent_updates_keep_each_others_changes(store, queue):
    given = [{"partitions": 4}, {"partitions": 7}, {"type": "public"}, {"principals": ["a:x"]}, {"principals": ["a:y"]}]
    made = in_parallel(*(lambda change=change: store.update("app", "queue", **change) for change in given))
    assert {type(one) for one in made} == {StoredQueue}, made
    found = store.find("app", "queue")
    assert (found.partitions, found.type) == (7, "public")
    listed = [store.queues_for_principal(principal) for principal in ("a:x", "a:y")]
    assert listed == ([[found], []] if found.principals == ("a:x",) else [[], [found]])


def test_queues_are_listed_in_byte_order_of_their_names(store):
    names = ["B", "a", "a-b", "a_b", "aa", "b", "é", "ﬀ", "😀", "Z", "10", "9"]
    for name in names:
        store.register("app", name)
    store.register("other", "c")
    ordered = sorted(names, key=str.encode)
    assert [queue.name for queue in store.queues("app")] == ordered
    assert [queue.name for queue in store.queues("app", start="a_b", limit=3)] == ["a_b", "aa", "b"]
    assert [queue.name for queue in store.queues("app", start="a-c", limit=1)] == ["a_b"]
    assert store.queues("app", start="😁") == store.queues("app", limit=0) == store.queues("nobody") == []


def test_queues_of_a_principal_are_found_in_every_application(store):
    for application, name in [("b", "x"), ("a", "z"), ("a", "y"), ("B", "x")]:
        store.register(application, name, principals=["app:other", "bid:me@example.org", "bid:me@example.org"])
    store.register("a", "x", principals=["bid:me@example.org.uk", "app:bid:me@example.org"])

    def named(**page: Any) -> list[tuple[str, str]]:
        return [(queue.application, queue.name) for queue in store.queues_for_principal("bid:me@example.org", **page)]

    assert named() == [("B", "x"), ("a", "y"), ("a", "z"), ("b", "x")]
    assert named(start=("a", "z"), limit=1) == [("a", "z")]
    store.update("a", "z", principals=["app:other"])
    store.update("a", "y", type="public")
    store.remove("b", "x")
    assert named() == [("B", "x"), ("a", "y")]
    assert store.queues_for_principal("app:other", start=("a", "z"), limit=5) == [store.find("a", "z")]


# Messages


def test_a_message_is_read_as_it_was_pushed(store, queue):
    pushed = [b"\x00\xff\xfe'\"%s%%\\", b"", "ü😀".encode(), bytes(range(256)) * 4096]
    made = store.push(queue, [new(body, 2, content_type=f"x/{number}") for number, body in enumerate(pushed)])
    read = store.read(queue, 2, limit=10)
    assert [(message.id, message.body) for message in read] == list(zip(made, pushed, strict=True))
    assert [message.content_type for message in read] == ["x/0", "x/1", "x/2", "x/3"]
    assert {message.partition for message in read} == {2}
    assert {type(message.body) for message in read} == {bytes}
    assert {message_id.version for message_id in made} == {1}
    assert store.push(queue, []) == []


def test_a_batch_keeps_its_order_across_partitions(store, queue):
    made = store.push(queue, [new(str(number), 3 - number % 3) for number in range(600)])
    assert len(set(made)) == 600
    for partition in (1, 2, 3):
        mine = [number for number in range(600) if 3 - number % 3 == partition]
        read = store.read(queue, partition, limit=1000)
        assert [message.body for message in read] == [str(number).encode() for number in mine]
        assert [message.id for message in read] == [made[number] for number in mine]
        assert sorted(read, key=lambda message: place(message.id)) == read


def test_an_id_has_the_time_of_the_push(store, queue):
    for number in (1, 500):
        began = ids.now()
        made = store.push(queue, [new("x")] * number)
        # PostgreSQL's clock counts microseconds. The clock of a Cassandra cluster is known to some milliseconds.
        began -= 10 if isinstance(store, database.DatabaseStore) else TICKS_PER_SECOND
        assert began <= place(made[0]).ticks <= place(made[-1]).ticks <= store.now() + number


def test_a_range_is_read_in_both_directions(store, queue):
    for _ in range(2):
        push(store, queue, "x", "y", "z", partition=2)
    known = [place(message.id) for message in store.read(queue, 2, limit=100)]
    starts = [
        None,
        *known,
        *(Place(at.ticks, 0) for at in known),
        *(at.next for at in known),
    ]
    starts += [Place(ids.MIN_TICKS, 0), Place(ids.MAX_TICKS, ids.MAX_REST)]
    for start in starts:
        for before in (None, known[0].ticks, known[5].ticks, known[-1].ticks + 1):
            for limit in (1, 5, 100):
                below = [at for at in known if before is None or at.ticks < before]
                up = [at for at in below if start is None or at >= start][:limit]
                down = [at for at in reversed(below) if start is None or at <= start][:limit]
                options: dict[str, Any] = {"start": start, "before": before, "limit": limit}
                assert [place(message.id) for message in store.read(queue, 2, **options)] == up
                assert [place(message.id) for message in store.read(queue, 2, descending=True, **options)] == down


def test_messages_are_read_by_id_in_the_requested_order(store, queue):
    one, two = push(store, queue, "1", "2")
    (three,) = push(store, queue, "3", partition=3)
    (alien,) = push(store, store.register("app", "other", partitions=3), "4")
    wanted = [(3, three), (1, alien), (1, two), (2, one), (1, three), (200, one), (1, ELSEWHERE), (1, one)]
    read = store.read_ids(queue, wanted)
    assert [(message.partition, message.id, message.body) for message in read] == [
        (3, three, b"3"),
        (1, two, b"2"),
        (1, one, b"1"),
    ]
    assert store.read_ids(queue, []) == []


def test_a_thousand_ids_are_read_and_deleted_in_one_call(store, queue):
    made = store.push(queue, [new(str(number)) for number in range(1001)])
    wanted = [(1, message_id) for message_id in reversed(made[1:])]
    assert [message.id for message in store.read_ids(queue, wanted)] == made[:0:-1]
    store.delete(queue, wanted)
    assert bodies(store, queue) == ["0"]


def test_a_read_ends_with_the_message_that_reaches_the_limit_of_bytes(store, queue, clock):
    push(store, queue, "x" * 99, ttl=10)
    made = push(store, queue, "1" * 20, "2" * 20, "3" * 20, "4" * 100, "5")
    clock(11)

    def read(max_bytes, limit=9, descending=False):
        found = store.read(queue, 1, limit=limit, max_bytes=max_bytes, descending=descending)
        return [message.id for message in found]

    # The content type counts 10 bytes.
    assert [read(most) for most in (1, 30, 31, 90, 91)] == [made[:count] for count in (1, 1, 2, 3, 4)]
    assert (read(1000), read(90, limit=2)) == (made, made[:2])
    assert [read(most, descending=True) for most in (1, 12, 122)] == [made[: -count - 1 : -1] for count in (1, 2, 3)]


def test_only_the_named_messages_are_deleted(store, queue):
    one, two, three = push(store, queue, "1", "2", "3")
    (twin,) = push(store, store.register("app", "other"), "4")
    store.delete(queue, [(1, two), (2, one), (1, ELSEWHERE), (1, twin)])
    store.delete(queue, [(1, two)])
    store.delete(queue, [])
    assert bodies(store, queue) == ["1", "3"]
    assert bodies(store, store.find("app", "other")) == ["4"]
    assert [message.id for message in store.read(queue, 1, limit=9)] == [one, three]


def test_an_overwritten_message_keeps_its_id_and_place(store, queue):
    one, two, three = push(store, queue, "1", "2", "3")
    store.overwrite(queue, two, NewMessage(b"\x00", 1, HOUR, "x/y"))
    assert [message.id for message in store.read(queue, 1, limit=9)] == [one, two, three]
    (read,) = store.read_ids(queue, [(1, two)])
    assert (read.body, read.content_type) == (b"\x00", "x/y")
    store.overwrite(queue, two, new("elsewhere", 2))
    assert bodies(store, queue, 2) == ["elsewhere"]
    assert bodies(store, queue) == ["1", "\x00", "3"]


def test_a_message_can_be_written_with_a_chosen_id(store, queue):
    (pushed,) = push(store, queue, "pushed")
    early, late = (ids.message_id(Place(at, 1 << 63)) for at in (ids.MIN_TICKS, ids.MAX_TICKS))
    store.overwrite(queue, late, new("late"))
    store.overwrite(queue, early, new("early"))
    assert [message.id for message in store.read(queue, 1, limit=9)] == [early, pushed, late]
    (after,) = push(store, queue, "after")
    assert abs(after.time - pushed.time) < 600 * TICKS_PER_SECOND, "a chosen id does not move the clock"


@DATABASE_STORE_ONLY
def test_a_pushed_message_comes_after_one_of_the_near_future(store, queue):
    store.overwrite(queue, ids.message_id(Place(store.now() + 30 * TICKS_PER_SECOND, 1 << 63)), new("near"))
    push(store, queue, "later")
    assert bodies(store, queue) == ["near", "later"]


def test_messages_of_many_queues_are_counted_in_one_call(store, queue):
    other, gone = store.register("app", "other"), store.register("app", "gone")
    store.push(queue, [new(str(number), 1 + number % 3) for number in range(7)])
    push(store, other, "1")
    push(store, gone, "1")
    store.remove("app", "gone")
    assert store.count([other, queue, gone, other]) == [1, 7, 0, 1]
    assert store.count([]) == []


# Expiry


def test_expired_messages_are_not_returned(store, queue, clock):
    soon = push(store, queue, "soon", ttl=60)
    late = push(store, queue, "late", ttl=120)
    push(store, queue, "at once", ttl=0)
    clock(59)
    assert bodies(store, queue) == ["soon", "late"]
    clock(61)
    assert bodies(store, queue) == bodies(store, queue, descending=True) == ["late"]
    assert [message.id for message in store.read_ids(queue, [(1, soon[0]), (1, late[0])])] == late
    assert store.count([queue]) == [1]
    clock(121)
    assert bodies(store, queue) == store.read_ids(queue, [(1, late[0])]) == []
    assert store.count([queue]) == [0]


def test_the_bytes_of_queues_are_those_of_their_readable_messages(store, queue, clock):
    second, others = store.register("app", "second"), store.register("other", "queue")
    push(store, queue, "12345", "é", partition=2)
    deleted = push(store, queue, "x" * 100)
    store.push(second, [new("1" * 1000, ttl=60), new("7" * 20)])
    push(store, others, "12345678")
    store.delete(queue, [(1, deleted[0])])
    # For each, 10 bytes of the content type and 100 more count.
    assert [store.stored_bytes(some) for some in ([queue, second], [others], [])] == [1027 + 4 * 110, 8 + 110, 0]
    clock(61)
    assert store.stored_bytes([queue, second]) == 27 + 3 * 110
    store.remove("app", "second")
    assert store.stored_bytes([queue, second]) == 7 + 2 * 110


def test_a_limit_does_not_count_what_has_expired(store, queue):
    push(store, queue, "1", ttl=0)
    push(store, queue, "2")
    push(store, queue, "3", ttl=0)
    push(store, queue, "4")
    assert bodies(store, queue, limit=2) == ["2", "4"]


def test_overwriting_sets_a_new_ttl(store, queue, clock):
    one, two = push(store, queue, "1", "2", ttl=60)
    store.overwrite(queue, one, new("longer", ttl=HOUR))
    store.overwrite(queue, two, new("shorter", ttl=0))
    assert bodies(store, queue) == ["longer"]
    clock(61)
    store.remove_expired(10)
    assert bodies(store, queue) == ["longer"]


def test_the_task_removes_all_expired_messages(store, queue, monkeypatch):
    monkeypatch.setattr(tasks, "BATCH_SIZE", 3)
    monkeypatch.setattr(tasks, "store", lambda: store)
    store.push(queue, [new("x", 1 + number % 3, ttl=0) for number in range(10)])
    push(store, queue, "kept")
    tasks.remove_expired()
    assert store.remove_expired(10) == 0
    assert bodies(store, queue) == ["kept"]


# The order of ids


def test_ids_increase_when_the_clock_is_set_back(store, queue, clock):
    made = push(store, queue, "1", "2")
    for number, ahead in enumerate((HOUR, -HOUR, 0, -10 * HOUR)):
        clock(ahead)
        made += push(store, queue, *(f"{number} {again}" for again in range(3)))
        made += push(store, queue, f"{number} last")
    assert sorted(made, key=place) == made
    assert len(set(made)) == len(made)
    assert [message.id for message in store.read(queue, 1, limit=100)] == made


@DATABASE_STORE_ONLY
def test_each_partition_has_a_clock_of_its_own(store, queue, clock):
    clock(HOUR)
    (made,) = push(store, queue, "x")
    clock(0)
    (other,) = push(store, queue, "x", partition=2)
    assert place(other).ticks < place(made).ticks


def test_a_reader_that_continues_from_its_last_id_misses_nothing(store, queue, settings):
    """Four threads write to two partitions; one reads each partition from its last id."""
    settings.MESSAGE_STORE_DELAY_SECONDS = 0.0 if isinstance(store, database.DatabaseStore) else 3.0
    rounds, seen, done = 25, {1: [], 2: []}, threading.Event()
    written: list[list[uuid.UUID]] = []

    def write(number: int) -> None:
        for again in range(rounds):
            partitions = [1, 2, 1] if number % 2 else [2, 1, 2]
            written.append(store.push(queue, [new("x", partition) for partition in partitions]))
            if again % 5 == 4:
                store.push(queue, [new("expired already", ttl=-60)])

    def follow() -> None:
        while True:
            before = queues.visible_before(store)
            ending = done.is_set() and (before is None or before > last)
            for partition, read in seen.items():
                start = place(read[-1]).next if read else None
                found = store.read(queue, partition, start=start, before=before, limit=7)
                read += [message.id for message in found]
            if ending and all(
                not store.read(queue, partition, start=place(read[-1]).next, limit=1)
                for partition, read in seen.items()
            ):
                return

    last = 0

    def writers() -> list[Any]:
        nonlocal last
        try:
            return in_parallel(*(lambda number=number: write(number) for number in range(4)))
        finally:
            last = store.now()
            done.set()

    assert in_parallel(writers, follow) == [[None] * 4, None]
    everything = [message_id for made in written for message_id in made]
    assert len(everything) == len(set(everything)) == 4 * rounds * 3
    for partition, read in seen.items():
        assert [message.id for message in store.read(queue, partition, limit=1000)] == read
    assert {*seen[1], *seen[2]} == set(everything)


def test_batches_over_the_same_partitions_do_not_deadlock(store, queue):
    def write(partitions: list[int]) -> None:
        for _ in range(15):
            store.push(queue, [new("x", partition) for partition in partitions])

    assert in_parallel(*(lambda order=order: write(order) for order in ([1, 2, 3], [3, 2, 1], [2, 3, 1]))) == [None] * 3
    assert store.count([queue]) == [135]


# Removal and truncation


def test_a_removed_queue_raises_no_queue_for_old_references(store, queue):
    (made,) = push(store, queue, "1")
    store.set_positions(queue, "consumer", {1: made})
    store.remove("app", "queue")
    assert store.read(queue, 1, limit=1) == store.read_ids(queue, [(1, made)]) == store.queues("app") == []
    assert store.positions(queue, "consumer") == {}
    assert list(store.consumers(queue)) == []
    store.delete(queue, [(1, made)])
    store.delete_positions(queue, "consumer")
    for late in (
        lambda: push(store, queue, "late"),
        lambda: store.overwrite(queue, made, new("late")),
        lambda: store.set_positions(queue, "consumer", {1: made}),
    ):
        with pytest.raises(NoQueue):
            late()
    again = store.register("app", "queue")
    assert bodies(store, again) == []
    assert store.positions(again, "consumer") == {}
    assert again.key != queue.key


def test_writes_during_a_removal_leave_nothing_behind(store, queue):
    """Concurrent pushes, positions and truncations either succeed or raise NoQueue."""

    def repeat_until_no_queue(call: Callable[[], Any]) -> str:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                call()
            except NoQueue:
                return "no queue"
        return "timeout"

    (made,) = push(store, queue, "x")
    assert in_parallel(
        lambda: repeat_until_no_queue(lambda: push(store, queue, "1", "2")),
        lambda: repeat_until_no_queue(lambda: store.set_positions(queue, "consumer", {1: made, 2: made})),
        lambda: store.remove("app", "queue"),
    ) == ["no queue", "no queue", None]
    assert store.queues("app") == []
    assert store.count([queue]) == [0]


# Positions


def test_positions_are_stored_per_consumer_and_partition(store, queue):
    one, two = push(store, queue, "1", "2")
    (three,) = push(store, queue, "3", partition=3)
    store.set_positions(queue, "b", {1: one, 3: three})
    store.set_positions(queue, "a", {1: one})
    store.set_positions(queue, "b", {1: two})
    store.set_positions(queue, "c", {})
    store.set_positions(store.register("app", "other"), "b", {1: one, 2: one})
    assert store.positions(queue, "b") == {1: two, 3: three}
    assert store.positions(queue, "a") == {1: one}
    assert store.positions(queue, "nobody") == {}
    assert list(store.consumers(queue)) == ["a", "b"]
    store.delete_positions(queue, "b")
    store.delete_positions(queue, "nobody")
    assert list(store.consumers(queue)) == ["a"]
    store.set_positions(queue, "a", {1: ELSEWHERE})
    assert store.positions(queue, "a") == {1: ELSEWHERE}


def test_positions_of_all_partitions_are_set_in_one_call(store):
    queue = store.register("app", "queue", partitions=200)
    wanted = {partition: uuid.UUID(int=ELSEWHERE.int + partition) for partition in range(1, 201)}
    together = in_parallel(*[lambda: store.set_positions(queue, "consumer", wanted)] * 3)
    assert together == [None] * 3
    assert store.positions(queue, "consumer") == wanted


def test_a_position_advances_only_from_its_current_value(store, queue):
    one, two, three = push(store, queue, "1", "2", "3")
    assert store.advance_positions(queue, "consumer", {1: (None, one), 2: (None, one)}) == {1, 2}
    assert store.advance_positions(queue, "consumer", {1: (two, three), 2: (one, two), 3: (None, one)}) == {2, 3}
    assert store.advance_positions(queue, "consumer", {1: (None, three), 3: (two, three)}) == set()
    assert store.advance_positions(queue, "other", {1: (one, two)}) == store.advance_positions(queue, "x", {}) == set()
    assert store.positions(queue, "consumer") == {1: one, 2: two, 3: one}
    assert list(store.consumers(queue)) == ["consumer"]
    moves = [{partition: (at, three) for partition, at in ((1, one), (2, two), (3, one))}] * 4
    moved = in_parallel(*(lambda move=move: store.advance_positions(queue, "consumer", move) for move in moves))
    assert sorted(partition for some in moved for partition in some) == [1, 2, 3], moved
    store.remove("app", "queue")
    for move in ({1: (None, one)}, {1: (one, two)}):
        with pytest.raises(NoQueue):
            store.advance_positions(queue, "consumer", move)


# The database store


@DATABASE_STORE_ONLY
def test_a_position_written_during_a_removal_raises_no_queue(store, queue):
    store.set_positions(queue, "consumer", {1: ELSEWHERE})
    late: list[BackgroundCall] = []

    def write_first(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if sql.startswith('DELETE FROM "message_store_position"') and not late:
            late.append(in_background(store.set_positions, queue, "consumer", {1: ELSEWHERE, 2: ELSEWHERE}))
            late.append(in_background(store.advance_positions, queue, "consumer", {3: (None, ELSEWHERE)}))
            for one in late:
                wait_until_blocked(one)
        return execute(sql, *rest)

    with connection.execute_wrapper(write_first):
        store.remove("app", "queue")
    assert [type(one.exception(30)) for one in late] == [NoQueue, NoQueue]


@DATABASE_STORE_ONLY
def test_positions_are_locked_in_partition_order(store, queue):
    """Whatever order the rows have on disk, and whatever plan the database chooses."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    calls: list[Callable[[str], Any]] = [
        lambda consumer: store.set_positions(queue, consumer, {2: ELSEWHERE, 1: ELSEWHERE}),
        lambda consumer: store.advance_positions(queue, consumer, dict.fromkeys((2, 1), (ELSEWHERE, ELSEWHERE))),
        lambda consumer: store.delete_positions(queue, consumer),
        lambda consumer: store.remove("app", "queue"),
    ]
    free = "SELECT FROM message_store_position WHERE consumer = %s AND partition = %s FOR UPDATE NOWAIT"

    def without_other_plans(call: Callable[[], Any]) -> None:
        with connection.cursor() as cursor:
            for way in ("nestloop", "mergejoin", "indexscan", "bitmapscan"):
                cursor.execute(f"SET enable_{way} = off")
        call()

    for number, call in enumerate(calls):
        consumer = str(number)
        for partition in (2, 1):
            store.set_positions(queue, consumer, {partition: ELSEWHERE})
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(free, [consumer, 1])
            waiting = in_background(lambda call=call, consumer=consumer: without_other_plans(lambda: call(consumer)))
            wait_until_blocked(waiting)
            cursor.execute(free, [consumer, 2])
        waiting.result(30)


class Other(database.DatabaseStore):
    pass


def test_the_store_of_the_settings_is_created_once_per_process(settings, monkeypatch):
    monkeypatch.setitem(stores.STORES, "other", f"{__name__}.Other")
    settings.MESSAGE_STORE = "other"
    assert stores.store() is stores.store()
    assert type(stores.store()) is Other
    settings.MESSAGE_STORE = "database"
    assert type(stores.store()) is database.DatabaseStore
    assert stores.store().delay == 0


TRANSACTIONS = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE SAVEPOINT")


@DATABASE_STORE_ONLY
def test_the_number_of_statements_does_not_grow_with_the_messages(store, queue):
    def statements(call: Callable[[], Any]) -> int:
        with CaptureQueriesContext(connection) as captured:
            call()
        return len([one for one in captured if not one["sql"].startswith(TRANSACTIONS)])

    for number in (1, 1500):
        batch = [new("x", 1 + again % 3) for again in range(number)]
        assert statements(lambda batch=batch: store.push(queue, batch)) == 2
        assert statements(lambda number=number: store.read(queue, 1, limit=number)) == 1
    made = [(1, message.id) for message in store.read(queue, 1, limit=1000)]
    assert statements(lambda: store.read_ids(queue, made)) == 1
    assert statements(lambda: store.delete(queue, made)) == 1
    assert statements(lambda: store.find("app", "queue")) == 1
    assert statements(lambda: store.register("app", "other")) == 2, "one finds no queue of this name"
    assert statements(lambda: store.count(store.queues("app"))) == 2


def test_partitions_with_messages_from_a_place_on_are_waiting(store, queue, clock):
    queue = store.update(queue.application, queue.name, partitions=5)
    [first] = push(store, queue, "1", partition=2, ttl=10)
    [second] = push(store, queue, "2", partition=3)
    push(store, queue, "3", partition=4)

    def waiting(start, **options):
        return sorted(store.waiting(queue, dict.fromkeys((1, 2, 3, 5), start), **options))

    assert waiting(None) == [2, 3]
    assert waiting(place(first)) == [2, 3]
    assert waiting(place(first).next) == [3]
    assert waiting(None, before=place(second).ticks) == [2]
    assert waiting(place(second).next) == []
    clock(20)
    assert waiting(None) == [3]


def plan_of(call: Callable[[], Any]) -> str:
    """Return the database's plan for the only statement of this call, with an index if one serves."""
    with CaptureQueriesContext(connection) as captured:
        call()
    (sql,) = [one["sql"] for one in captured]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET enable_seqscan = off")
            cursor.execute("SET enable_bitmapscan = off")
        cursor.execute(f"{'EXPLAIN QUERY PLAN' if connection.vendor == 'sqlite' else 'EXPLAIN'} {sql}")
        plan = "\n".join(str(line) for line in cursor.fetchall())
    connection.close()
    assert "Sort" not in plan
    assert "TEMP B-TREE" not in plan
    return plan.replace(", ", ",")


@DATABASE_STORE_ONLY
def test_one_statement_finds_waiting_partitions_without_sorting(store, queue):
    push(store, queue, "1")
    starts = {number: Place(0, 0) for number in range(1, 201)}
    assert "(ticks,rest)" in plan_of(lambda: store.waiting(queue, starts))


@DATABASE_STORE_ONLY
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("max_bytes", [None, 100])
def test_reading_uses_the_primary_key_without_sorting(store, queue, descending, max_bytes):
    if max_bytes and connection.vendor == "sqlite":
        pytest.skip("SQLite sorts the sizes")
    push(store, queue, "1")
    options: dict[str, Any] = {"start": Place(0, 0), "before": ids.MAX_TICKS, "limit": 10, "descending": descending}
    plan = plan_of(lambda: store.read(queue, 1, max_bytes=max_bytes, **options))
    if connection.vendor == "sqlite":
        assert "sqlite_autoindex_message_store_messagerow_1 (contents=? AND partition=? AND (ticks,rest)" in plan
    else:
        conditions = [line for line in plan.splitlines() if "Index Cond: ((contents" in line]
        assert len(conditions) == (1 if max_bytes is None else 2)
        assert all("(partition = 1)" in one and "ROW(ticks,rest)" in one for one in conditions)


@DATABASE_STORE_ONLY
def test_messages_of_removed_queues_are_deleted(store, queue, clock):
    store.push(queue, [new("x", 1 + number % 3) for number in range(10)])
    other = store.register("app", "other", principals=["app:x"])
    store.set_positions(other, "consumer", {1: ELSEWHERE})
    push(store, other, "1", "2")
    store.remove("app", "queue")
    queue = store.register("app", "queue")
    push(store, queue, "kept")
    store.remove("app", "other")
    assert MessageRow.objects.count() == 13
    assert [store.remove_expired(5) for _ in range(3)] == [5, 5, 2]
    assert (MessageRow.objects.count(), bodies(store, queue)) == (1, ["kept"])
    assert PartitionRow.objects.count() == 1
    assert not Position.objects.exists()
    assert not PrincipalRow.objects.exists()


@DATABASE_STORE_ONLY
def test_messages_of_more_removed_queues_than_a_batch_are_deleted_in_one_call(store, monkeypatch):
    monkeypatch.setattr(database, "DISCARDED_BATCH", 1)
    for name in ("first", "second"):
        push(store, store.register("app", name), "1")
        store.remove("app", name)
    assert store.remove_expired(10) == 2


@DATABASE_STORE_ONLY
def test_messages_of_a_push_during_a_removal_are_deleted_later(store, queue, clock):
    push(store, queue, "1")
    left = MessageRow.objects.get()
    store.remove("app", "queue")
    assert store.remove_expired(10) == 1
    left.save(force_insert=True)
    PartitionRow.objects.create(contents=left.contents, partition=1, last=0)
    assert store.remove_expired(10) == 0
    assert store.register("app", "queue").key
    assert bodies(store, store.find("app", "queue")) == [], "no other queue reuses its key"
    clock(database.SECOND_SWEEP_SECONDS + 1)
    assert store.remove_expired(10) == 1
    assert not MessageRow.objects.exists()
    assert not PartitionRow.objects.exists()
    assert not Discarded.objects.exists()


def test_an_error_of_a_statement_is_not_an_outage():
    with pytest.raises(IntegrityError), dialects.as_store_errors():
        raise IntegrityError("duplicate key")


@DATABASE_STORE_ONLY
def test_a_batch_that_fails_halfway_stores_nothing(store, queue, clock, monkeypatch):
    (made,) = push(store, queue, "1")
    monkeypatch.setattr(database, "random_rests", lambda number: [1 << 63] * number)
    before = PartitionRow.objects.get(partition=1).last + HOUR * TICKS_PER_SECOND
    PartitionRow.objects.update(last=before)
    store.overwrite(queue, ids.message_id(Place(before + 5, 1 << 63)), new("in the way"))
    with pytest.raises(StoreUnavailable):
        store.push(queue, [new(str(number), 1 + number % 2) for number in range(20)])
    assert bodies(store, queue) == ["1", "in the way"]
    assert list(PartitionRow.objects.values_list("partition", "last")) == [(1, before)]
    assert place(made).ticks < before


@DATABASE_STORE_ONLY
def test_an_unavailable_database_is_reported_and_reconnected(store, queue):
    push(store, queue, "before")
    calls: list[Callable[[], Any]] = [
        lambda: push(store, queue, "late"),
        lambda: store.set_positions(queue, "consumer", {1: ELSEWHERE}),
    ]
    for call in calls:
        with database_unavailable(), pytest.raises(StoreUnavailable):
            call()
    assert bodies(store, queue) == ["before"]
    assert store.positions(queue, "consumer") == {}
    push(store, queue, "after")
    assert bodies(store, queue) == ["before", "after"]


@contextmanager
def database_unavailable() -> Iterator[None]:
    """Terminate the connection to PostgreSQL, or lock the SQLite database."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
        with connection.copy().cursor() as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
