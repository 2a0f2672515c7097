"""Workers and their leases, in the database: no clock of another machine is trusted, nor the database's.

A worker has a row, and counts its beats in it. Whoever has seen the same count for that worker's seconds, by a clock
of its own, removes the row, if the count is still the same. That is the moment in which its leases are free: a lease is
taken from nobody, or from a worker without a row, by an update that names whom it is taken from. Names are never used
again, so a worker that is gone stays gone; and one that nobody missed, however late it is, still has what it held.
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
"""Leases that one statement names."""


@contextmanager
def _database() -> Iterator[None]:
    """Take any failure of the database for its being away. A connection that failed isn't used again."""
    try:
        yield
    except Error as error:
        with suppress(Error):
            close_old_connections()
        raise CoordinationUnavailable(f"the database with the leases can't be used: {error}") from error


class DatabaseLeases(Coordination):
    """Leases in the database that Django is configured with."""

    def __init__(self, application: str, consumer: str, seconds: float) -> None:
        super().__init__(application, consumer, seconds)
        self._worker_id = uuid.uuid4()
        self._heartbeats: dict[
            uuid.UUID, tuple[int, float]
        ] = {}  # of each worker: its last beat, and when that came first
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
            there = Worker.objects.filter(name=self._worker_id).update(beat=F("beat") + 1)
        if not there:
            raise LeasesLost("the other workers took this one for gone")

    def _leave(self) -> None:
        try:
            with _database():
                Worker.objects.filter(name=self._worker_id).delete()
        except CoordinationUnavailable as error:
            logger.warning("The other workers will miss this one in %s s: %s", self.seconds, error)

    def plan(self, partitions: Collection[Partition]) -> Plan:
        """Look who is there, and return what this worker is to do for its share of these partitions."""
        with _database():
            # The leases first: whoever took one had a row before that, so who has none after it is gone.
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
                raise LeasesLost("the other workers took this one for gone")
            self._remove(self._holders.keys() - set(partitions))
        self._mine = {one for one in partitions if self._holders.get(one) == self._worker_id}
        planned = plan_share(partitions, workers, self._worker_id, self._holders)
        return planned._replace(release=[*planned.release, *(self.leased - self._mine)])

    def _live_workers(self) -> list[uuid.UUID]:
        """Return who is there, in the order in which they joined. Who was silent for too long is removed."""
        everyone = Worker.objects.filter(application=self.application, consumer=self.consumer)
        rows = list(everyone.values_list("name", "beat", "seconds"))
        now, living, seen = clock(), [], {}
        for name, beat, seconds in rows:
            last, since = self._heartbeats.get(name, (beat, now))
            seen[name] = (beat, since if beat == last else now)
            silent = now - seen[name][1]
            if name != self._worker_id and silent > seconds and Worker.objects.filter(name=name, beat=beat).delete()[0]:
                logger.warning("A worker of %r was silent for %.1f s: others get its share.", self.consumer, silent)
            else:
                living.append(name)
        self._heartbeats = seen
        return living

    def _remove(self, partitions: Collection[Partition]) -> None:
        """Remove the leases of partitions that aren't there any more, where nobody holds them."""
        for some in _batches(partitions):
            self._leases(some).filter(self._free()).delete()

    def release(self, partitions: Collection[Partition]) -> None:
        """Let others have these."""
        self.leased -= set(partitions)
        self._mine -= set(partitions)
        with _database():
            for some in _batches(partitions):
                self._leases(some).filter(holder=self._worker_id).update(holder=None)

    def acquire(self, planned: Plan) -> set[Partition]:
        """Take what is planned, as far as nobody else was quicker, and return what is held now and wasn't before."""
        # What is its own by the last look and isn't held was taken, or not released, with the answer lost.
        with _database():
            for some in _batches(planned.acquire[: planned.max_acquire]):
                rows = [
                    PartitionLease(
                        consumer=self.consumer, application=one.application, queue=one.queue, partition=one.number
                    )
                    for one in some
                    if one not in self._holders
                ]
                PartitionLease.objects.bulk_create(rows, ignore_conflicts=True)
                with transaction.atomic():
                    # Those that somebody else is at are left to them: nobody waits here, least of all for each other.
                    free = self._leases(some).filter(self._free()).select_for_update(skip_locked=True)
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
    all_of_them = list(partitions)
    for begin in range(0, len(all_of_them), BATCH_SIZE):
        yield all_of_them[begin : begin + BATCH_SIZE]
