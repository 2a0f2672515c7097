"""One deployment of the message store, as a worker uses it: its leases, polls and positions."""

import logging
import math
import random
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from guardian_store import _ids as ids
from guardian_store._ids import MIN_TICKS, Place
from guardian_store._leases import HEARTBEATS_PER_LEASE
from guardian_store._partition_sharing import (
    Coordination,
    CoordinationError,
    CoordinationUnavailable,
    LeasesLost,
    Partition,
    clock,
)
from guardian_store._protocol import ClientError, NotFound, Page, RetryLater
from guardian_store._transport import Transport, WorkQueue

logger = logging.getLogger(__name__)

RECORD_INTERVAL_SECONDS = 1.0
"""The interval of recording positions: how much work is repeated after a kill."""

MAX_POLL_SECONDS = 2.0
"""The interval of polling a queue with idle partitions doubles up to this, unless there are too many queues."""

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 10.0

ERROR_QUEUE = "errors"
"""The application's queue for the failed messages that ``keep_failure`` keeps."""


@dataclass(slots=True, eq=False)
class LeasedPartition:
    """A leased partition with the last message handled and the last position recorded."""

    partition: Partition
    queue: WorkQueue
    done: str | None
    recorded: str | None
    has_more: bool
    repositions: int = 0
    """Changes of the position by others. Messages read before a change are not handled after it."""


@dataclass(slots=True)
class _Poll:
    """The next poll of a queue's empty partitions."""

    leased: list[LeasedPartition] = field(default_factory=list)
    wait: float = 0.0
    due: float = 0.0


