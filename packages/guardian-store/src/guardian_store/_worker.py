"""A worker that handles an application's messages, in order within each partition.

    Worker("mailer", send, HTTPTransport(ADDRESS, "shop", key=KEY)).run()

The workers of one consumer share the partitions: one worker at a time has a partition (``_partition_sharing.py``) and
records its progress in the store as the consumer's position. A message is handled again if a worker is killed or loses
its leases before it records the position.
"""

import inspect
import logging
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from guardian_store._deployment import ERROR_QUEUE, Deployment, LeasedPartition
from guardian_store._leases import StoreLeases
from guardian_store._partition_sharing import (
    Coordination,
    Partition,
    PinnedPartitions,
    clock,
)
from guardian_store._protocol import Invalid, Message, RetryLater
from guardian_store._transport import Transport, WorkQueue

logger = logging.getLogger(__name__)

BATCH, MAX_BATCH = 100, 1000
"""Messages per read: the default, and the limit of the store."""

LEASE_SECONDS = 15.0
"""The leases of a worker expire after this time without a heartbeat."""

REFRESH_SECONDS = 2.0
"""The interval of refreshing the workers, queues and partitions."""

POLLS_PER_SECOND = 4.0
"""The limit for a worker's deployment in all, whatever the number of queues and idle partitions."""
ERROR_TTL_SECONDS = 30 * 24 * 3600

Job = Callable[[Message, Any], object]
"""Handles a message. It also gets the context's value."""

Failure = Callable[[Message, Any, WorkQueue, Exception], object]
"""Handles the exception of a job. It also gets the message, the context's value, and the queue."""


def log_failure(message: Message, context: Any, queue: WorkQueue, exception: Exception) -> None:
    """Log the failure with its traceback, and go on with the next message."""
    logger.error(
        "The job failed for message %s in partition %s of queue %r of %r: %s",
        *(message.id, message.partition, queue.name, queue.transport.application, exception),
        exc_info=exception,
    )


def keep_failure(message: Message, context: Any, queue: WorkQueue, exception: Exception) -> None:
    """Log the failure, and copy the message to the queue ``errors`` for 30 days.

    A failed message of this queue itself is not copied, or it would fail forever. Neither is one whose copy the store
    refuses, such as a copy that is too large for a request: it stays in its queue alone. Raises Unavailable if the
    message is not copied. Then the worker handles it again.
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


_LAZY_FUNCTIONS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_USE_THE_RECIPE = 'A worker does not run it: see the recipe "A job that is a coroutine"'


def _require_result(result: object) -> None:
    """Raise TypeError for a coroutine or generator: nothing runs it, and the message would count as handled."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
    elif not inspect.isasyncgen(result):
        return
    raise TypeError(f"The job returned {result!r}. {_USE_THE_RECIPE}")


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
        """Return a new worker's view. Raises ValueError for malformed hosts, and ModuleNotFoundError without kazoo."""
        try:
            from guardian_store._zookeeper import ZooKeeperLeases
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("kazoo is missing: install guardian-store[zookeeper]", name="kazoo") from error
        return ZooKeeperLeases(transport.deployment, transport.application, consumer, self.seconds, self.hosts)


@dataclass(frozen=True)
class Pinned:
    """Give these partitions to the worker. Nothing stops another worker from handling them too."""

    partitions: Collection[Partition]

    def coordination(self, transport: Transport, consumer: str) -> Coordination:
        return PinnedPartitions([one for one in self.partitions if one.deployment == transport.deployment])


class Worker:
    """Handles messages until ``stop`` is called.

    The workers of one consumer share the partitions. Each transport is one deployment of the store. ``queues`` are the
    names of the application's queues. The default is all current and future ones except ``errors``; for pinned
    partitions, their queues. ``sharing`` is ``Leases`` by default. All workers of a consumer should have the same
    deployments, queues and kind of sharing.

    ``job`` is a plain function, called with each message; see the recipe for coroutines. If it raises, ``failure`` is
    called, and then the next message follows. ``context`` creates a context manager for the worker's lifetime, whose
    value both get.

    ``batch`` is the number of messages per read, ``polls_per_second`` limits the polls of idle queues, and
    ``refresh_seconds`` is the interval of looking for new workers, queues and partitions.
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
        for function in (job, failure):
            if any(is_lazy(function) for is_lazy in _LAZY_FUNCTIONS):
                raise ValueError(f"{function!r} is a coroutine or generator function. {_USE_THE_RECIPE}")
        sharing = sharing or Leases()
        if isinstance(sharing, Pinned) and not queues:
            queues = sorted({one.queue for one in sharing.partitions})
        self.consumer = consumer
        self._job = job
        self._context = context
        self._failure = failure
        self._batch = batch
        self._deployments = [
            Deployment(consumer, one, queues, sharing.coordination(one, consumer), polls_per_second, refresh_seconds)
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

        Raises the failure handler's exception other than ``RetryLater``; Denied if the key is unknown or lacks
        permission; NotFound if the application does not exist.
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

    def _handle_waiting(self, deployment: "Deployment", context: Any) -> bool:
        """Handle a batch of each partition of a deployment that has more, and return whether there was a message."""
        worked = False
        with deployment.guarded():
            for leased in [one for one in deployment.leased.values() if one.has_more]:
                if not self._stopping and deployment.holds(leased):
                    worked |= self._handle_batch(deployment, leased, context)
            deployment.succeeded()
        return worked

    def _handle_batch(self, deployment: "Deployment", leased: "LeasedPartition", context: Any) -> bool:
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
                result = job(message, context)
            except RetryLater:
                raise
            except Exception as error:
                result = self._failure(message, context, leased.queue, error)
            _require_result(result)
            leased.done = message.id
        if not page.more:
            deployment.poll_later(leased)
        return bool(page.messages)

    def _pause_at(self, deployment: "Deployment") -> float:
        """Return the time to pause handling for the next refresh or recording."""
        deployment.record_soon()
        return min(one.next_pause for one in self._deployments)

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(Empty):
                self._wakeups.get(timeout=seconds)
