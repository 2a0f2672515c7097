"""Leases in ZooKeeper: an ephemeral node for each worker and each lease.

    /guardian/workers/DEPLOYMENT/APPLICATION/CONSUMER/workers/0000000012
    /guardian/workers/DEPLOYMENT/APPLICATION/CONSUMER/leases/QUEUE,PARTITION

Names are percent-encoded. This module needs kazoo: the extra ``zookeeper``.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.hosts import collect_hosts
from kazoo.interfaces import IAsyncResult

from guardian_store._partition_sharing import (
    Coordination,
    CoordinationUnavailable,
    LeasesLost,
    Partition,
    Plan,
    plan_share,
)

ROOT = "/guardian/workers"

MAX_JOIN_SECONDS = 5.0
"""The limit for connecting and for each request while joining. Stopping the worker may wait this long."""

Answer = Callable[[], "IAsyncResult[Any]"]


class ZooKeeperLeases(Coordination):
    """Leases in ZooKeeper. ``hosts`` has kazoo's format: ``host:port,host:port``, optionally with a path.

    ``seconds`` is the session's timeout, which the server may change to fit its bounds.
    """

    def __init__(self, deployment: str, application: str, consumer: str, seconds: float, hosts: str) -> None:
        super().__init__(seconds)
        try:
            collect_hosts(hosts)
        except ValueError as error:
            raise ValueError(f"The hosts of ZooKeeper are malformed: {error}") from error
        self._hosts = hosts
        self._requested_seconds = seconds
        self._deployment = deployment
        self._path = f"{ROOT}/{_quoted(deployment)}/{_quoted(application)}/{_quoted(consumer)}"
        self._client: KazooClient | None = None
        self._worker_id = ""

    def _join(self) -> None:
        self._leave()
        client = self._client = KazooClient(self._hosts, timeout=self._requested_seconds)
        self._track_session_timeout(client)
        timeout = min(self._requested_seconds, MAX_JOIN_SECONDS)
        try:
            client.start(timeout)
            for part in ("workers", "leases"):
                client.ensure_path_async(f"{self._path}/{part}").get(timeout=timeout)
            created = client.create_async(f"{self._path}/workers/", ephemeral=True, sequence=True)
            self._worker_id = created.get(timeout=timeout).rpartition("/")[2]
        except (KazooException, KazooTimeoutError, OSError) as error:
            self._leave()
            raise CoordinationUnavailable(f"ZooKeeper failed: {_describe(error)}") from error

    def _track_session_timeout(self, client: KazooClient) -> None:
        """Set ``seconds`` to the negotiated timeout of each session. kazoo has no public API for it."""
        connection = client._connection
        connect = connection._connect

        def connect_and_record(*arguments: Any) -> tuple[float, float]:
            read_timeout, connect_timeout = connect(*arguments)
            self.seconds = read_timeout * 1.5 / 1000  # kazoo's read timeout is two thirds of the session's, in ms
            return read_timeout, connect_timeout

        connection._connect = connect_and_record

    def _renew(self) -> None:
        client, path = self._connected(), self._worker_path()
        # A partitioned server still answers reads for a while. sync needs the leader.
        synced, exists = client.sync_async(path), client.exists_async(path)
        self._read(synced)
        if self._read(exists) is None:
            raise LeasesLost("ZooKeeper has no node for this worker")

    def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # the nodes disappear when the session expires
                client.stop()
                client.close()

    def _connected(self) -> KazooClient:
        if self._client is None:
            raise LeasesLost("this worker has no session")
        return self._client

    def _read(self, pending: "IAsyncResult[Any]") -> Any:
        """Return the result of a read, or None if the node does not exist. The session survives a time-out."""
        try:
            return pending.get(timeout=self.seconds / 2)
        except NoNodeError:
            return None
        except SessionExpiredError as error:
            raise LeasesLost("the session with ZooKeeper expired") from error
        except (KazooException, KazooTimeoutError, OSError) as error:
            raise CoordinationUnavailable(f"ZooKeeper failed: {_describe(error)}") from error

    def _write(self, pending: "IAsyncResult[Any]") -> Any:
        """Return the result of a write. Without one the leases are unknown, so the session must end."""
        try:
            return pending.get(timeout=self.seconds / 2)
        except NodeExistsError:
            raise
        except (KazooException, KazooTimeoutError, OSError) as error:
            raise LeasesLost(f"a write to ZooKeeper failed: {_describe(error)}") from error

    def plan(self, partitions: Collection[Partition]) -> Plan:
        client = self._connected()
        pending = [client.get_children_async(f"{self._path}/{part}") for part in ("workers", "leases")]
        workers, leases = (self._read(one) or [] for one in pending)
        if self._worker_id not in workers:
            raise LeasesLost("ZooKeeper has no node for this worker")
        # Don't fetch the holder of each lease: all leases but this worker's belong to others.
        existing = {self._partition(name) for name in leases}
        if self.leased - existing:
            raise LeasesLost("ZooKeeper lacks leases of this worker")
        others = object()
        holders = {one: self._worker_id if one in self.leased else others for one in existing}
        planned = plan_share(
            partitions,
            [others if name != self._worker_id else name for name in sorted(workers)],
            self._worker_id,
            holders,
        )
        return planned._replace(release=[*planned.release, *(self.leased - set(partitions))])

    def release(self, partitions: Collection[Partition]) -> None:
        client = self._connected()
        self.leased -= set(partitions)
        pending = []
        for one in partitions:
            # kazoo replaces an expired session by a new one, in which the lease may be another worker's.
            transaction = client.transaction()
            transaction.check(self._worker_path(), -1)
            transaction.delete(self._lease_path(one))
            pending.append(transaction.commit_async())
        for result in pending:
            _, deleted = self._write(result)
            if isinstance(deleted, KazooException) and not isinstance(deleted, NoNodeError):
                raise LeasesLost(f"ZooKeeper refused to release a lease: {_describe(deleted)}")

    def acquire(self, planned: Plan) -> None:
        client = self._connected()
        name = self._worker_id.encode()
        pending = {
            one: client.create_async(self._lease_path(one), name, ephemeral=True)
            for one in planned.acquire[: planned.max_acquire]
        }
        acquired = set()
        for one, result in pending.items():
            with suppress(NodeExistsError):
                self._write(result)
                acquired.add(one)
        self.leased |= acquired

    def _worker_path(self) -> str:
        return f"{self._path}/workers/{self._worker_id}"

    def _lease_path(self, one: Partition) -> str:
        return f"{self._path}/leases/{_quoted(one.queue)},{one.number}"

    def _partition(self, name: str) -> Partition:
        queue, number = name.split(",")
        return Partition(self._deployment, unquote(queue), int(number))


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
