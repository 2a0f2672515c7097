"""This process's connection to the Cassandra cluster of the settings, and the cluster's clock.

A connection has threads, which a fork doesn't copy: each process opens its own, when it first needs it.
"""

import logging
import os
import ssl
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from cassandra import ConsistencyLevel, DriverException, InvalidRequest, OperationTimedOut, ProtocolVersion
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import (
    EXEC_PROFILE_DEFAULT,
    Cluster,
    ExecutionProfile,
    NoHostAvailable,
    ResponseFuture,
    ResultSet,
    Session,
)
from cassandra.connection import ConnectionBusy, ConnectionException
from cassandra.policies import (
    ConstantSpeculativeExecutionPolicy,
    DCAwareRoundRobinPolicy,
    ExponentialReconnectionPolicy,
    TokenAwarePolicy,
)
from cassandra.protocol import ErrorMessage
from cassandra.query import BatchStatement, BatchType, BoundStatement, PreparedStatement, tuple_factory
from django.conf import settings

from guardian_store._ids import TICKS_PER_SECOND, UUID_EPOCH_OFFSET
from message_store.cassandra import cql as cassandra_cql
from message_store.cassandra import schema
from message_store.cassandra.settings import contact_points
from message_store.store import BatchTooLarge, StoreUnavailable

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 3.0
CONNECT_SECONDS = 2.0

HEDGE_SECONDS = 0.3
"""A read or write that has no answer for this time is sent to another node, too: a paused node delays nothing else."""

HEDGES = 2
"""The most other nodes that get it, one after the other: with three nodes, one that runs is among them."""

HEARTBEAT_SECONDS = 2
"""The interval of heartbeats on idle connections. A node that doesn't answer one is not asked any more."""

RETRY_SECONDS = 1.0
"""After a failed connection, the next is tried after this time. Until then calls fail at once."""

PREPARE_ATTEMPTS = 3

CONCURRENCY = 64
"""Statements in flight for one call."""

MEASURE_SECONDS = 10.0
"""The interval of comparing this machine's clock with those of the nodes."""

STALE_SECONDS = 60.0
"""After this time without a comparison, a call waits for one: two clocks differ by seconds after a night."""

LATE_SECONDS = 0.5
"""An answer that takes longer doesn't replace the known time of a node: it may be wrong by half of this time."""

ERRORS = (DriverException, ErrorMessage, ConnectionException, ConnectionBusy, NoHostAvailable, OSError)
"""What the driver raises. Some errors of nodes and connections are not DriverExceptions."""

SETTINGS = (
    "CASSANDRA_HOSTS", "CASSANDRA_KEYSPACE", "CASSANDRA_DATACENTER", "CASSANDRA_USER", "CASSANDRA_PASSWORD",
    "CASSANDRA_TLS",
)  # fmt: skip

_NOW = "SELECT now() FROM system.local"


def boot_seconds() -> float:
    """Return the seconds since this machine's start: nobody can set this clock, and a suspension counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClusterClock:
    """The median of the nodes' clocks.

    The time of messages comes from it, so the clocks of web processes don't matter, nor that of a single node of three.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._comparing = threading.Lock()
        self._answered = threading.Condition()
        self._offsets: dict[Any, float] = {}
        self._offset = time.time() - boot_seconds()
        self._measured_at = 0.0
        self._last = 0

    def now(self) -> int:
        """Return the cluster's time in ticks since 1970."""
        if self._age() > MEASURE_SECONDS:
            with self._comparing:  # other threads don't use a stale time meanwhile
                age = self._age()
                if age > MEASURE_SECONDS:
                    self.measure(CONNECT_SECONDS if age > STALE_SECONDS else 0)
        return round((boot_seconds() + self._offset) * TICKS_PER_SECOND)

    def microseconds(self) -> int:
        """Return the cluster's time for a write. It increases with each call: this process's last write wins."""
        with self._lock:
            self._last = max(self._last + 1, round((boot_seconds() + self._offset) * 1_000_000))
            return self._last

    def measure(self, wait: float = 0) -> bool:
        """Ask each node for its time. The answers count as soon as they come.

        With ``wait``, wait up to this many seconds for new answers of all. Return whether the time of a node is known.
        """
        hosts = [host for host in self._session.cluster.metadata.all_hosts() if host.is_up]
        known = list(self._offsets.items())
        self._offsets = {} if wait else {host: offset for host, offset in known if host in hosts}
        futures = []
        for host in hosts:
            try:
                future = self._session.execute_async(_NOW, timeout=CONNECT_SECONDS, host=host)
            except ERRORS:  # it went down just now
                continue
            future.add_callbacks(self._take, _ignore, callback_args=(host, boot_seconds()))
            futures.append(future)
        with self._answered:
            self._answered.wait_for(lambda: len(self._offsets) >= len(futures), wait)
        self._measured_at = boot_seconds()
        return bool(self._offsets)

    def _age(self) -> float:
        return boot_seconds() - self._measured_at

    def _take(self, rows: Sequence[tuple[Any, ...]], host: Any, asked_at: float) -> None:
        answered_at = boot_seconds()
        if answered_at - asked_at > LATE_SECONDS and host in self._offsets:
            return
        seconds = (rows[0][0].time - UUID_EPOCH_OFFSET) / TICKS_PER_SECOND
        with self._answered:
            self._offsets[host] = seconds - (asked_at + answered_at) / 2
            self._offset = statistics.median_low(list(self._offsets.values()))
            self._answered.notify_all()

    def difference(self) -> float:
        """Return by how many seconds the clocks of the nodes differ."""
        offsets = list(self._offsets.values())
        return max(offsets) - min(offsets) if offsets else 0.0


