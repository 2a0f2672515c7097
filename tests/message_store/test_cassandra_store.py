"""What only the store on Cassandra has: time buckets, consistency levels, the cluster's clock, its schema."""

import io
import itertools
import multiprocessing
import socket
import socketserver
import ssl
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cassandra import ConsistencyLevel, OperationTimedOut
from cassandra.cluster import ResponseFuture
from cassandra.connection import DefaultEndPoint
from cassandra.policies import FallthroughRetryPolicy, SimpleConvictionPolicy
from cassandra.pool import Host
from cassandra.protocol import ErrorMessage
from django.core.management import CommandError, call_command

from guardian_store import _ids as ids
from guardian_store._ids import MAX_REST, TICKS_PER_SECOND, Place, place
from message_store.cassandra import buckets, cql, reading, schema, setup
from message_store.cassandra import cluster as cassandra_cluster
from message_store.cassandra import store as cassandra
from message_store.cassandra.checkup import examine
from message_store.cassandra.cluster import Connection
from message_store.cassandra.store import CassandraStore
from message_store.models import Application
from message_store.store import BatchTooLarge, MessageStore, NewMessage, StoredQueue, StoreUnavailable
from status import metrics, probes
from status.doctor import findings as doctor_findings
from status.doctor import services
from tests.message_store.test_message_store import HOUR, bodies, new, push
from tests.message_store.test_message_store_api import Program
from tests.support.toolbox import in_parallel, wait_until
from tools.cassandra import PrivateRing
from tools.processes import free_port

DAY = 24 * HOUR * TICKS_PER_SECOND


@pytest.fixture
def store(cassandra_store: CassandraStore) -> CassandraStore:
    return cassandra_store


@pytest.fixture
def queue(store: MessageStore) -> StoredQueue:
    return store.register("app", "queue", partitions=3)


