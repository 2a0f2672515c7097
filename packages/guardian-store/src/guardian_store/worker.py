"""A worker that handles an application's messages, in order within each partition.

    Worker("mailer", send, HTTPTransport(ADDRESS, "shop", key=KEY)).run()

The workers of one consumer share the partitions: one worker at a time has a partition (``partition_sharing.py``) and
records its progress in the store as the consumer's position. A message is handled again if a worker is killed or loses
its leases before it records the position.

A worker gets three functions. The context is a context manager for the worker's lifetime. The job is called with each
message and the context's value. The failure handler is called with the job's exception; then the next message follows.
"""

import logging
import math
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from uuid import UUID

from guardian_store import ids
from guardian_store.client import ClientError, Invalid, Message, NotFound, Page, RetryLater
from guardian_store.ids import MIN_TICKS, Place
from guardian_store.leases import HEARTBEATS_PER_LEASE, StoreLeases
from guardian_store.partition_sharing import (
    Coordination,
    CoordinationError,
    CoordinationUnavailable,
    LeasesLost,
    Partition,
    PinnedPartitions,
    clock,
)
from guardian_store.transport import Transport, WorkQueue

logger = logging.getLogger(__name__)

BATCH, MAX_BATCH = 100, 1000
"""Messages per read: the default, and the limit of the store."""

LEASE_SECONDS = 15.0
"""The leases of a worker expire after this time without a heartbeat."""

REFRESH_SECONDS = 2.0
"""The interval of refreshing the workers, queues and partitions."""

RECORD_INTERVAL_SECONDS = 1.0
"""The interval of recording positions: how much work is repeated after a kill."""

POLLS_PER_SECOND = 4.0
"""The limit for a worker's deployment in all, whatever the number of queues and idle partitions."""

MAX_POLL_SECONDS = 2.0
"""The interval of polling a queue with idle partitions doubles up to this, unless there are too many queues."""

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 10.0

ERROR_QUEUE = "errors"
"""The application's queue for the failed messages that ``keep_failure`` keeps."""
ERROR_TTL_SECONDS = 30 * 24 * 3600

Job = Callable[[Message, Any], None]
Failure = Callable[[Message, Any, WorkQueue, Exception], None]


def log_failure(message: Message, context: Any, queue: WorkQueue, exception: Exception) -> None:
    """Log the failure."""
    logger.error(
        "The job failed for message %s in partition %s of queue %r of %r: %s",
        *(message.id, message.partition, queue.name, queue.transport.application, exception),
        exc_info=exception,
    )


def keep_failure(message: Message, context: Any, queue: WorkQueue, exception: Exception) -> None:
    """Log the failure, and copy the message to the queue ``errors`` for 30 days.

    A failed message of this queue itself is not copied, or it would fail forever. Neither is one whose copy the store
    refuses, such as a copy that is too large for a request: it stays in its queue alone.

    Raises:
        Unavailable: the message is not copied. The worker handles it again.
    """
    log_failure(message, context, queue, exception)
    if queue.name == ERROR_QUEUE:
        return
    try:
        queue.transport.keep(message, ERROR_QUEUE, ERROR_TTL_SECONDS)
    except Invalid as error:
        logger.error(
            "Message %s is not copied to the queue %r, which refuses it: %s. Read it by its id in partition %s of %r, "
            "before it expires there.",
            *(message.id, ERROR_QUEUE, error, message.partition, queue.name),
        )


class Sharing(Protocol):
    """How the workers of a consumer share the partitions."""

    def coordination(self, transport: Transport, consumer: str) -> Coordination:
        """Return a new worker's view of the leases in a deployment."""
        ...


@dataclass(frozen=True, slots=True)
class Leases:
    """Share the partitions by leases that the store keeps.

    Others take a worker's partitions after ``seconds`` without a heartbeat.
    """

    seconds: float = LEASE_SECONDS

    def coordination(self, transport: Transport, consumer: str) -> Coordination:
        """Return a new worker's view of the leases in a deployment."""
        return StoreLeases(transport, consumer, self.seconds)


