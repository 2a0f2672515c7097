"""Workers and their leases, kept by ZooKeeper: a node for each worker and for each lease, gone with its session.

    /guardian/workers/APPLICATION/CONSUMER/workers/0000000012
    /guardian/workers/APPLICATION/CONSUMER/leases/APPLICATION,QUEUE,PARTITION

The names are quoted as in addresses, so that they may have any characters.
"""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.hosts import collect_hosts
from kazoo.interfaces import IAsyncResult

from message_store.partition_sharing import (
    Coordination,
    CoordinationUnavailable,
    LeasesLost,
    Partition,
    Plan,
    plan_share,
)

logger = logging.getLogger(__name__)

ROOT = "/guardian/workers"

MAX_JOIN_SECONDS = 5.0
"""Seconds to wait for a session, and for each answer while joining: a worker that is to end meanwhile waits as long."""

Answer = Callable[[], "IAsyncResult[Any]"]


class ZooKeeperLeases(Coordination):
    """Leases in a ZooKeeper, which is given as kazoo takes it: ``host:port,host:port``, perhaps with a path behind it.

    ``seconds`` are the session's, or fewer or more where the server has bounds for it.
    """

    def __init__(self, application: str, consumer: str, seconds: float, hosts: str) -> None:
        """Remember where it is. Raises ValueError where the hosts can't be read."""
        super().__init__(application, consumer, seconds)
        collect_hosts(hosts)
        self._hosts = hosts
        self._asked_for = seconds
        self._path = f"{ROOT}/{_quoted(application)}/{_quoted(consumer)}"
        self._client: KazooClient | None = None
        self._worker_id = ""

    def _join(self) -> None:
        self._leave()
        client = self._client = KazooClient(self._hosts, timeout=self._asked_for)
        self._track_session_timeout(client)
        longest = min(self._asked_for, MAX_JOIN_SECONDS)
        try:
            client.start(longest)
            for part in ("workers", "leases"):
                client.ensure_path_async(f"{self._path}/{part}").get(timeout=longest)
            made = client.create_async(f"{self._path}/workers/", ephemeral=True, sequence=True)
            self._worker_id = made.get(timeout=longest).rpartition("/")[2]
        except (KazooException, KazooTimeoutError, OSError) as error:
            self._leave()
            raise CoordinationUnavailable(f"ZooKeeper can't be used: {_describe(error)}") from error

    def _track_session_timeout(self, client: KazooClient) -> None:
        """Have ``seconds`` be what the server agrees to, which kazoo keeps to itself."""
        connection = client._connection
        connect = connection._connect

        def connect_and_note(*arguments: Any) -> tuple[float, float]:
            read_timeout, connect_timeout = connect(*arguments)
            self.seconds = read_timeout * 1.5 / 1000  # of which it is two thirds
            return read_timeout, connect_timeout

        connection._connect = connect_and_note

    def _renew(self) -> None:
        client, path = self._connected(), self._worker_path()
        # A server that is cut off from the others goes on answering for a while: so the leader is asked, too.
        synced, there = client.sync_async(path), client.exists_async(path)
        self._read(synced)
        if self._read(there) is None:
            raise LeasesLost("ZooKeeper took this worker for gone")

    def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # what isn't ended now ends with the session
                client.stop()
                client.close()

    def _connected(self) -> KazooClient:
        if self._client is None:
            raise LeasesLost("this worker has no session")
        return self._client

    def _read(self, asked: "IAsyncResult[Any]") -> Any:
        """Return what was read. Where there is no answer, the session may go on."""
        try:
            return asked.get(timeout=self.seconds / 2)
        except NoNodeError:
            return None
        except SessionExpiredError as error:
            raise LeasesLost("the session with ZooKeeper expired") from error
        except (KazooException, KazooTimeoutError, OSError) as error:
            raise CoordinationUnavailable(f"ZooKeeper can't be used: {_describe(error)}") from error

    def _write(self, asked: "IAsyncResult[Any]") -> Any:
        """Return what a change gave. Where there is no answer, nobody knows what is held: the session has to end."""
        try:
            return asked.get(timeout=self.seconds / 2)
        except NodeExistsError:
            raise
        except (KazooException, KazooTimeoutError, OSError) as error:
            raise LeasesLost(f"ZooKeeper gave no answer: {_describe(error)}") from error

    def plan(self, partitions: Collection[Partition]) -> Plan:
        """Look who is there, and return what this worker is to do for its share of these partitions."""
        client = self._connected()
        asked = [client.get_children_async(f"{self._path}/{part}") for part in ("workers", "leases")]
        workers, leases = (self._read(one) or [] for one in asked)
        if self._worker_id not in workers:
            raise LeasesLost("ZooKeeper took this worker for gone")
        # Whose a lease is, is not asked for each: it is another's where it isn't held here.
        there = {_partition(name) for name in leases}
        if self.leased - there:
            raise LeasesLost("ZooKeeper knows nothing of what this worker holds")
        others = object()
        holders = {one: self._worker_id if one in self.leased else others for one in there}
        planned = plan_share(
            partitions,
            [others if name != self._worker_id else name for name in sorted(workers)],
            self._worker_id,
            holders,
        )
        return planned._replace(release=[*planned.release, *(self.leased - set(partitions))])

    def release(self, partitions: Collection[Partition]) -> None:
        """Let others have these."""
        client = self._connected()
        self.leased -= set(partitions)
        asked = []
        for one in partitions:
            # After a session that expired, kazoo goes on with another, in which the lease may be somebody else's.
            both = client.transaction()
            both.check(self._worker_path(), -1)
            both.delete(self._lease_path(one))
            asked.append(both.commit_async())
        for answer in asked:
            _, gone = self._write(answer)
            if isinstance(gone, KazooException) and not isinstance(gone, NoNodeError):
                raise LeasesLost(
                    f"ZooKeeper released nothing, perhaps as it took this worker for gone: {_describe(gone)}"
                )

    def acquire(self, planned: Plan) -> set[Partition]:
        """Take what is planned, as far as nobody else was quicker, and return what is held now and wasn't before."""
        client, new = self._connected(), set()
        name = self._worker_id.encode()
        asked = {
            one: client.create_async(self._lease_path(one), name, ephemeral=True)
            for one in planned.acquire[: planned.max_acquire]
        }
        for one, made in asked.items():
            with suppress(NodeExistsError):
                self._write(made)
                new.add(one)
        self.leased |= new
        return new

    def _worker_path(self) -> str:
        return f"{self._path}/workers/{self._worker_id}"

    def _lease_path(self, one: Partition) -> str:
        return f"{self._path}/leases/{_quoted(one.application)},{_quoted(one.queue)},{one.number}"


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _partition(name: str) -> Partition:
    application, queue, number = name.split(",")
    return Partition(unquote(application), unquote(queue), int(number))


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