@contextmanager
def statements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record the statements that are executed."""
    found: list[Any] = []
    one, several = Connection.execute, Connection.execute_all

    def execute(self: Connection, statement: Any, *rest: Any) -> Any:
        found.append(statement)
        return one(self, statement, *rest)

    def execute_all(self: Connection, some: Any) -> Any:
        some = list(some)
        found.extend(some)
        return several(self, some)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "execute", execute)
        patch.setattr(Connection, "execute_all", execute_all)
        yield found


def write_at(store: MessageStore, queue: StoredQueue, ticks: int, body: str, level: int = 0) -> uuid.UUID:
    """Write a message with a chosen id, in a bucket of this level."""
    rest = buckets.with_level(ids.random_rests(1)[0], level)
    message_id = ids.message_id(Place(ticks, rest))
    store.overwrite(queue, message_id, new(body))
    return message_id


# Buckets


def test_a_deep_queue_is_read_in_order_from_every_place(store, queue, monkeypatch):
    monkeypatch.setattr(buckets, "MESSAGES", 4)
    made = [message_id for again in range(40) for message_id in push(store, queue, *(f"{again} {n}" for n in range(5)))]
    used = {buckets.bucket_of(place(message_id)) for message_id in made}
    assert {bucket.level for bucket in used} == set(buckets.LEVELS)
    for begin in (0, 1, 50, 100, 199):
        at = place(made[begin])
        assert [message.id for message in store.read(queue, 1, start=at, limit=60)] == made[begin : begin + 60]
        down = [message.id for message in store.read(queue, 1, start=at, limit=60, descending=True)]
        assert down == made[max(0, begin - 59) : begin + 1][::-1]
    assert [message.id for message in store.read_ids(queue, [(1, one) for one in made])] == made
    assert store.count([queue]) == [200]


def test_messages_of_overlapping_buckets_are_merged(store, queue):
    now = store.now() - 10 * DAY
    written = [write_at(store, queue, now + number * DAY // 100, str(number), number % 8) for number in range(64)]
    assert [message.id for message in store.read(queue, 1, limit=100)] == written
    assert [message.id for message in store.read(queue, 1, limit=100, descending=True)] == written[::-1]
    middle = place(written[30])
    assert bodies(store, queue, start=middle, limit=3) == ["30", "31", "32"]
    assert bodies(store, queue, start=middle, limit=3, descending=True) == ["30", "29", "28"]


def test_a_message_is_found_after_years_without_one_in_few_statements(store, queue, monkeypatch):
    now = store.now()
    old, new_ = write_at(store, queue, now - 3000 * DAY, "old"), push(store, queue, "new")[0]
    for descending, start in ((False, place(old).next), (True, Place(place(new_).ticks - 1, MAX_REST))):
        with statements(monkeypatch) as executed:
            (found,) = bodies(store, queue, start=start, limit=10, descending=descending)
        assert found == ("old" if descending else "new")
        assert len(executed) <= 5


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("depth", [1, 8])
def test_overlapping_buckets_are_read_at_once_and_in_one_page_each(store, queue, monkeypatch, depth, descending):
    seconds, steps = store.now() // TICKS_PER_SECOND, itertools.count()
    monkeypatch.setattr(CassandraStore, "now", lambda self: seconds * TICKS_PER_SECOND + 1000 * next(steps))
    monkeypatch.setattr(buckets, "fills", lambda bucket, *_: bucket.level != buckets.FINEST)  # by each push
    monkeypatch.setattr(Connection, "execute_later", Connection.execute_all)  # the next push finds the mark
    made = [message_id for _ in range(depth) for message_id in push(store, queue, *map(str, range(100)))]
    assert len({buckets.bucket_of(place(message_id)) for message_id in made}) == depth
    requests, pages = [], []
    execute_all, fetch = Connection.execute_all, cassandra_cluster.Rows.__init__

    def counted(self: Connection, some: Any) -> Any:
        requests.append(some)
        return execute_all(self, some)

    def fetched(self: cassandra_cluster.Rows, *given: Any) -> None:
        pages.append(given)
        fetch(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "execute_all", counted)
        patch.setattr(cassandra_cluster.Rows, "__init__", fetched)
        found = store.read(queue, 1, start=place(made[-1 if descending else -100]), limit=100, descending=descending)
    assert [message.id for message in found] == (made[:-101:-1] if descending else made[-100:])
    assert len(requests) == 2
    assert len(pages) == 2 + depth


@pytest.mark.parametrize("consistency", ["weak", "strong"])
def test_a_reader_removes_empty_buckets_from_the_index(store, monkeypatch, consistency):
    queue = store.register("app", "queue", consistency=consistency)
    now = store.now()
    deleted = [write_at(store, queue, now - (100 - number) * DAY, "x", level=3) for number in range(40)]
    push(store, queue, "left")
    store.delete(queue, [(1, message_id) for message_id in deleted])
    # The entries were written just now, so that they may belong to a write that is not finished.
    monkeypatch.setattr(cassandra, "SETTLED_SECONDS", 0)
    costs = []
    for _ in range(2):
        with statements(monkeypatch) as executed:
            assert bodies(store, queue) == ["left"]
        costs.append(len(executed))
    assert costs[0] > 40, costs
    assert costs[1] < 6, costs
    again = write_at(store, queue, place(deleted[7]).ticks, "again", level=3)
    assert [message.id for message in store.read(queue, 1, limit=1)] == [again]


def test_a_late_answer_of_a_second_node_changes_no_page(store, queue, monkeypatch):
    """The second node knew fewer messages, and its answer comes after the first one's."""
    made = push(store, queue, *map(str, range(3)))
    bucket, connection = buckets.bucket_of(place(made[0])), store._connection
    statement = connection.bind(cql.MEASURE, [queue.key, 1, bucket.level, bucket.start], fetch=4)
    answer = ResponseFuture._set_result
    answers = []

    def keep(future: ResponseFuture, host: Any, sender: Any, pool: Any, response: Any) -> None:
        answers.append(response)
        answer(future, host, sender, pool, response)

    def take_twice(future: ResponseFuture, host: Any, sender: Any, pool: Any, response: Any) -> None:
        answer(future, host, sender, pool, response)
        answer(future, host, sender, None, answers[0])

    with monkeypatch.context() as patch:
        patch.setattr(ResponseFuture, "_set_result", keep)
        assert len(list(connection.execute(statement))) == 3
    push(store, queue, *map(str, range(20)))
    with monkeypatch.context() as patch:
        patch.setattr(ResponseFuture, "_set_result", take_twice)
        assert len(list(connection.execute(statement))) == 23
        (rows,) = connection.execute_all([statement])
        assert len(list(rows)) == 23