@dataclass(frozen=True, slots=True)
class ZooKeeper:
    """Share the partitions by leases in ZooKeeper. Needs the extra ``zookeeper``.

    ``hosts`` has the format ``host:port,host:port``, optionally with a path. ``seconds`` is the session's timeout. The
    server may change it to fit its bounds.
    """

    hosts: str
    seconds: float = LEASE_SECONDS

    def coordination(self, transport: Transport, consumer: str) -> Coordination:
        """Return a new worker's view of the leases in a deployment.

        Raises:
            ValueError: the hosts are malformed.
            ModuleNotFoundError: kazoo is not installed.
        """
        try:
            from guardian_store.zookeeper import ZooKeeperLeases
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("kazoo is missing: install guardian-store[zookeeper]", name="kazoo") from error
        return ZooKeeperLeases(transport.deployment, transport.application, consumer, self.seconds, self.hosts)


@dataclass(frozen=True)
class Pinned:
    """Give these partitions to the worker. Nothing stops another worker from handling them too."""

    partitions: Collection[Partition]

    def coordination(self, transport: Transport, consumer: str) -> Coordination:
        """Return the partitions of a deployment."""
        return PinnedPartitions([one for one in self.partitions if one.deployment == transport.deployment])


class Worker:
    """Handles messages until ``stop`` is called.

    Each transport is one deployment of the store. ``queues`` are the names of the application's queues. The default is
    all current and future ones except ``errors``; for pinned partitions, their queues. All workers of a consumer should
    have the same deployments, queues and kind of sharing.
    """

    def __init__(
        self,
        consumer: str,
        job: Job,
        *transports: Transport,
        queues: Sequence[str] = (),
        sharing: Sharing | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        failure: Failure = log_failure,
        batch: int = BATCH,
        polls_per_second: float = POLLS_PER_SECOND,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        names = [transport.deployment for transport in transports]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"A worker needs transports with different deployments, not {names}")
        if not 1 <= batch <= MAX_BATCH:
            raise ValueError(f"The batch is from 1 to {MAX_BATCH} messages, not {batch}")
        sharing = sharing or Leases()
        if isinstance(sharing, Pinned) and not queues:
            queues = sorted({one.queue for one in sharing.partitions})
        self.consumer = consumer
        self._job = job
        self._context = context
        self._failure = failure
        self._batch = batch
        self._deployments = [
            _Deployment(consumer, one, queues, sharing.coordination(one, consumer), polls_per_second, refresh_seconds)
            for one in transports
        ]
        self._stopping = False
        # A SimpleQueue is reentrant, so signal handlers may put into it.
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    @property
    def partitions(self) -> list[Partition]:
        """The partitions that this worker has."""
        return sorted(partition for one in self._deployments for partition in list(one.leased))

    def stop(self) -> None:
        """Finish the current message, release the leases and end. Any thread or signal handler may call this."""
        self._stopping = True
        self._wakeups.put(None)

    def run_until_signal(self) -> None:
        """Run until SIGTERM or SIGINT. Call this in the main thread."""
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> None:
        """Handle messages until ``stop``. In the end record the positions and release the leases.

        Raises:
            Exception: the failure handler raised something other than ``RetryLater``.
            Denied: the key is unknown, or lacks permission.
            NotFound: the application does not exist.
        """
        with self._context() as context, ExitStack() as at_end:
            ended = threading.Event()
            for one in self._deployments:
                at_end.callback(one.start_heartbeats(ended).join)
            at_end.callback(ended.set)
            for one in self._deployments:
                at_end.callback(one.release_all)
            self._work(context)

    def _work(self, context: Any) -> None:
        while not self._stopping:
            worked = False
            for one in self._deployments:
                if one.maintain():
                    worked |= self._handle_waiting(one, context)
            if not worked and not self._stopping:
                self._wait(min(one.due for one in self._deployments) - clock())

    def _handle_waiting(self, deployment: "_Deployment", context: Any) -> bool:
        """Handle a batch of each partition of a deployment that has more, and return whether there was a message."""
        worked = False
        with deployment.guarded():
            for leased in [one for one in deployment.leased.values() if one.has_more]:
                if not self._stopping and deployment.holds(leased):
                    worked |= self._handle_batch(deployment, leased, context)
            deployment.succeeded()
        return worked

    def _handle_batch(self, deployment: "_Deployment", leased: "_LeasedPartition", context: Any) -> bool:
        repositions = leased.repositions
        page = deployment.read(leased, self._batch)
        job, coordination = self._job, deployment.coordination
        pause_at = self._pause_at(deployment)
        for message in page.messages:
            # Check before each message: after a suspension of the process, others may have the partition.
            now = clock()
            if now >= pause_at or now >= coordination.leases_valid_until:
                for one in self._deployments:
                    one.confirm() if one is deployment else one.maintain()
                if leased.repositions != repositions or not deployment.holds(leased):
                    return True
                pause_at = self._pause_at(deployment)
            if self._stopping:
                return True
            try:
                job(message, context)
            except RetryLater:
                raise
            except Exception as error:
                self._failure(message, context, leased.queue, error)
            leased.done = message.id
        if not page.more:
            deployment.poll_later(leased)
        return bool(page.messages)

    def _pause_at(self, deployment: "_Deployment") -> float:
        """Return the time to pause handling for the next refresh or recording."""
        deployment.record_soon()
        return min(one.next_pause for one in self._deployments)

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(Empty):
                self._wakeups.get(timeout=seconds)