def _ignore(error: Exception) -> None:
    """Do without the clock of a node that doesn't answer."""


class Rows:
    """The rows of a statement, fetched page by page.

    Each page is a request of its own, and the first answer to it counts. The driver also takes an answer that comes
    later, from a second node, and would change the place where the next page begins.
    """

    def __init__(self, session: Session, statement: Any, timeout: float, state: bytes | None = None) -> None:
        self._session = session
        self._statement = statement
        self._timeout = timeout
        self._is_answered = threading.Event()
        self._page: Sequence[Any] = ()
        self._state: bytes | None = None
        self._error: Exception | None = None
        future = session.execute_async(statement, timeout=timeout, paging_state=state)
        future.add_callbacks(self._take, self._fail, callback_args=(future,))

    def _take(self, page: Sequence[Any] | None, future: ResponseFuture) -> None:
        future.clear_callbacks()
        if not self._is_answered.is_set():
            self._page, self._state = page or (), ResultSet(future, ()).paging_state
            self._is_answered.set()

    def _fail(self, error: Exception) -> None:
        if not self._is_answered.is_set():
            self._error = error
            self._is_answered.set()

    def arrive_within(self, seconds: float) -> bool:
        return self._is_answered.wait(seconds) and self._error is None

    def wait(self) -> Self:
        """Wait for the first page. Raises the driver's errors."""
        self._is_answered.wait()
        if self._error is not None:
            raise self._error
        return self

    def __iter__(self) -> Iterator[Any]:
        rows = self
        yield from rows._page
        while rows._state is not None:
            rows = Rows(self._session, self._statement, self._timeout, rows._state).wait()
            yield from rows._page

    def one(self) -> Any:
        return next(iter(self._page), None)

    @property
    def was_applied(self) -> bool:
        return bool(self.one()[0])


class Connection:
    def __init__(self) -> None:
        self._keyspace: str = settings.CASSANDRA_KEYSPACE
        self._prepared: dict[str, PreparedStatement] = {}
        with translated():
            self.cluster = open_cluster()
        try:
            with translated():
                self.session = self.cluster.connect()
                self.clock = ClusterClock(self.session)
                self.cluster.timestamp_generator = self.clock.microseconds
                self._check_version()
                for cql in cassandra_cql.ALL:
                    self.prepare(cql)
                if not self.clock.measure(CONNECT_SECONDS):
                    raise StoreUnavailable("No Cassandra node tells its time.")
        except BaseException:
            self.cluster.shutdown()
            raise

    def _check_version(self) -> None:
        try:
            self.prepare(schema.GET_VERSION)
            row = self.execute(self.bind(schema.GET_VERSION, [])).one()
        except InvalidRequest:  # there is no keyspace, or no such table
            row = None
        version = row[0] if row else 0
        if version < schema.VERSION:
            raise StoreUnavailable(
                f"The keyspace {self._keyspace} has version {version} of the tables, and this Guardian "
                f"needs version {schema.VERSION}. Run `manage.py message_store_schema`."
            )

    def prepare(self, cql: str) -> None:
        for attempt in range(1, PREPARE_ATTEMPTS + 1):
            try:
                self._prepared[cql] = self.session.prepare(cql.replace("keyspace.", f"{self._keyspace}."))
                return
            except OperationTimedOut:  # the next attempt asks another node
                if attempt == PREPARE_ATTEMPTS:
                    raise

    def bind(
        self, cql: str, values: Sequence[Any], level: int = ConsistencyLevel.LOCAL_QUORUM, *, fetch: int | None = None
    ) -> BoundStatement:
        """Return a statement to execute, for the keyspace of the settings.

        It may be executed twice, unless it is a lightweight transaction.
        """
        bound = self._prepared[cql].bind(values)
        bound.consistency_level = level
        bound.is_idempotent = True
        if fetch is not None:
            bound.fetch_size = fetch
        return bound

    def execute(self, statement: Any, timeout: float = REQUEST_SECONDS) -> Rows:
        return self.start(statement, timeout).wait()

    def start(self, statement: Any, timeout: float = REQUEST_SECONDS) -> Rows:
        return Rows(self.session, statement, timeout)

    def execute_all(self, statements: Iterable[Any]) -> list[Rows]:
        found: list[Rows] = []
        for statement in statements:
            if len(found) >= CONCURRENCY:
                found[-CONCURRENCY].wait()
            found.append(self.start(statement))
        return [rows.wait() for rows in found]

    def execute_later(self, statements: Iterable[Any]) -> None:
        """Execute statements without waiting for them. Failures don't matter."""
        for statement in statements:
            self.session.execute_async(statement).add_errback(_ignore)