def test_a_push_takes_two_statements_once_its_bucket_is_in_the_index(store, queue, monkeypatch):
    push(store, queue, "first")
    with statements(monkeypatch) as executed:
        push(store, queue, *("x" * 100))
    assert len(executed) == 2


def test_the_messages_of_a_deep_queue_are_estimated_from_many_buckets(store, queue, monkeypatch):
    now = store.now() - 1000 * DAY
    monkeypatch.setattr(cassandra, "MEASURED_MESSAGES", 30)
    even = store.register("app", "even")
    for number in range(100):
        write_at(store, queue, now + max(0, number - 40) * DAY, "12345", level=3)
        write_at(store, even, now + number * DAY, "12345", level=3)
    assert (store.count([even]), store.stored_bytes([even])) == ([100], 500 + 100 * 110)
    monkeypatch.setattr(cassandra.random, "shuffle", lambda found: None)  # the large bucket is the first
    (estimate,) = store.count([queue])
    assert 100 < estimate < 250


# Batches and consistency


def test_a_batch_that_the_cluster_refuses_is_stored_not_at_all(store, queue):
    large = [NewMessage(bytes(900_000), partition, HOUR, "") for partition in (1, 2, 3, 1, 2, 3)]
    with pytest.raises(BatchTooLarge):
        store.push(queue, large)
    with pytest.raises(BatchTooLarge):
        store.push(queue, [new(bytes(cassandra.MAX_BATCH_BYTES + 1))])
    assert store.count([queue]) == [0]
    # In one partition, a batch is one write, and may be larger.
    largest = [new(bytes(cassandra.MAX_BATCH_BYTES // 8), content_type="x" * 255)] * 8
    assert len(store.push(queue, largest)) == 8


def test_a_batch_that_the_cluster_refuses_is_413_and_does_not_count(store, settings, db):
    settings.MESSAGE_STORE_MAX_BODY = 8 * 1024 * 1024
    program = Program()
    program.ok("POST", "", "queue_name=three&partitions=3")
    batch = {"messages": [{"body": "x" * 900_000, "partition": 1 + number % 3} for number in range(6)]}
    status, answer = program.ask("POST", "/three", batch)
    assert (status, list(answer["error_msg"])) == (413, ["messages"])
    assert program.bodies("/three?partitions=1,2,3") == []
    assert Application.objects.get(name="shop").stored_bytes == 0


def test_a_push_goes_to_no_bucket_that_a_reader_found_empty(store, queue):
    """In a weak queue, a replica may know that a bucket is empty before it knows that it is full."""
    push(store, queue, "1")
    (entry,) = [entry for _, entry in store._entries(queue)]
    later = store._connection.clock.microseconds() + 10
    for kind, edge in ((cql.START, entry.bucket.start), (cql.END, entry.bucket.end)):
        where = [queue.key, 1, kind, edge, entry.bucket.level, entry.lifetimes[0]]
        store._connection.execute(store._connection.bind(cql.MARK_EMPTY, [HOUR, later, *where]))
    push(store, queue, "2")
    assert bodies(store, queue) == ["2"]


def test_a_lightweight_transaction_is_sent_once(store, queue, monkeypatch):
    """If a connection is lost, the driver repeats other statements on the next node."""
    (made,) = push(store, queue, "x")
    calls: list[Callable[[], Any]] = [
        lambda: store.register("app", "another"),
        lambda: store.update("app", "another", partitions=2),
        lambda: store.set_positions(queue, "consumer", {1: made}),
        lambda: store.delete_positions(queue, "consumer"),
        lambda: store.remove("app", "another"),
    ]
    for call in calls:
        with statements(monkeypatch) as executed:
            call()
        (transaction,) = [one for one in executed if one.serial_consistency_level is not None]
        assert isinstance(transaction.retry_policy, FallthroughRetryPolicy)
        assert not transaction.is_idempotent


def test_the_removal_of_a_queue_takes_no_transaction_for_each_consumer(store, queue, monkeypatch):
    (made,) = push(store, queue, "x")
    for number in range(5):
        store.set_positions(queue, str(number), {1: made})
    with statements(monkeypatch) as executed:
        store.remove("app", "queue")
    assert len([one for one in executed if one.serial_consistency_level is not None]) == 1
    assert [store._positions(queue, str(number))[1] for number in range(5)] == [{}] * 5


def test_a_removal_that_fails_midway_leaves_nothing_to_see(store, monkeypatch):
    """What stays is not read, and does no harm to the next queue of the name."""
    one, several = Connection.execute, Connection.execute_all
    left = 0

    def use_up() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OperationTimedOut

    def execute(self: Connection, *given: Any) -> Any:
        use_up()
        return one(self, *given)

    def execute_all(self: Connection, some: Any) -> Any:
        use_up()
        return several(self, some)

    for step in itertools.count(2):  # the queue is removed by the second call
        queue = store.register("app", "queue", principals=["app:x"])
        assert store.queues("app") == store.queues_for_principal("app:x") == [queue]
        assert bodies(store, queue) == []
        assert store.positions(queue, "consumer") == {}
        (made,) = push(store, queue, "x")
        store.set_positions(queue, "consumer", {1: made})
        left = step
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "execute", execute)
            patch.setattr(Connection, "execute_all", execute_all)
            with suppress(StoreUnavailable):
                store.remove("app", "queue")
        assert store.queues("app") == store.queues_for_principal("app:x") == []
        if left >= 0:
            break
    assert step > 5


def test_an_unknown_outcome_of_a_transaction_is_unavailable():
    """Cassandra has an error for it that the driver doesn't know: CAS_WRITE_UNKNOWN."""
    text = b"CAS operation result is unknown"
    answer = struct.pack(">IH", 0x1700, len(text)) + text + struct.pack(">HII", ConsistencyLevel.SERIAL, 1, 2)
    error = ErrorMessage.recv_body(io.BytesIO(answer), cassandra_cluster.ProtocolVersion.V5).to_exception()
    with pytest.raises(StoreUnavailable, match="result is unknown"), cassandra_cluster.translated():
        raise error


@pytest.mark.parametrize(
    ("consistency", "level"),
    [
        ("weak", ConsistencyLevel.ONE),
        ("strong", ConsistencyLevel.LOCAL_QUORUM),
        ("very_strong", ConsistencyLevel.EACH_QUORUM),
    ],
)
def test_a_queues_consistency_is_that_of_its_reads_and_writes(store, monkeypatch, consistency, level):
    queue = store.register("app", "queue", consistency=consistency, partitions=2)
    calls: list[Callable[[], Any]] = [
        lambda: store.push(queue, [new("1"), new("2", 2)]),
        lambda: bodies(store, queue),
        lambda: store.read_ids(queue, [(1, made)]),
        lambda: store.overwrite(queue, made, new("3")),
        lambda: store.delete(queue, [(1, made)]),
        lambda: store.count([queue]),
    ]
    (made,) = push(store, queue, "0")
    for call in calls:
        with statements(monkeypatch) as executed:
            call()
        assert {statement.consistency_level for statement in executed} == {level}


# The clock


def test_ids_have_the_time_of_the_cluster_whatever_this_machines_clock_says(store, queue, settings, monkeypatch):
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + HOUR)
    monkeypatch.setattr(time, "time_ns", lambda: round((right() + HOUR) * 10**9))
    clock = cassandra_cluster.ClusterClock(store._connection.session)
    clock.measure(5)
    assert abs(clock.now() / TICKS_PER_SECOND - right()) < 5
    (made,) = push(store, queue, "x")
    assert abs(place(made).ticks / TICKS_PER_SECOND - right()) < 5
    assert store.read(queue, 1, before=store.now(), limit=1)
    # The same holds for the time of writes, by which the last of two writes wins.
    keyspace = settings.CASSANDRA_KEYSPACE
    rows = store._connection.session.execute(f"SELECT ticks, WRITETIME(body) FROM {keyspace}.messages")
    (written,) = [at for ticks, at in rows if ticks == place(made).ticks]
    assert abs(written / 10**6 - right()) < 5


@pytest.mark.parametrize(("late", "stored"), [([0, 0, 3], ["x"]), ([0, 3], [])])
def test_a_push_that_took_too_long_fails(store, queue, settings, monkeypatch, late, stored):
    """Readers may have passed its place. If this is known before the message is stored, it is not."""
    settings.MESSAGE_STORE_DELAY_SECONDS = 3.0
    right, seconds = cassandra.boot_seconds, iter(late)
    monkeypatch.setattr(cassandra, "boot_seconds", lambda: right() + next(seconds))
    with pytest.raises(StoreUnavailable, match="took longer than 2"):
        push(store, queue, "x")
    assert bodies(store, queue) == stored


def test_a_late_answer_does_not_change_the_time_of_a_node(store):
    clock = cassandra_cluster.ClusterClock(store._connection.session)
    assert clock.measure(5)
    ((host, known),) = clock._offsets.items()
    rows = store._connection.session.execute(cassandra_cluster._NOW).all()
    clock._take(rows, host, cassandra_cluster.boot_seconds() - 2)
    assert clock._offsets == {host: known}


def test_an_idle_process_asks_for_the_time_before_it_uses_it(store):
    clock = cassandra_cluster.ClusterClock(store._connection.session)
    assert clock.measure(5)
    right = clock.now()
    clock._offset += 100
    clock._measured_at -= HOUR
    for now in in_parallel(*[clock.now] * 4):
        assert abs(now - right) < 5 * TICKS_PER_SECOND


# One connection in a process


def test_a_forked_process_opens_a_connection_of_its_own(store, queue):
    push(store, queue, "parent")
    child = multiprocessing.get_context("fork").Process(target=lambda: push(store, queue, "child"))
    child.start()
    try:
        push(store, queue, "parent again")
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert sorted(bodies(store, queue)) == ["child", "parent", "parent again"]


# The schema, and a cluster that can't be used


def set_up() -> str:
    out = StringIO()
    call_command("message_store_schema", stdout=out)
    return out.getvalue()


def test_the_schema_is_created_once_and_upgraded(store, settings, monkeypatch):
    monkeypatch.setattr(cassandra_cluster, "RETRY_SECONDS", 0)
    settings.CASSANDRA_KEYSPACE = f"test_{uuid.uuid4().hex}"
    with pytest.raises(StoreUnavailable, match=r"has version 0 of the tables.*message_store_schema"):
        store.find("app", "queue")
    assert set_up().splitlines() == [
        f"Created the keyspace {settings.CASSANDRA_KEYSPACE} with 1 replicas in datacenter1.",
        f"Created the tables of {settings.CASSANDRA_KEYSPACE}: version 1.",
    ]
    assert set_up() == f"The tables of {settings.CASSANDRA_KEYSPACE} have version 1, which is current.\n"
    assert store.queues("app") == []
    with monkeypatch.context() as later:
        later.setattr(schema, "VERSION", 2)
        later.setattr(setup, "VERSION", 2)
        later.setitem(schema.UPGRADES, 2, ("ALTER TABLE queues ADD IF NOT EXISTS colour text",))
        with pytest.raises(StoreUnavailable, match=r"has version 1 of the tables, and this Guardian needs version 2"):
            Connection()
        assert set_up() == f"Upgraded the tables of {settings.CASSANDRA_KEYSPACE}: version 2.\n"
        Connection().cluster.shutdown()
    # During an upgrade, processes of the release before go on, and start.
    assert set_up().endswith(" have version 2, of a newer Guardian. This one needs version 1.\n")
    made = store.register("app", "queue")
    Connection().cluster.shutdown()
    assert store.queues("app") == [made]


def test_another_replication_is_refused(store, settings):
    settings.CASSANDRA_REPLICATION = "2"
    with pytest.raises(CommandError, match=r"has 1 replicas in datacenter1, but .* says 2 replicas.*ALTER KEYSPACE"):
        set_up()
    settings.CASSANDRA_KEYSPACE = "never_created"
    with pytest.raises(CommandError, match="datacenter1 has 1 nodes, too few for 2 replicas"):
        set_up()


UNUSABLE = pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("CASSANDRA_HOSTS", [f"127.0.0.1:{free_port()}"], "No Cassandra node answers"),
        ("CASSANDRA_HOSTS", ["no-such-host.invalid"], "Cassandra failed: UnresolvableContactPoints"),
        ("CASSANDRA_PASSWORD", "wrong", "username cassandra and/or password are incorrect"),
        ("CASSANDRA_DATACENTER", "elsewhere", "none is known in the data centre elsewhere"),
        ("CASSANDRA_KEYSPACE", "no_such_keyspace", "Run `manage.py message_store_schema`"),
    ],
)