@dataclass(slots=True, eq=False)
class _LeasedPartition:
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

    leased: list[_LeasedPartition] = field(default_factory=list)
    wait: float = 0.0
    due: float = 0.0


class _Deployment:
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
        self.leased: dict[Partition, _LeasedPartition] = {}
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
        """The time of the next action."""
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
        """Refresh and record if due, then make sure that the leases are valid.

        Raises:
            LeasesLost: the leases expired.
        """
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
        """Reset the backoff."""
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

    def holds(self, leased: _LeasedPartition) -> bool:
        """Return whether this worker still has the partition."""
        return self.leased.get(leased.partition) is leased

    def read(self, leased: _LeasedPartition, limit: int) -> Page:
        """Return the next messages of a partition; none if its queue was deleted."""
        try:
            return self._transport.read(leased.queue, leased.partition.number, leased.done, limit)
        except NotFound:
            self._refresh_now()
            return Page([], more=False)

    def poll_later(self, leased: _LeasedPartition) -> None:
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

    def _poll(self, idle: list[_LeasedPartition]) -> None:
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
        """Start and return a thread that sends heartbeats until ``ended``."""
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
        """Read the positions of newly leased partitions."""
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
                self.leased[one] = _LeasedPartition(one, queue, at, at, one.number in progress.waiting)
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
        """Record the positions and release the leases immediately."""
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
        """Record positions within the interval."""
        self._record_at = min(self._record_at, clock() + RECORD_INTERVAL_SECONDS)

    def _record_if_due(self) -> None:
        if clock() >= self._record_at:
            self._record()

    def _record(self) -> None:
        """Record this worker's positions while its leases are valid.

        The store moves a position only from this worker's last recorded one. So a worker that is suspended between the
        check of its leases and the update can't revert another worker's progress.
        """
        moves: defaultdict[str, list[_LeasedPartition]] = defaultdict(list)
        for leased in self.leased.values():
            if leased.done is not None and leased.done != leased.recorded:
                moves[leased.partition.queue].append(leased)
        if moves and not self.coordination.leases_valid:
            self.coordination.renew()
        self._record_at = math.inf
        for some in moves.values():
            self._record_queue(some)

    def _record_queue(self, moved: list[_LeasedPartition]) -> None:
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

    def _follow_position(self, leased: _LeasedPartition, at: str | None) -> None:
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
