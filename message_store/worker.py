"""A worker that handles an application's messages, in order within each partition.

    Worker("mailer", send, application="shop").run()

The workers of one consumer share the partitions: one worker at a time leases a partition (``partition_sharing.py``) and
records its progress in the store as the consumer's position. A message is handled again if a worker is killed or loses
its leases before it records the position.

A worker gets three functions. The context is a context manager for the worker's lifetime. The job is called with each
message and the context's value. The failure handler is called with the job's exception; then the next message follows.
"""

import logging
import math
import random
import threading
import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from django.conf import settings
from django.db import close_old_connections, connections

from guardian_store import ids
from guardian_store.ids import MIN_TICKS, Place
from message_store import queues
from message_store.leases import DatabaseLeases
from message_store.partition_sharing import (
    Coordination,
    CoordinationError,
    CoordinationUnavailable,
    LeasesLost,
    Partition,
    clock,
)
from message_store.store import NewMessage, NoQueue, StoredQueue, StoreUnavailable, store
from message_store.zookeeper import ZooKeeperLeases

logger = logging.getLogger(__name__)

BATCH = 100
"""Messages per read."""

LEASE_SECONDS = 15.0
"""The leases of a worker expire after this time without a heartbeat."""

HEARTBEATS_PER_LEASE = 4

REFRESH_SECONDS = 2.0
"""The interval of refreshing the workers, queues and partitions."""

RECORD_INTERVAL_SECONDS = 1.0
"""The interval of recording positions: how much work is repeated after a kill."""

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 2.0
"""The interval of reading an empty partition begins with the first and doubles up to the second."""

MAX_IDLE_READS_PER_SECOND = 500
"""A worker with more than a thousand empty partitions polls each less often."""

MAX_BACKOFF_SECONDS = 10.0

QUEUES_PER_POSITION_REFRESH = 100
"""Queues whose positions each refresh reads, in turn, to follow positions that a client set."""

ERROR_QUEUE = "errors"
"""The application's queue for the failed messages that ``keep_failure`` keeps."""
ERROR_TTL_SECONDS = 30 * 24 * 3600


class Message(NamedTuple):
    """A message for the job."""

    id: uuid.UUID
    queue: str
    partition: int
    body: bytes
    content_type: str

    @property
    def timestamp(self) -> str:
        """The exact time of posting in seconds since 1970, with 7 decimals."""
        return ids.timestamp(self.id)


Job = Callable[[Message, Any], None]
Failure = Callable[[Message, Any, StoredQueue, Exception], None]


def log_failure(message: Message, context: Any, queue: StoredQueue, exception: Exception) -> None:
    """Log the failure."""
    logger.error(
        "The job failed for message %s in partition %s of queue %r of %r: %s",
        *(message.id.hex, message.partition, queue.name, queue.application, exception),
        exc_info=exception,
    )


def keep_failure(message: Message, context: Any, queue: StoredQueue, exception: Exception) -> None:
    """Log the failure, and copy the message to the queue ``errors`` for 30 days.

    A failed message of this queue itself is not copied, or it would fail forever.

    Raises:
        StoreUnavailable: the message is not copied. The worker handles it again.
    """
    log_failure(message, context, queue, exception)
    if queue.name == ERROR_QUEUE:
        return
    kept = NewMessage(message.body, 1, ERROR_TTL_SECONDS, message.content_type)
    try:
        try:
            errors = queues.find(queue.application, ERROR_QUEUE)
        except NoQueue:
            errors = queues.create(queue.application, ERROR_QUEUE)
        store().push(errors, [kept])
    except NoQueue as error:
        raise StoreUnavailable(f"The queue {ERROR_QUEUE} was just deleted.") from error


@dataclass(slots=True)
class _LeasedPartition:
    """A leased partition with the last message handled and the last position recorded."""

    queue: StoredQueue
    number: int
    done: uuid.UUID | None
    recorded: uuid.UUID | None
    wait: float = 0.0
    due: float = 0.0
    repositions: int = 0
    """Changes of the position by others. Messages read before a change are not handled after it."""