class Deployment:
    """The partitions that a worker has in one deployment of the store."""

    def __init__(
        self,
        consumer: str,
        transport: Transport,
        names: Sequence[str],
        coordination: Coordination,
        polls_per_second: float,
        refresh_seconds: float,
    ) -> None:
        self.coordination = coordination
        self.leased: dict[Partition, LeasedPartition] = {}
        self._consumer = consumer
        self._transport = transport
        self._names = list(dict.fromkeys(names))
        self._existing: dict[str, WorkQueue] = {}
        self._missing: list[str] = []
        self._polls: dict[str, _Poll] = {}
        self._joined = False
        self._polls_per_second = polls_per_second
        self._refresh_seconds = min(refresh_seconds, coordination.seconds / HEARTBEATS_PER_LEASE)
        self._refresh_at = self._list_at = 0.0
        self._record_at = math.inf  # nothing to record
        self._resume_at = 0.0
        self._failures = 0  # consecutive ones
        self._waiting = False

    # The main loop

    @property
    def due(self) -> float:
        if clock() < self._resume_at:
            return self._resume_at
        return min([self._refresh_at, self._record_at, *(poll.due for poll in self._polls.values())])

    @property
    def next_pause(self) -> float:
        """The time from which no further message is handled before ``confirm`` or ``maintain``."""
        return max(self._resume_at, min(self._refresh_at, self._record_at))

    def maintain(self) -> bool:
        """Join, refresh, record and poll as far as due. Return whether messages can be handled."""
        if clock() < self._resume_at:
            return False
        with self.guarded():
            if not self._joined:
                self.coordination.join()
                self._joined, self._refresh_at = True, 0.0
            self.confirm()
            self._poll_if_due()
            return True
        return False

    def confirm(self) -> None:
        """Refresh and record if due, then make sure that the leases are valid. Raises LeasesLost if they expired."""
        self._refresh_if_due()
        self._record_if_due()
        if not self.coordination.leases_valid:
            self.coordination.renew()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Catch temporary errors, and wait exponentially longer before the next attempt."""
        try:
            yield
        except LeasesLost as error:
            logger.warning("The worker of %r rejoins: %s", self._consumer, error)
            self._joined = False
            self._forget_partitions()
            self._back_off()
        except (CoordinationUnavailable, RetryLater) as error:
            if not self._waiting:
                logger.warning("The worker waits: %s", error)
                self._waiting = True
            self._back_off()

    def succeeded(self) -> None:
        self._failures = 0
        if self._waiting:
            logger.warning("The worker continues.")
            self._waiting = False

    def _back_off(self) -> None:
        self._refresh_at = self._list_at = self._record_at = 0.0
        seconds = min(MIN_BACKOFF_SECONDS * 2 ** min(self._failures, 20), MAX_BACKOFF_SECONDS)
        self._failures += 1
        self._resume_at = clock() + seconds * random.uniform(0.5, 1)  # noqa: S311 - not for security

    # Messages

    def holds(self, leased: LeasedPartition) -> bool:
        return self.leased.get(leased.partition) is leased

    def read(self, leased: LeasedPartition, limit: int) -> Page:
        """Return the next messages of a partition; none if its queue was deleted."""
        try:
            return self._transport.read(leased.queue, leased.partition.number, leased.done, limit)
        except NotFound:
            self._refresh_now()
            return Page([], more=False)

    def poll_later(self, leased: LeasedPartition) -> None:
        """Poll a partition that was read to its end, from now on with a growing interval."""
        leased.has_more = False
        if poll := self._polls.get(leased.partition.queue):
            poll.wait = 0.0
            self._postpone(poll)

    def _postpone(self, poll: _Poll) -> None:
        poll.wait = max(len(self._polls) / self._polls_per_second, min(2 * poll.wait, MAX_POLL_SECONDS))
        poll.due = clock() + poll.wait * random.uniform(0.75, 1.25)  # noqa: S311

    def _poll_if_due(self) -> None:
        for poll in list(self._polls.values()):
            if poll.due > clock():
                continue
            idle = [one for one in poll.leased if not one.has_more and self.holds(one)]
            if idle:
                self._poll(idle)
            self._postpone(poll)

    def _poll(self, idle: list[LeasedPartition]) -> None:
        """Find out which of these partitions of a queue have messages, and follow positions that others changed."""
        if any(one.done != one.recorded for one in idle):
            self._record()
        try:
            progress = self._transport.progress(idle[0].queue, self._consumer, [one.partition.number for one in idle])
        except NotFound:
            self._refresh_now()
            return
        for one in idle:
            self._follow_position(one, progress.positions.get(one.partition.number))
            if one.partition.number in progress.waiting:
                one.has_more = True

    # Leases

    def start_heartbeats(self, ended: threading.Event) -> threading.Thread:
        thread = threading.Thread(
            target=self._send_heartbeats, args=(ended,), name=f"heartbeats of {self._consumer}", daemon=True
        )
        thread.start()
        return thread

    def _send_heartbeats(self, ended: threading.Event) -> None:
        try:
            while not ended.wait(min(self.coordination.seconds / HEARTBEATS_PER_LEASE, threading.TIMEOUT_MAX)):
                if self._joined:
                    try:
                        self.coordination.renew()
                    except (CoordinationError, ClientError) as error:
                        logger.debug("Heartbeat failed: %s", error)  # the main thread notices before its next message
        finally:
            self._transport.end_thread()

    def _refresh_now(self) -> None:
        self._refresh_at = self._list_at = 0.0

    def _refresh_if_due(self) -> None:
        if clock() < self._refresh_at:
            return
        begun = clock()
        try:
            self._refresh()
        except CoordinationUnavailable:
            if not self.coordination.leases_valid:
                raise
        # With very many queues, refreshing takes at most a tenth of the time.
        took = clock() - begun
        self._refresh_at = clock() + max(self._refresh_seconds * random.uniform(0.8, 1.2), 10 * took)  # noqa: S311

    def _refresh(self) -> None:
        """Fetch the queues and workers, then release and acquire partitions for a fair share."""
        existing = self._find_queues()
        for partition, leased in list(self.leased.items()):
            queue = existing.get(partition.queue)
            if queue is None or queue.created != leased.queue.created:
                del self.leased[partition]  # the queue's positions are deleted with it
            else:
                leased.queue = queue
        partitions = [
            Partition(self._transport.deployment, queue.name, number)
            for queue in existing.values()
            for number in range(1, queue.partitions + 1)
        ]
        planned = self.coordination.plan(partitions)
        if planned.release:
            self._release(planned.release)
        self.coordination.acquire(planned)
        self._begin_new(existing)

    def _find_queues(self) -> dict[str, WorkQueue]:
        if clock() >= self._list_at:
            found = self._transport.queues(self._names)
            self._existing = {name: queue for name, queue in found.items() if self._names or name != ERROR_QUEUE}
            self._list_at = clock() + len(self._names) / self._polls_per_second
            missing = [name for name in self._names if name not in found]
            if missing and missing != self._missing:
                logger.warning("These queues of %r don't exist yet: %s", self._transport.application, missing)
            self._missing = missing
        return self._existing

    def _release(self, partitions: Collection[Partition]) -> None:
        self._record()
        for partition in partitions:
            self.leased.pop(partition, None)
        self.coordination.release(partitions)

    def _begin_new(self, existing: dict[str, WorkQueue]) -> None:
        new: defaultdict[str, list[Partition]] = defaultdict(list)
        for partition in self.coordination.leased:
            if partition not in self.leased:
                new[partition.queue].append(partition)
        for name, partitions in new.items():
            queue = existing[name]
            try:
                progress = self._transport.progress(queue, self._consumer, [one.number for one in partitions])
            except NotFound:
                self._list_at = 0.0  # the next refresh releases them
                continue
            for one in partitions:
                at = progress.positions.get(one.number)
                self.leased[one] = LeasedPartition(one, queue, at, at, one.number in progress.waiting)
        polls: dict[str, _Poll] = {}
        for partition, leased in self.leased.items():
            if partition.queue not in polls:
                known = self._polls.get(partition.queue, _Poll())
                polls[partition.queue] = _Poll([], known.wait, known.due)
            polls[partition.queue].leased.append(leased)
        self._polls = polls
        for poll in polls.values():
            if not poll.due:
                self._postpone(poll)

    def _forget_partitions(self) -> None:
        self.leased.clear()
        self._polls.clear()

    def release_all(self) -> None:
        try:
            self._record()
        except (CoordinationError, ClientError) as error:
            logger.warning("Could not record positions. The last messages will be handled again: %s", error)
        finally:
            self._joined = False
            self._forget_partitions()
            self.coordination.leave()

    # Positions

    def record_soon(self) -> None:
        self._record_at = min(self._record_at, clock() + RECORD_INTERVAL_SECONDS)

    def _record_if_due(self) -> None:
        if clock() >= self._record_at:
            self._record()

    def _record(self) -> None:
        """Record this worker's positions while its leases are valid.

        The store moves a position only from this worker's last recorded one. So a worker that is suspended between the
        check of its leases and the update can't revert another worker's progress.
        """
        moves: defaultdict[str, list[LeasedPartition]] = defaultdict(list)
        for leased in self.leased.values():
            if leased.done is not None and leased.done != leased.recorded:
                moves[leased.partition.queue].append(leased)
        if moves and not self.coordination.leases_valid:
            self.coordination.renew()
        self._record_at = math.inf
        for some in moves.values():
            self._record_queue(some)

    def _record_queue(self, moved: list[LeasedPartition]) -> None:
        moves = {one.partition.number: (one.recorded, one.done) for one in moved if one.done is not None}
        try:
            positions = self._transport.advance_positions(moved[0].queue, self._consumer, moves)
        except NotFound:
            self._refresh_now()  # the refresh drops the partitions
            return
        for one in moved:
            at = positions.get(one.partition.number)
            if at == one.done:
                one.recorded = at
            else:
                self._follow_position(one, at)
                self._record_at = clock()

    def _follow_position(self, leased: LeasedPartition, at: str | None) -> None:
        """Continue from a position that someone else set, unless this worker has passed it since its last recording."""
        if at == leased.recorded:
            return
        if not _place(leased.recorded) <= _place(at) <= _place(leased.done):
            logger.info("Continuing in %s from a changed position.", leased.partition)
            leased.done, leased.has_more = at, True
            leased.repositions += 1
        leased.recorded = at


def _place(message_id: str | None) -> Place:
    return Place(MIN_TICKS - 1, 0) if message_id is None else ids.place(UUID(message_id))
