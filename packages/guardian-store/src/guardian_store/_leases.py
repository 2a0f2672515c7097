"""Leases that the store keeps, without trust in the clocks of other machines or of the store.

A worker counts its heartbeats in the store. Another worker that sees the same count for ``seconds``, by its own clock,
removes the worker if the count is still the same. Only this frees the leases. Ids of workers are never reused. So a
worker that was removed stays so, and a late worker that nobody has removed still has its leases.
"""

import logging
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from guardian_store._partition_sharing import (
    Coordination,
    CoordinationUnavailable,
    LeasesLost,
    Partition,
    Plan,
    clock,
    plan_share,
)
from guardian_store._protocol import ClientError, NotFound, Unavailable
from guardian_store._transport import Transport, WorkerState

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4


class StoreLeases(Coordination):
    def __init__(self, transport: Transport, consumer: str, seconds: float) -> None:
        super().__init__(seconds)
        self._transport = transport
        self._consumer = consumer
        self._worker_id = ""
        # The last count of each worker, and when this worker first saw it.
        self._heartbeats: dict[str, tuple[int, float]] = {}
        self._mine: set[Partition] = set()

    def _join(self) -> None:
        try:
            if self._worker_id:
                self._transport.remove_worker(self._consumer, self._worker_id)
            self._worker_id = uuid.uuid4().hex
            self._transport.join(self._consumer, self._worker_id, self.seconds)
        except Unavailable as error:
            raise CoordinationUnavailable(str(error)) from error

    def _renew(self) -> None:
        with _coordinating():
            self._transport.renew(self._consumer, self._worker_id, self.seconds / HEARTBEATS_PER_LEASE)

    def _leave(self) -> None:
        if not self._worker_id:
            return  # it never joined
        try:
            self._transport.remove_worker(self._consumer, self._worker_id)
        except ClientError as error:
            logger.warning("Could not release the leases, which expire in %s s: %s", self.seconds, error)

    def plan(self, partitions: Collection[Partition]) -> Plan:
        deployment = self._transport.deployment
        with _coordinating():
            table = self._transport.lease_table(self._consumer, self._worker_id)
            workers = self._live_workers(table.workers)
        if self._worker_id not in workers:
            raise LeasesLost("another worker saw no heartbeat of this one")
        holders = {Partition(deployment, queue, number): holder for (queue, number), holder in table.holders.items()}
        self._mine = {one for one in partitions if holders.get(one) == self._worker_id}
        planned = plan_share(partitions, workers, self._worker_id, holders)
        return planned._replace(release=[*planned.release, *(self.leased - self._mine)])

    def _live_workers(self, workers: list[WorkerState]) -> list[str]:
        """Return the live workers in the order of joining, and remove those without a recent heartbeat."""
        now, living, seen = clock(), [], {}
        for worker in workers:
            beats, since = self._heartbeats.get(worker.id, (worker.beats, now))
            seen[worker.id] = (worker.beats, since if beats == worker.beats else now)
            silent = now - seen[worker.id][1]
            if (
                worker.id != self._worker_id
                and silent > worker.seconds
                and self._transport.remove_worker(self._consumer, worker.id, worker.beats)
            ):
                logger.warning(
                    "A worker of %r sent no heartbeat for %.1f s. Others get its share.", self._consumer, silent
                )
            else:
                living.append(worker.id)
        self._heartbeats = seen
        return living

    def release(self, partitions: Collection[Partition]) -> None:
        self.leased -= set(partitions)
        self._mine -= set(partitions)
        if not partitions:
            return
        try:
            with _coordinating():
                self._transport.release(self._consumer, self._worker_id, [one[1:] for one in partitions])
        except CoordinationUnavailable as error:
            # The store may release them later, when this worker has them again. A new id is safe from that.
            raise LeasesLost(f"it is unknown which leases were released: {error}") from error

    def acquire(self, planned: Plan) -> None:
        # _mine may have more than ``leased``: after a lost connection, a lease may exist without an answer.
        wanted = planned.acquire[: planned.max_acquire]
        if wanted:
            with _coordinating():
                acquired = self._transport.acquire(self._consumer, self._worker_id, [one[1:] for one in wanted])
            self._mine |= {one for one in wanted if one[1:] in acquired}
        self.leased |= self._mine


@contextmanager
def _coordinating() -> Iterator[None]:
    """Turn the transport's errors into those of a ``Coordination``."""
    try:
        yield
    except NotFound as error:
        raise LeasesLost("another worker saw no heartbeat of this one, and removed it") from error
    except Unavailable as error:
        raise CoordinationUnavailable(str(error)) from error