class Worker:
    """Handles messages until ``stop`` is called.

    ``queues`` are the names of the application's queues. The default is all current and future ones except ``errors``.
    All workers of a consumer should have the same queues.
    """

    def __init__(
        self,
        consumer: str,
        job: Job,
        *,
        application: str,
        queues: Sequence[str] = (),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        failure: Failure = log_failure,
        batch: int = BATCH,
        lease_seconds: float = LEASE_SECONDS,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        self.consumer = consumer
        self.application = application
        self._job = job
        self._names = list(dict.fromkeys(queues))
        self._context = context
        self._failure = failure
        self._batch = batch
        self._refresh_seconds = min(refresh_seconds, lease_seconds / HEARTBEATS_PER_LEASE)
        self._coordination = _coordination(application, consumer, lease_seconds)
        self._joined = False
        self._leased: dict[Partition, _LeasedPartition] = {}
        self._refresh_at = 0.0
        self._last_refreshed_queue = ""  # where the next refresh of positions begins
        self._record_at = math.inf  # nothing to record
        self._failures = 0  # consecutive ones
        self._waiting = False
        self._stopping = False
        # A SimpleQueue is reentrant, so signal handlers may put into it.
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    @property
    def partitions(self) -> list[Partition]:
        """The leased partitions."""
        return sorted(self._leased)

    def stop(self) -> None:
        """Finish the current message, release the leases and end. Any thread or signal handler may call this."""
        self._stopping = True
        self._wakeups.put(None)

    def run(self) -> None:
        """Handle messages until ``stop``, or until the failure handler raises anything but ``StoreUnavailable``.

        In both cases record the positions and release the leases.
        """
        with self._context() as context:
            ended = threading.Event()
            heartbeats = threading.Thread(
                target=self._send_heartbeats, args=(ended,), name=f"heartbeats of {self.consumer}", daemon=True
            )
            heartbeats.start()
            try:
                self._work(context)
            finally:
                try:
                    self._release_all()
                finally:
                    ended.set()
                    heartbeats.join()

    # The main loop

    def _work(self, context: Any) -> None:
        while not self._stopping:
            try:
                if not self._joined:
                    self._coordination.join()
                    self._joined, self._refresh_at = True, 0.0
                self._refresh_if_due()
                self._record_if_due()
                worked = self._handle_due_partitions(context)
                self._failures = 0
                if self._waiting:
                    logger.warning("The worker continues.")
                    self._waiting = False
                if not worked:
                    self._wait_until_due()
            except LeasesLost as error:
                logger.warning("The worker of %r rejoins: %s", self.consumer, error)
                self._joined = False
                self._leased.clear()
                self._back_off()
            except (CoordinationUnavailable, StoreUnavailable) as error:
                if not self._waiting:
                    logger.warning("The worker waits: %s", error)
                    self._waiting = True
                self._back_off()

    def _handle_due_partitions(self, context: Any) -> bool:
        """Handle a batch of each due partition, and return whether there was a message."""
        worked = False
        now = clock()
        for partition, leased in list(self._leased.items()):
            if leased.due <= now and self._leased.get(partition) is leased and not self._stopping:
                worked |= self._handle_batch(partition, leased, context)
        return worked

    def _handle_batch(self, partition: Partition, leased: _LeasedPartition, context: Any) -> bool:
        repositions = leased.repositions
        start = None if leased.done is None else ids.place_after(leased.done)
        messages = list(queues.read(leased.queue, [leased.number], start=start, limit=self._batch))
        if not messages:
            longest = max(MAX_POLL_SECONDS, len(self._leased) / MAX_IDLE_READS_PER_SECOND)
            leased.wait = min(max(2 * leased.wait, MIN_POLL_SECONDS), longest)
            leased.due = clock() + leased.wait * random.uniform(0.5, 1)  # noqa: S311 - not for security
            return False
        leased.wait = 0.0
        name, number, job, coordination = leased.queue.name, leased.number, self._job, self._coordination
        pause_at = self._pause_at()
        for stored in messages:
            # Check before each message: after a suspension of the process, others may have the partition.
            now = clock()
            if now >= pause_at or now >= coordination.leases_valid_until:
                self._confirm_leases()
                if leased.repositions != repositions or self._leased.get(partition) is not leased:
                    break
                pause_at = self._pause_at()
            if self._stopping:
                break
            message = Message(stored.id, name, number, stored.body, stored.content_type)
            try:
                job(message, context)
            except Exception as error:
                self._failure(message, context, leased.queue, error)
            leased.done = stored.id
        return True

    def _pause_at(self) -> float:
        """Return the time to pause handling for the next refresh or recording."""
        self._record_at = min(self._record_at, clock() + RECORD_INTERVAL_SECONDS)
        return min(self._refresh_at, self._record_at)

    def _confirm_leases(self) -> None:
        """Refresh and record if due, then make sure that the leases are valid.

        Raises:
            LeasesLost: the leases expired.
        """
        self._refresh_if_due()
        self._record_if_due()
        if not self._coordination.leases_valid:
            self._coordination.renew()

    def _send_heartbeats(self, ended: threading.Event) -> None:
        """Send heartbeats until ``ended``. Runs in a thread with its own database connections."""
        try:
            while not ended.wait(self._coordination.seconds / HEARTBEATS_PER_LEASE):
                if self._joined:
                    try:
                        self._coordination.renew()
                    except CoordinationError as error:
                        logger.debug("Heartbeat failed: %s", error)  # the main thread notices before its next message
        finally:
            connections.close_all()

    def _wait_until_due(self) -> None:
        """Wait until a partition, a refresh or a recording is due."""
        self._wait(
            min([self._refresh_at, self._record_at, *(leased.due for leased in self._leased.values())]) - clock()
        )

    def _back_off(self) -> None:
        """Wait before a retry, exponentially longer each time."""
        close_old_connections()
        self._refresh_at = self._record_at = 0.0
        seconds = min(MIN_POLL_SECONDS * 2 ** min(self._failures, 20), MAX_BACKOFF_SECONDS)
        self._failures += 1
        self._wait(seconds * random.uniform(0.5, 1))  # noqa: S311

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(Empty):
                self._wakeups.get(timeout=seconds)

    # Leases

    def _refresh_if_due(self) -> None:
        if clock() < self._refresh_at:
            return
        begun = clock()
        try:
            self._refresh()
        except CoordinationUnavailable:
            if not self._coordination.leases_valid:
                raise
        # With very many queues, refreshing takes at most a tenth of the time.
        took = clock() - begun
        self._refresh_at = clock() + max(self._refresh_seconds * random.uniform(0.8, 1.2), 10 * took)  # noqa: S311

    def _refresh(self) -> None:
        """Fetch the queues and workers, then release and acquire partitions for a fair share."""
        close_old_connections()
        existing = self._find_queues()
        for partition, leased in list(self._leased.items()):
            queue = existing.get(partition.queue)
            if queue is None or queue.created != leased.queue.created:
                del self._leased[partition]  # the queue's positions are deleted with it
            else:
                leased.queue = queue
        partitions = [
            Partition(self.application, queue.name, number)
            for queue in existing.values()
            for number in range(1, queue.partitions + 1)
        ]
        planned = self._coordination.plan(partitions)
        if planned.release:
            self._release(planned.release)
        self._coordination.acquire(planned)
        self._refresh_positions(existing)

    def _find_queues(self) -> dict[str, StoredQueue]:
        if not self._names:
            found, start = {}, ""
            while True:
                some = queues.queues(self.application, start=start)
                found.update({queue.name: queue for queue in some if queue.name != ERROR_QUEUE})
                if len(some) < queues.MAX_READ:
                    return found
                start = some[-1].name
        found = {}
        for name in self._names:
            try:
                found[name] = queues.find(self.application, name)
            except NoQueue:
                continue
        return found

    def _release(self, partitions: Collection[Partition]) -> None:
        self._record()
        for partition in partitions:
            self._leased.pop(partition, None)
        self._coordination.release(partitions)

    def _refresh_positions(self, existing: dict[str, StoredQueue]) -> None:
        """Read the positions of newly leased partitions, and follow changed positions of some others in turn."""
        by_queue = defaultdict(list)
        for partition in self._coordination.leased:
            by_queue[partition.queue].append(partition)
        names = sorted(by_queue)
        begin = bisect_right(names, self._last_refreshed_queue)
        in_turn = (names[begin:] + names[:begin])[:QUEUES_PER_POSITION_REFRESH]
        new = {partition.queue for partition in self._coordination.leased if partition not in self._leased}
        for name in new.union(in_turn):
            partitions, recorded = by_queue[name], store().positions(existing[name], self.consumer)
            for partition in partitions:
                leased, at = self._leased.get(partition), recorded.get(partition.number)
                if leased is None:
                    self._leased[partition] = _LeasedPartition(existing[name], partition.number, at, at)
                else:
                    self._follow_position(leased, at)
        self._last_refreshed_queue = in_turn[-1] if in_turn else ""

    def _follow_position(self, leased: _LeasedPartition, at: uuid.UUID | None) -> None:
        """Continue from a position that someone else set, unless this worker has passed it since its last recording."""
        if at == leased.recorded:
            return
        if not _place(leased.recorded) <= _place(at) <= _place(leased.done):
            logger.info("Continuing in partition %s of %r from a changed position.", leased.number, leased.queue.name)
            leased.done, leased.due = at, 0.0
            leased.repositions += 1
        leased.recorded = at

    # Positions

    def _record_if_due(self) -> None:
        if clock() >= self._record_at:
            self._record()

    def _record(self) -> None:
        """Record this worker's positions while its leases are valid.

        The store moves a position only from this worker's last recorded one. So a worker that is suspended between the
        check of its leases and the update can't revert another worker's progress.
        """
        moves: defaultdict[str, dict[int, _LeasedPartition]] = defaultdict(dict)
        for leased in self._leased.values():
            if leased.done is not None and leased.done != leased.recorded:
                moves[leased.queue.name][leased.number] = leased
        if moves and not self._coordination.leases_valid:
            self._coordination.renew()
        self._record_at = math.inf
        for by_number in moves.values():
            self._record_queue(next(iter(by_number.values())).queue, by_number)

    def _record_queue(self, queue: StoredQueue, by_number: dict[int, _LeasedPartition]) -> None:
        moves = {
            number: (leased.recorded, leased.done) for number, leased in by_number.items() if leased.done is not None
        }
        try:
            moved = store().advance_positions(queue, self.consumer, moves)
        except NoQueue:
            self._refresh_at = 0.0  # the refresh drops the partitions
            return
        for number in moved:
            by_number[number].recorded = moves[number][1]
        if len(moved) < len(moves):
            positions = store().positions(queue, self.consumer)
            for number in moves.keys() - moved:
                self._follow_position(by_number[number], positions.get(number))
            self._record_at = clock()

    def _release_all(self) -> None:
        """Record the positions and release the leases immediately."""
        try:
            self._record()
        except (CoordinationError, StoreUnavailable) as error:
            logger.warning("Could not record positions. The last messages will be handled again: %s", error)
        finally:
            self._joined = False
            self._leased.clear()
            self._coordination.leave()


def _coordination(application: str, consumer: str, seconds: float) -> Coordination:
    if settings.ZOOKEEPER_HOSTS:
        return ZooKeeperLeases(application, consumer, seconds, settings.ZOOKEEPER_HOSTS)
    return DatabaseLeases(application, consumer, seconds)


def _place(message_id: uuid.UUID | None) -> Place:
    return Place(MIN_TICKS - 1, 0) if message_id is None else ids.place(message_id)
