"""What a worker needs of a deployment of the message store, and the access to it over HTTP."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from guardian_store._client import Client
from guardian_store._partition_sharing import DEFAULT_DEPLOYMENT
from guardian_store._protocol import Invalid, Message, NotFound, Page, Unavailable, positions_of

TIMEOUT_SECONDS = 10.0

PAGE_SIZE = 1000
"""Queues per request."""

PARTITIONS_PER_REQUEST = 200
"""The store limits the size of a request."""


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """A queue whose messages a worker handles.

    ``created`` distinguishes it from a later queue with its name. Only the transport interprets ``key``.
    """

    transport: "Transport"
    name: str
    partitions: int
    created: Any
    key: Any = None


class Progress(NamedTuple):
    """How far a consumer is in a queue."""

    positions: dict[int, str]
    """The id of the last processed message by partition."""
    waiting: set[int]
    """The partitions with messages after their positions, of those asked for."""


class WorkerState(NamedTuple):
    """A worker of a consumer: its id, the number of its heartbeats, and the duration of its leases."""

    id: str
    beats: int
    seconds: float


class LeaseTable(NamedTuple):
    """The workers of a consumer in the order of joining, and the holder of each lease by queue and partition."""

    workers: list[WorkerState]
    holders: dict[tuple[str, int], str]


class Transport(ABC):
    """Access to the queues of an application in one deployment of the message store.

    ``deployment`` is the deployment's name among those of a worker. All workers of a consumer use the same names.

    Every method may raise ``Unavailable``, and those for a queue ``NotFound`` if it was deleted.
    """

    deployment: str
    application: str

    @abstractmethod
    def queues(self, names: Collection[str]) -> dict[str, WorkQueue]:
        """Return the existing ones of these queues by name, or all of the application's queues without names."""

    @abstractmethod
    def read(self, queue: WorkQueue, partition: int, after: str | None, limit: int) -> Page:
        """Return up to ``limit`` messages of a partition after this message id."""

    @abstractmethod
    def progress(self, queue: WorkQueue, consumer: str, partitions: Collection[int]) -> Progress:
        """Return the consumer's positions, and which of these partitions have messages after them."""

    @abstractmethod
    def advance_positions(
        self, queue: WorkQueue, consumer: str, moves: Mapping[int, tuple[str | None, str]]
    ) -> dict[int, str]:
        """Move positions from one message to another, if they are unchanged. Return these positions afterwards."""

    @abstractmethod
    def keep(self, message: Message, queue: str, ttl: int) -> None:
        """Post a copy of a message to a queue, which is created if needed.

        Raises Invalid if the copy is too large for a request. It always will be.
        """

    # The leases of a consumer's workers. ``renew`` and ``acquire`` raise ``NotFound`` if the worker was removed.

    @abstractmethod
    def join(self, consumer: str, worker: str, seconds: float) -> None:
        """Add a worker with a new id. Its leases last ``seconds``."""

    @abstractmethod
    def renew(self, consumer: str, worker: str, timeout: float) -> None:
        """Count a heartbeat of a worker. Give up after ``timeout`` seconds."""

    @abstractmethod
    def remove_worker(self, consumer: str, worker: str, beats: int | None = None) -> bool:
        """Remove a worker and its leases. With ``beats``, only if it has sent no further heartbeat.

        Return whether it was removed.
        """

    @abstractmethod
    def lease_table(self, consumer: str, worker: str) -> LeaseTable:
        """Return the workers and leases of a consumer."""

    @abstractmethod
    def acquire(self, consumer: str, worker: str, partitions: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        """Lease the free ones of these partitions to a worker. Return which of them it has."""

    @abstractmethod
    def release(self, consumer: str, worker: str, partitions: Collection[tuple[str, int]]) -> None:
        """Release a worker's leases of these partitions."""

    def end_thread(self) -> None:  # noqa: B027 - most transports have nothing to do
        """Close what the current thread has opened. The worker calls this at the end of its own threads."""


class HTTPTransport(Transport):
    """Access over HTTP with a key of the application.

    ``timeout`` is in seconds, for connecting and for each part of an answer.
    """

    def __init__(
        self,
        address: str,
        application: str,
        *,
        key: str,
        deployment: str = DEFAULT_DEPLOYMENT,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self.deployment = deployment
        self.application = application
        self.client = Client(address, application, key=key, timeout=timeout)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def queues(self, names: Collection[str]) -> dict[str, WorkQueue]:
        found = []
        if names:
            for name in names:
                try:
                    found.append(self.client.queue(name))
                except NotFound as error:
                    if "queue_name" not in error.errors:
                        raise  # the application does not exist
        else:
            found += self.client.queues(page=PAGE_SIZE)
        return {queue.name: WorkQueue(self, queue.name, queue.partitions, queue.created) for queue in found}

    def read(self, queue: WorkQueue, partition: int, after: str | None, limit: int) -> Page:
        with _of_queue():
            page = self.client.read(queue.name, partition=partition, after=after, limit=limit)
        return Page([message._replace(deployment=self.deployment) for message in page.messages], page.more)

    def progress(self, queue: WorkQueue, consumer: str, partitions: Collection[int]) -> Progress:
        asked = {"waiting": ",".join(map(str, partitions))}
        with _of_queue():
            answer = self.client.request("GET", queue.name, "positions", consumer, params=asked)
        return Progress(positions_of(answer), set(answer["waiting"]))

    def advance_positions(
        self, queue: WorkQueue, consumer: str, moves: Mapping[int, tuple[str | None, str]]
    ) -> dict[int, str]:
        body = {str(partition): {"from": at, "to": to} for partition, (at, to) in moves.items()}
        with _of_queue(), _waiting_for_room():
            return positions_of(self.client.request("POST", queue.name, "positions", consumer, json=body))

    def keep(self, message: Message, queue: str, ttl: int) -> None:
        try:
            self._post(message, queue, ttl)
        except NotFound:
            self.client.create_queue(queue)
            self._post(message, queue, ttl)

    def _post(self, message: Message, queue: str, ttl: int) -> None:
        with _waiting_for_room():
            self.client.post(queue, message.body, ttl=ttl, partition=1, content_type=message.content_type)

    def join(self, consumer: str, worker: str, seconds: float) -> None:
        with _waiting_for_room():
            self._leases("PUT", consumer, "workers", worker, data={"seconds": repr(seconds)})

    def renew(self, consumer: str, worker: str, timeout: float) -> None:
        self._leases("POST", consumer, "workers", worker, timeout=timeout)

    def remove_worker(self, consumer: str, worker: str, beats: int | None = None) -> bool:
        params = {} if beats is None else {"beats": str(beats)}
        return bool(self._leases("DELETE", consumer, "workers", worker, params=params)["removed"])

    def lease_table(self, consumer: str, worker: str) -> LeaseTable:
        answer = self._leases("GET", consumer, "leases", worker)
        workers = [WorkerState(entry["worker"], entry["beats"], entry["seconds"]) for entry in answer["workers"]]
        return LeaseTable(
            workers,
            {
                (queue, int(number)): holder
                for queue, by_number in answer["leases"].items()
                for number, holder in by_number.items()
            },
        )

    def acquire(self, consumer: str, worker: str, partitions: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        return self._change_leases(consumer, worker, "acquire", partitions)

    def release(self, consumer: str, worker: str, partitions: Collection[tuple[str, int]]) -> None:
        self._change_leases(consumer, worker, "release", partitions)

    def _change_leases(
        self, consumer: str, worker: str, change: str, partitions: Collection[tuple[str, int]]
    ) -> set[tuple[str, int]]:
        held: set[tuple[str, int]] = set()
        ordered = sorted(partitions)
        for first in range(0, len(ordered), PARTITIONS_PER_REQUEST):
            by_queue: dict[str, list[int]] = {}
            for queue, number in ordered[first : first + PARTITIONS_PER_REQUEST]:
                by_queue.setdefault(queue, []).append(number)
            answer = self._leases("POST", consumer, "leases", worker, json={change: by_queue})
            held.update((queue, number) for queue, numbers in answer["leases"].items() for number in numbers)
        return held

    def _leases(self, method: str, consumer: str, *names: str, **options: Any) -> dict[str, Any]:
        return self.client.request(method, "consumers", consumer, *names, **options)


@contextmanager
def _waiting_for_room() -> Iterator[None]:
    """Turn a reached limit of the application into ``Unavailable``, so that the worker tries again."""
    try:
        yield
    except Invalid as error:
        if "quota" not in error.errors:
            raise
        raise Unavailable(error.status, error.errors) from error


@contextmanager
def _of_queue() -> Iterator[None]:
    """Turn an error about a partition into ``NotFound``: a new queue with this name has fewer partitions."""
    try:
        yield
    except Invalid as error:
        if error.status is None or "consumer" in error.errors:
            raise
        raise NotFound(error.status, error.errors) from error
