"""Leases in the database, without trust in the clocks of other machines or of the database.

A worker counts its heartbeats in its row. Another worker that sees the same count for ``seconds``, by its own clock,
deletes the row if the count is still the same. Only this frees the leases: a conditional update acquires a lease that
has no holder, or whose holder has no row. Ids of workers are never reused. So a worker without a row stays dead, and a
late worker that nobody has deleted still has its leases.
"""

import logging
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from django.db import Error, close_old_connections, transaction
from django.db.models import F, Q, QuerySet

from message_store.models import PartitionLease, Worker
from message_store.partition_sharing import (
    Coordination,
    CoordinationUnavailable,
    LeasesLost,
    Partition,
    Plan,
    clock,
    plan_share,
)

logger = logging.getLogger(__name__)

BATCH_SIZE = 200
"""Leases per statement."""


@contextmanager
def _database() -> Iterator[None]:
    """Turn database errors into ``CoordinationUnavailable`` and close broken connections."""
    try:
        yield
    except Error as error:
        with suppress(Error):
            close_old_connections()
        raise CoordinationUnavailable(f"the database with the leases failed: {error}") from error


class DatabaseLeases(Coordination):
    """Leases in Django's default database."""

    def __init__(self, application: str, consumer: str, seconds: float) -> None:
        super().__init__(application, consumer, seconds)
        self._worker_id = uuid.uuid4()
        # The last count of each worker, and when this worker first saw it.
        self._heartbeats: dict[uuid.UUID, tuple[int, float]] = {}
        self._holders: dict[Partition, uuid.UUID | None] = {}
        self._mine: set[Partition] = set()
        self._dead: set[uuid.UUID] = set()

    def _join(self) -> None:
        self._worker_id = uuid.uuid4()
        with _database():
            Worker.objects.create(
                name=self._worker_id, application=self.application, consumer=self.consumer, seconds=self.seconds
            )

    def _renew(self) -> None:
        with _database():
            updated = Worker.objects.filter(name=self._worker_id).update(beat=F("beat") + 1)
        if not updated:
            raise LeasesLost("another worker saw no heartbeat of this one and freed its partitions")

    def _leave(self) -> None:
        try:
            with _database():
                Worker.objects.filter(name=self._worker_id).delete()
        except CoordinationUnavailable as error:
            logger.warning("Could not release the leases, which expire in %s s: %s", self.seconds, error)

    def plan(self, partitions: Collection[Partition]) -> Plan:
        """Fetch the workers and leases, and plan this worker's share of these partitions."""
        with _database():
            # Fetch the leases first: a holder had its row before its lease, so without a row afterwards it is dead.
            leases = PartitionLease.objects.filter(application=self.application, consumer=self.consumer)
            self._holders = {
                Partition(application, queue, number): holder
                for application, queue, number, holder in leases.values_list(
                    "application", "queue", "partition", "holder"
                )
            }
            workers = self._live_workers()
            self._dead = {holder for holder in self._holders.values() if holder is not None} - set(workers)
            if self._worker_id not in workers:
                raise LeasesLost("another worker saw no heartbeat of this one and freed its partitions")
            self._remove(self._holders.keys() - set(partitions))
        self._mine = {one for one in partitions if self._holders.get(one) == self._worker_id}
        planned = plan_share(partitions, workers, self._worker_id, self._holders)
        return planned._replace(release=[*planned.release, *(self.leased - self._mine)])

    def _live_workers(self) -> list[uuid.UUID]:
        """Return the live workers in the order of joining, and delete those without a recent heartbeat."""
        workers = Worker.objects.filter(application=self.application, consumer=self.consumer)
        rows = list(workers.values_list("name", "beat", "seconds"))
        now, living, seen = clock(), [], {}
        for name, beat, seconds in rows:
            last, since = self._heartbeats.get(name, (beat, now))
            seen[name] = (beat, since if beat == last else now)
            silent = now - seen[name][1]
            if name != self._worker_id and silent > seconds and Worker.objects.filter(name=name, beat=beat).delete()[0]:
                logger.warning(
                    "A worker of %r sent no heartbeat for %.1f s. Others get its share.", self.consumer, silent
                )
            else:
                living.append(name)
        self._heartbeats = seen
        return living

    def _remove(self, partitions: Collection[Partition]) -> None:
        """Delete the free leases among those of deleted partitions."""
        for batch in _batches(partitions):
            self._leases(batch).filter(self._free()).delete()

    def release(self, partitions: Collection[Partition]) -> None:
        """Release the leases of these partitions."""
        self.leased -= set(partitions)
        self._mine -= set(partitions)
        with _database():
            for batch in _batches(partitions):
                self._leases(batch).filter(holder=self._worker_id).update(holder=None)

    def acquire(self, planned: Plan) -> set[Partition]:
        """Lease the planned partitions that are still free, and return the newly leased ones."""
        # _mine may have more than ``leased``: after a lost connection, an update may have worked without an answer.
        with _database():
            for batch in _batches(planned.acquire[: planned.max_acquire]):
                rows = [
                    PartitionLease(
                        consumer=self.consumer, application=one.application, queue=one.queue, partition=one.number
                    )
                    for one in batch
                    if one not in self._holders
                ]
                PartitionLease.objects.bulk_create(rows, ignore_conflicts=True)
                with transaction.atomic():
                    # Skip rows that another worker is acquiring, instead of waiting or deadlocking.
                    free = self._leases(batch).filter(self._free()).select_for_update(skip_locked=True)
                    found = {
                        row: Partition(application, queue, number)
                        for row, application, queue, number in free.values_list(
                            "id", "application", "queue", "partition"
                        )
                    }
                    PartitionLease.objects.filter(id__in=found).update(holder=self._worker_id)
                self._mine.update(found.values())
        new = self._mine - self.leased
        self.leased |= new
        return new

    def _leases(self, partitions: Collection[Partition]) -> QuerySet[PartitionLease]:
        numbers = defaultdict(list)
        for application, queue, number in partitions:
            numbers[application, queue].append(number)
        these = Q()
        for (application, queue), some in numbers.items():
            these |= Q(application=application, queue=queue, partition__in=some)
        return PartitionLease.objects.filter(these, consumer=self.consumer)

    def _free(self) -> Q:
        return Q(holder=None) | Q(holder__in=self._dead)


def _batches(partitions: Collection[Partition]) -> Iterator[list[Partition]]:
    ordered = list(partitions)
    for begin in range(0, len(ordered), BATCH_SIZE):
        yield ordered[begin : begin + BATCH_SIZE]
