"""The rows of workers and of their leases on partitions.

``guardian_store.leases`` has the protocol: workers find out themselves which others are dead. A lease belongs to a
worker with a row. Its leases are removed with the row.
"""

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet

from guardian_store.transport import LeaseTable, WorkerState
from message_store.models import PartitionLease, Worker
from message_store.quota import QuotaReached

BATCH_SIZE = 200
"""Leases per statement."""

MAX_WORKERS = 1000
"""Workers of an application. Concurrent requests may exceed it by their number."""

QueuePartition = tuple[str, int]


class NoWorker(Exception):
    """The worker has no row: it never joined, it left, or another worker removed it."""

    def __init__(self) -> None:
        super().__init__("There is no such worker")


def join(application: str, consumer: str, worker: uuid.UUID, seconds: float) -> None:
    """Add a worker with a new id. Its leases last ``seconds``. An existing worker stays as it is.

    Raises QuotaReached.
    """
    if Worker.objects.filter(application=application).exclude(name=worker).count() >= MAX_WORKERS:
        raise QuotaReached(f"{application} has {MAX_WORKERS} workers. Stop some, and remove those that have died")
    row = Worker(name=worker, application=application, consumer=consumer, seconds=seconds)
    Worker.objects.bulk_create([row], ignore_conflicts=True)


def renew(application: str, consumer: str, worker: uuid.UUID) -> None:
    """Count a heartbeat of a worker. Raises NoWorker."""
    if not _worker(application, consumer, worker).update(beat=F("beat") + 1):
        raise NoWorker


def remove_worker(application: str, consumer: str, worker: uuid.UUID, beats: int | None = None) -> bool:
    """Remove a worker and its leases. With ``beats``, only if that is still the number of its heartbeats.

    Return whether it was removed.
    """
    row = _worker(application, consumer, worker)
    with transaction.atomic():
        removed, _ = (row if beats is None else row.filter(beat=beats)).delete()
        if removed:
            _leases_of(application, consumer).filter(holder=worker).delete()
    return bool(removed)


def lease_table(application: str, consumer: str) -> LeaseTable:
    # Fetch the leases first: a holder had its row before its lease, so without a row afterwards it was removed.
    leases = _leases_of(application, consumer).exclude(holder=None).values_list("queue", "partition", "holder")
    holders = {(queue, number): holder.hex for queue, number, holder in leases if holder}
    workers = Worker.objects.filter(application=application, consumer=consumer)
    rows = workers.values_list("name", "beat", "seconds")
    return LeaseTable([WorkerState(name.hex, beats, seconds) for name, beats, seconds in rows], holders)


def acquire(
    application: str, consumer: str, worker: uuid.UUID, partitions: Collection[QueuePartition]
) -> set[QueuePartition]:
    """Lease the free ones of these partitions to a worker. Return which of them it has. Raises NoWorker."""
    held: set[QueuePartition] = set()
    has_row = Exists(Worker.objects.filter(name=OuterRef("holder")))
    for batch in _batches(partitions):
        rows = [
            PartitionLease(application=application, consumer=consumer, queue=queue, partition=number, holder=worker)
            for queue, number in batch
        ]
        with transaction.atomic():
            # The lock keeps others from removing the worker before the commit, which would leave leases without it.
            if not list(_worker(application, consumer, worker).select_for_update()):
                raise NoWorker
            these = _leases_of(application, consumer).filter(_among(batch))
            these.filter(Q(holder=None) | ~has_row).delete()  # of workers before an upgrade
            PartitionLease.objects.bulk_create(rows, ignore_conflicts=True)
            held.update(these.filter(holder=worker).values_list("queue", "partition"))
    return held


def release(application: str, consumer: str, worker: uuid.UUID, partitions: Collection[QueuePartition]) -> None:
    for batch in _batches(partitions):
        _leases_of(application, consumer).filter(_among(batch), holder=worker).delete()


def _worker(application: str, consumer: str, worker: uuid.UUID) -> QuerySet[Worker]:
    return Worker.objects.filter(application=application, consumer=consumer, name=worker)


def _leases_of(application: str, consumer: str) -> QuerySet[PartitionLease]:
    return PartitionLease.objects.filter(application=application, consumer=consumer)


def _among(partitions: Collection[QueuePartition]) -> Q:
    numbers = defaultdict(list)
    for queue, number in partitions:
        numbers[queue].append(number)
    these = Q()
    for queue, some in numbers.items():
        these |= Q(queue=queue, partition__in=some)
    return these


def _batches(partitions: Collection[QueuePartition]) -> Iterator[list[QueuePartition]]:
    """Yield batches in one order for all workers, so that two that acquire at once can't deadlock."""
    ordered = sorted(partitions)
    for begin in range(0, len(ordered), BATCH_SIZE):
        yield ordered[begin : begin + BATCH_SIZE]