@UNUSABLE
def test_a_cluster_that_cannot_be_used_is_unavailable(store, settings, name, value, reason):
    setattr(settings, name, value)
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match=reason):
            store.find("app", "queue")
    assert time.monotonic() - begun < 0.5, "the second call fails at once"
    (finding,) = services.check_message_store()
    assert finding.status is doctor_findings.Status.PROBLEM
    assert reason in finding.found
    assert not probes.Readiness({"message_store": probes._message_store}).answers()["message_store"]
    (nodes,) = metrics._message_store()
    assert [sample.value for sample in nodes.samples] == [0, 0]


def test_a_healthy_cluster_has_no_findings(store):
    findings = list(services.check_message_store())
    assert [finding.status for finding in findings] == [doctor_findings.Status.OK] * 2, findings
    assert "1 of 1 nodes answer" in findings[0].found
    assert probes.Readiness({"message_store": probes._message_store}).answers()["message_store"]
    nodes, difference = metrics._message_store()
    assert [sample.value for sample in nodes.samples] == [1, 0]
    assert difference.samples[0].value == 0


def test_nodes_of_other_data_centres_are_not_down(store):
    """A process connects to those of its own only."""
    nodes = store._connection.cluster.metadata
    other = Host(DefaultEndPoint("127.0.0.9"), SimpleConvictionPolicy)
    other.set_location_info("elsewhere", "rack1")
    nodes.add_or_return_host(other)
    try:
        cluster = examine()
    finally:
        nodes.remove_host(other)
    assert (cluster.up, cluster.down) == (1, [])


