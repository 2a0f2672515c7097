"""The transport of a worker that runs in Guardian itself, with access to the store and the database."""

import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from django.db import Error, close_old_connections, connections

from guardian_store import (
    DEFAULT_DEPLOYMENT,
    LeaseTable,
    Message,
    NotFound,
    Page,
    Progress,
    Transport,
    Unavailable,
    WorkQueue,
)
from guardian_store import _ids as ids
from message_store import leases, queues, quota
from message_store.store import NewMessage, NoQueue, StoredQueue, StoreUnavailable, store


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors of the store and of the database into those of a transport, and close broken connections."""
    try:
        yield
    except NoQueue as error:
        raise NotFound(None, {"queue_name": str(error)}) from error
    except leases.NoWorker as error:
        raise NotFound(None, {"worker": str(error)}) from error
    except (StoreUnavailable, quota.QuotaReached, Error) as error:
        with suppress(Error):
            close_old_connections()
        raise Unavailable(None, {"storage": str(error)}) from error


class StoreTransport(Transport):
    """Access to the queues of an application in this process."""

    def __init__(self, application: str) -> None:
        self.application = application
        self.deployment = DEFAULT_DEPLOYMENT

    def queues(self, names: Collection[str]) -> dict[str, WorkQueue]:
        close_old_connections()
        found: list[StoredQueue] = []
        with _errors():
            for name in names:
                with suppress(NoQueue):
                    found.append(queues.find(self.application, name))
            while not names:
                some = queues.queues(self.application, start=found[-1].name if found else "")
                found += some
                if len(some) < queues.MAX_READ:
                    break
        return {queue.name: WorkQueue(self, queue.name, queue.partitions, queue.created, queue) for queue in found}

    def read(self, queue: WorkQueue, partition: int, after: str | None, limit: int) -> Page:
        start = None if after is None else ids.place(uuid.UUID(after)).next
        name, deployment = queue.name, self.deployment
        new = tuple.__new__  # Message(…) would take twice the time
        found, size = [], 0
        with _errors():
            read = queues.read(queue.key, [partition], start=start, limit=limit, batch_bytes=queues.BATCH_BYTES)
            for message_id, _, body, content_type in read:
                found.append(new(Message, (message_id.hex, name, partition, body, content_type, deployment)))
                size += len(body)
                if size >= queues.BATCH_BYTES:
                    break
        return Page(found, len(found) == limit or size >= queues.BATCH_BYTES)

    def progress(self, queue: WorkQueue, consumer: str, partitions: Collection[int]) -> Progress:
        with _errors():
            positions = queues.positions(queue.key, consumer)
            waiting = queues.waiting(queue.key, positions, partitions)
        return Progress({number: at.hex for number, at in positions.items()}, set(waiting))

    def advance_positions(
        self, queue: WorkQueue, consumer: str, moves: Mapping[int, tuple[str | None, str]]
    ) -> dict[int, str]:
        given = {number: (None if at is None else uuid.UUID(at), uuid.UUID(to)) for number, (at, to) in moves.items()}
        with _errors():
            if store().advance_positions(queue.key, consumer, given) == given.keys():
                return {number: to for number, (_, to) in moves.items()}
            return {number: at.hex for number, at in store().positions(queue.key, consumer).items()}

    def keep(self, message: Message, queue: str, ttl: int) -> None:
        copy = NewMessage(message.body, 1, ttl, message.content_type)
        with _errors():
            try:
                kept_in = queues.find(self.application, queue)
            except NoQueue:
                kept_in = queues.create(self.application, queue)
            try:
                with quota.reserved(self.application, [copy]):
                    store().push(kept_in, [copy])
            except NoQueue as error:
                raise StoreUnavailable(f"The queue {queue} was just deleted.") from error

    def join(self, consumer: str, worker: str, seconds: float) -> None:
        with _errors():
            leases.join(self.application, consumer, uuid.UUID(worker), seconds)

    def renew(self, consumer: str, worker: str, timeout: float) -> None:
        """Count a heartbeat of a worker. The database's own timeout applies."""
        with _errors():
            leases.renew(self.application, consumer, uuid.UUID(worker))

    def remove_worker(self, consumer: str, worker: str, beats: int | None = None) -> bool:
        with _errors():
            return leases.remove_worker(self.application, consumer, uuid.UUID(worker), beats)

    def lease_table(self, consumer: str, worker: str) -> LeaseTable:
        with _errors():
            return leases.lease_table(self.application, consumer)

    def acquire(self, consumer: str, worker: str, partitions: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        with _errors():
            return leases.acquire(self.application, consumer, uuid.UUID(worker), partitions)

    def release(self, consumer: str, worker: str, partitions: Collection[tuple[str, int]]) -> None:
        with _errors():
            leases.release(self.application, consumer, uuid.UUID(worker), partitions)

    def end_thread(self) -> None:
        """Close the thread's database connections."""
        connections.close_all()