def batch(statements: Iterable[BoundStatement], level: int, *, logged: bool = False) -> BatchStatement:
    """Return a batch: of statements for one partition, or ``logged``, which is stored whole or not at all."""
    result = BatchStatement(BatchType.LOGGED if logged else BatchType.UNLOGGED, consistency_level=level)
    for statement in statements:
        result.add(statement)
    result.is_idempotent = True
    return result


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        if "too large" in str(error) or "exceeds" in str(error):
            raise BatchTooLarge(str(error)) from error
        raise StoreUnavailable(f"Cassandra refused the request: {error}") from error
    except NoHostAvailable as error:
        reasons = dict.fromkeys(f"{host}: {reason}" for host, reason in _reasons(error))
        why = "; ".join(reasons) or f"none is known in the data centre {settings.CASSANDRA_DATACENTER}"
        raise StoreUnavailable(f"No Cassandra node answers: {why}") from error
    except ERRORS as error:
        raise StoreUnavailable(f"Cassandra failed: {type(error).__name__}: {error}") from error


def _reasons(error: NoHostAvailable) -> list[tuple[Any, Any]]:
    return list(error.errors.items()) if isinstance(error.errors, dict) else []


def open_cluster(**options: Any) -> Cluster:
    """Return the cluster of the settings, not yet connected."""
    points = contact_points()
    policy = TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=settings.CASSANDRA_DATACENTER))
    profile = ExecutionProfile(
        load_balancing_policy=policy,
        consistency_level=ConsistencyLevel.LOCAL_QUORUM,
        row_factory=tuple_factory,
        request_timeout=REQUEST_SECONDS,
        speculative_execution_policy=ConstantSpeculativeExecutionPolicy(HEDGE_SECONDS, HEDGES),
    )
    user = settings.CASSANDRA_USER
    return Cluster(
        points,
        port=points[0][1],
        auth_provider=PlainTextAuthProvider(user, settings.CASSANDRA_PASSWORD) if user else None,
        ssl_context=ssl.create_default_context() if settings.CASSANDRA_TLS else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        protocol_version=ProtocolVersion.V5,
        prepare_on_all_hosts=False,  # a node that doesn't know a statement says so, and gets it
        reconnection_policy=ExponentialReconnectionPolicy(0.5, 10),
        connect_timeout=CONNECT_SECONDS,
        control_connection_timeout=CONNECT_SECONDS,
        idle_heartbeat_interval=HEARTBEAT_SECONDS,
        idle_heartbeat_timeout=5,
        **options,
    )


class _Connections:
    """The connection of this process, for each cluster that its settings named."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, Connection] = {}
        self._failed: dict[Any, tuple[float, StoreUnavailable]] = {}

    def get(self) -> Connection:
        """Return the connection, opening it if needed. After a failure, the next attempt waits ``RETRY_SECONDS``."""
        key = (os.getpid(), *(str(getattr(settings, name)) for name in SETTINGS))
        found = self._open.get(key)
        if found is not None:
            return found
        with self._lock:
            if key in self._open:
                return self._open[key]
            failed_at, error = self._failed.get(key, (-RETRY_SECONDS, None))
            if error is not None and time.monotonic() - failed_at < RETRY_SECONDS:
                raise error
            try:
                self._open[key] = Connection()
            except StoreUnavailable as unavailable:
                self._failed[key] = (time.monotonic(), unavailable)
                raise
            return self._open[key]


connections = _Connections()