@contextmanager
def tls_proxy(address: tuple[str, int], certificate: Path) -> Iterator[int]:
    """Serve this address with TLS, too, at the returned port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def copy(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                to.sendall(data)
            to.shutdown(socket.SHUT_RDWR)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), context.wrap_socket(self.request, server_side=True) as near:
                far = socket.create_connection(address)
                threading.Thread(target=copy, args=(far, near), daemon=True).start()
                copy(near, far)
                far.close()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_connection_with_tls_needs_a_trusted_certificate(store, settings, certificate, monkeypatch):
    host, _, port = settings.CASSANDRA_HOSTS[0].rpartition(":")
    settings.CASSANDRA_TLS = True
    with tls_proxy((host, int(port)), certificate) as port:
        settings.CASSANDRA_HOSTS = [f"127.0.0.1:{port}"]
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            Connection()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        connection = Connection()
        try:
            assert connection.execute(connection.bind(cql.FIND_QUEUE, ["app", "none"])).one() is None
        finally:
            connection.cluster.shutdown()


def test_doctor_names_another_replication_and_clocks_that_differ(store, settings, monkeypatch):
    settings.CASSANDRA_REPLICATION = "3"
    settings.MESSAGE_STORE_DELAY_SECONDS = 3.0
    monkeypatch.setattr(cassandra_cluster.ClusterClock, "difference", lambda self: 1.5)
    _, replication, clocks = services.check_message_store()
    assert replication.found.endswith("has the replicas {'datacenter1': 1}, CASSANDRA_REPLICATION {'datacenter1': 3}")
    assert clocks.advice == ("Synchronize them by NTP. Above 1.0 s, a third of the delay, readers may miss messages.")


# A node that is away, slow or back, and three nodes


def seconds_to_find(store: CassandraStore, name: str) -> float:
    begun = time.monotonic()
    store.find("app", name)
    return time.monotonic() - begun


def is_available(store: CassandraStore, queue: StoredQueue) -> bool:
    return succeeds(lambda: store.find(queue.application, queue.name))


def succeeds(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StoreUnavailable:
        return False
    return True


@pytest.mark.soak
def test_with_one_node_of_three_all_goes_on_and_with_two_lost_only_weak_queues_do(settings):
    with PrivateRing() as ring:
        settings.MESSAGE_STORE, settings.CASSANDRA_HOSTS = "cassandra", ring.hosts.split(",")
        settings.MESSAGE_STORE_DELAY_SECONDS = 30.0  # nodes that just started on a busy machine are slow
        set_up()
        store = CassandraStore()
        queues = {level: store.register("app", level, consistency=level) for level in reading.LEVELS}
        ring.nodes[1].pause()
        for queue in queues.values():
            made = push(store, queue, "1", "2", "3")
            assert [message.id for message in store.read(queue, 1, limit=9)] == made
            wait_until(lambda: succeeds(lambda: store.set_positions(queue, "consumer", {1: made[0]})), 60)  # noqa: B023
            assert store.positions(queue, "consumer") == {1: made[0]}
        ring.nodes[0].pause()
        # No read of a quorum fails earlier until the node notices that the others are away, after about 18 s.
        assert min(seconds_to_find(store, "weak") for _ in range(3)) < cassandra_cluster.REQUEST_SECONDS
        push(store, store.find("app", "weak"), "4")
        ring.nodes[0].kill()
        weak = store.find("app", "weak")
        push(store, weak, "5")
        assert bodies(store, weak) == ["1", "2", "3", "4", "5"]
        for level in ("strong", "very_strong"):
            for call in (lambda: push(store, queues[level], "4"), lambda: bodies(store, queues[level])):  # noqa: B023
                with pytest.raises(StoreUnavailable):
                    call()
        ring.nodes[1].resume()
        wait_until(lambda: is_available(store, queues["strong"]), 60)
        assert bodies(store, queues["strong"])[:3] == ["1", "2", "3"]
        wait_until(lambda: "2 of 3 nodes answer" in next(iter(services.check_message_store())).found, 60)
        (found, *_) = services.check_message_store()
        assert "127.0.0.1" in found.advice
