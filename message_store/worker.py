"""A worker: it handles the messages of partitions, each partition in order, and shares them with other workers.

    Worker("mailer", send, application="shop").run()

An application's workers with the same consumer's name share what there is. Each partition is one worker's at a time
(``partition_sharing.py``), and how far its messages are handled is recorded as the consumer's position in the store, for whoever
comes next. A message is handled once, and again where a worker was killed, or lost what it held, before that was
recorded.

Three functions make the work: the context, a context manager around the worker's life; the job, called with each
message and what the context gives; the failure, called with what the job raised. After either the next one follows.
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
"""Messages that are read at once."""

LEASE_SECONDS = 15.0
"""A worker that wasn't heard for so long is gone, and others get what it held."""

HEARTBEATS_PER_LEASE = 4
"""How often a worker is heard in that time."""

REFRESH_SECONDS = 2.0
"""How often it is looked who is there, and which queues and partitions."""

RECORD_INTERVAL_SECONDS = 1.0
"""How much of its work a worker may have to leave to be done again when it is killed."""

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 2.0
"""Seconds before a partition without messages is read again: twice as long each time, up to the second."""

MAX_IDLE_READS_PER_SECOND = 500
"""In a second, of partitions without messages: a worker that holds more than a thousand waits longer."""

MAX_BACKOFF_SECONDS = 10.0
"""Seconds before a store that is away is tried again, at most."""

POSITIONS_PER_REFRESH = 100
"""Queues whose positions are read again with each look, in turn: to go to where somebody set them."""

ERROR_QUEUE = "errors"
"""The queue of the application that ``keep_failure`` keeps messages in, for so many seconds."""
ERROR_TTL_SECONDS = 30 * 24 * 3600


class Message(NamedTuple):
    """A message to be handled."""

    id: uuid.UUID
    queue: str
    partition: int
    body: bytes
    content_type: str

    @property
    def timestamp(self) -> str:
        """When it was posted: seconds since 1970, exactly, with 7 decimals."""
        return ids.timestamp(self.id)


Job = Callable[[Message, Any], None]
Failure = Callable[[Message, Any, StoredQueue, Exception], None]


def log_failure(message: Message, context: Any, queue: StoredQueue, exception: Exception) -> None:
    """Log that a message could not be handled."""
    logger.error(
        "Message %s in partition %s of queue %r of %r could not be handled: %s",
        *(message.id.hex, message.partition, queue.name, queue.application, exception),
        exc_info=exception,
    )


def keep_failure(message: Message, context: Any, queue: StoredQueue, exception: Exception) -> None:
    """Log that a message could not be handled, and keep it, as it is, for 30 days in the queue ``errors``.

    One that comes from there is there already, and isn't kept again: it would come again, without end.

    Raises:
        StoreUnavailable: it isn't kept. The worker handles the message again.
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
        raise StoreUnavailable(f"The queue {ERROR_QUEUE} was removed at this moment.") from error


@dataclass(slots=True)
class _LeasedPartition:
    """A partition that this worker holds, and how far it is: what it has done, and what the store says of that."""

    queue: StoredQueue
    number: int
    done: uuid.UUID | None
    recorded: uuid.UUID | None
    wait: float = 0.0
    due: float = 0.0
    repositions: int = 0
    """How often somebody else set the position. What was read before it isn't handled after it."""


class Worker:
    """Handles messages until it is told to stop.

    ``queues`` are the names of the application's queues; without any, it is all of them but ``errors``, also those that
    are made later. The workers of one consumer should have the same.
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
        self._last_refreshed_queue = ""  # the queue whose positions were the last to be read again
        self._record_at = math.inf  # all is recorded
        self._failures = 0  # how often in a row something could not be reached, or what was held was lost
        self._waiting = False
        self._stopping = False
        # A signal handler may put into this kind of queue, whatever it interrupts.
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    @property
    def partitions(self) -> list[Partition]:
        """What this worker holds."""
        return sorted(self._leased)

    def stop(self) -> None:
        """Finish the message in hand, hand everything over and end. Any thread or signal handler may call this."""
        self._stopping = True
        self._wakeups.put(None)

    def run(self) -> None:
        """Work until ``stop``. What the failure raises, but for ``StoreUnavailable``, ends the worker and goes through.

        What was handled until then is recorded, and others have at once what this worker held.
        """
        with self._context() as context:
            ended = threading.Event()
            beating = threading.Thread(
                target=self._send_heartbeats, args=(ended,), name=f"beats of {self.consumer}", daemon=True
            )
            beating.start()
            try:
                self._work(context)
            finally:
                try:
                    self._release_all()
                finally:
                    ended.set()
                    beating.join()

    # What it goes through

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
                    logger.warning("Going on.")
                    self._waiting = False
                if not worked:
                    self._wait_until_due()
            except LeasesLost as error:
                logger.warning("This worker of %r begins anew: %s", self.consumer, error)
                self._joined = False
                self._leased.clear()
                self._back_off()
            except (CoordinationUnavailable, StoreUnavailable) as error:
                if not self._waiting:
                    logger.warning("Waiting: %s", error)
                    self._waiting = True
                self._back_off()

    def _handle_due_partitions(self, context: Any) -> bool:
        """Handle a batch of each partition that is due, and return whether there was a message."""
        worked = False
        now = clock()
        for partition, held in list(self._leased.items()):
            if held.due <= now and self._leased.get(partition) is held and not self._stopping:
                worked |= self._handle_batch(partition, held, context)
        return worked

    def _handle_batch(self, partition: Partition, held: _LeasedPartition, context: Any) -> bool:
        moved = held.repositions
        start = None if held.done is None else ids.place_after(held.done)
        messages = queues.read(held.queue, [held.number], start=start, limit=self._batch).messages
        if not messages:
            longest = max(MAX_POLL_SECONDS, len(self._leased) / MAX_IDLE_READS_PER_SECOND)
            held.wait = min(max(2 * held.wait, MIN_POLL_SECONDS), longest)
            held.due = clock() + held.wait * random.uniform(0.5, 1)  # noqa: S311 - nobody is to be outwitted
            return False
        held.wait = 0.0
        name, number, job, coordination = held.queue.name, held.number, self._job, self._coordination
        pause_at = self._pause_at()
        for stored in messages:
            # So before each message: a process that was stopped for a while learns here that others have its partition.
            now = clock()
            if now >= pause_at or now >= coordination.leases_valid_until:
                self._confirm_leases()
                if held.repositions != moved or self._leased.get(partition) is not held:
                    break
                pause_at = self._pause_at()
            if self._stopping:
                break
            message = Message(stored.id, name, number, stored.body, stored.content_type)
            try:
                job(message, context)
            except Exception as error:
                self._failure(message, context, held.queue, error)
            held.done = stored.id
        return True

    def _pause_at(self) -> float:
        """Return when something else is due than the messages that are about to be handled, and then to be recorded."""
        self._record_at = min(self._record_at, clock() + RECORD_INTERVAL_SECONDS)
        return min(self._refresh_at, self._record_at)

    def _confirm_leases(self) -> None:
        """Do what is due, and be sure then of what is still held.

        Raises:
            LeasesLost: others may have it.
        """
        self._refresh_if_due()
        self._record_if_due()
        if not self._coordination.leases_valid:
            self._coordination.renew()

    def _send_heartbeats(self, ended: threading.Event) -> None:
        """Have this worker heard while the other thread is at work, in a thread with connections of its own."""
        try:
            while not ended.wait(self._coordination.seconds / HEARTBEATS_PER_LEASE):
                if self._joined:
                    try:
                        self._coordination.renew()
                    except CoordinationError as error:
                        logger.debug("No beat: %s", error)  # the other thread notices before its next message
        finally:
            connections.close_all()

    def _wait_until_due(self) -> None:
        """Wait until something is due."""
        self._wait(min([self._refresh_at, self._record_at, *(held.due for held in self._leased.values())]) - clock())

    def _back_off(self) -> None:
        """Wait before what failed is tried again: twice as long each time."""
        close_old_connections()
        self._refresh_at = self._record_at = 0.0
        longest = min(MIN_POLL_SECONDS * 2 ** min(self._failures, 20), MAX_BACKOFF_SECONDS)
        self._failures += 1
        self._wait(longest * random.uniform(0.5, 1))  # noqa: S311

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(Empty):
                self._wakeups.get(timeout=seconds)

    # What it holds

    def _refresh_if_due(self) -> None:
        if clock() < self._refresh_at:
            return
        begun = clock()
        try:
            self._refresh()
        except CoordinationUnavailable:
            if not self._coordination.leases_valid:
                raise
        # Of very many queues, not more than a tenth of the time is spent with looking.
        took = clock() - begun
        self._refresh_at = clock() + max(self._refresh_seconds * random.uniform(0.8, 1.2), 10 * took)  # noqa: S311

    def _refresh(self) -> None:
        """Look which queues there are and who else works on them, hand over what is too much, and take what is free."""
        close_old_connections()
        there = self._find_queues()
        for partition, held in list(self._leased.items()):
            now = there.get(partition.queue)
            if now is None or now.created != held.queue.created:
                del self._leased[partition]  # with the queue its positions are gone
            else:
                held.queue = now
        partitions = [
            Partition(self.application, queue.name, number)
            for queue in there.values()
            for number in range(1, queue.partitions + 1)
        ]
        planned = self._coordination.plan(partitions)
        if planned.release:
            self._release(planned.release)
        self._coordination.acquire(planned)
        self._refresh_positions(there)

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

    def _refresh_positions(self, there: dict[str, StoredQueue]) -> None:
        """Begin with what is held since now, and go to where somebody set the positions of what was held before."""
        by_queue = defaultdict(list)
        for partition in self._coordination.leased:
            by_queue[partition.queue].append(partition)
        names = sorted(by_queue)
        begin = bisect_right(names, self._last_refreshed_queue)
        in_turn = (names[begin:] + names[:begin])[:POSITIONS_PER_REFRESH]
        new = {partition.queue for partition in self._coordination.leased if partition not in self._leased}
        for name in new.union(in_turn):
            partitions, recorded = by_queue[name], store().positions(there[name], self.consumer)
            for partition in partitions:
                held, at = self._leased.get(partition), recorded.get(partition.number)
                if held is None:
                    self._leased[partition] = _LeasedPartition(there[name], partition.number, at, at)
                else:
                    self._follow_position(held, at)
        self._last_refreshed_queue = in_turn[-1] if in_turn else ""

    def _follow_position(self, held: _LeasedPartition, at: uuid.UUID | None) -> None:
        """Go on from a position that somebody else set, unless it is where this worker was since the last record."""
        if at == held.recorded:
            return
        if not _place(held.recorded) <= _place(at) <= _place(held.done):
            logger.info("Going on in partition %s of %r from where it was set.", held.number, held.queue.name)
            held.done, held.due = at, 0.0
            held.repositions += 1
        held.recorded = at

    # How far it is

    def _record_if_due(self) -> None:
        if clock() >= self._record_at:
            self._record()

    def _record(self) -> None:
        """Record how far this worker is, while it is sure to hold what it has handled.

        A store moves a position only from where this worker last saw it: so one that was stopped between the question
        whether it is still there and this, for however long, takes nobody's work back.
        """
        moves: defaultdict[str, dict[int, _LeasedPartition]] = defaultdict(dict)
        for held in self._leased.values():
            if held.done is not None and held.done != held.recorded:
                moves[held.queue.name][held.number] = held
        if moves and not self._coordination.leases_valid:
            self._coordination.renew()
        self._record_at = math.inf
        for by_number in moves.values():
            self._record_queue(next(iter(by_number.values())).queue, by_number)

    def _record_queue(self, queue: StoredQueue, by_number: dict[int, _LeasedPartition]) -> None:
        wanted = {number: (held.recorded, held.done) for number, held in by_number.items() if held.done is not None}
        try:
            moved = store().advance_positions(queue, self.consumer, wanted)
        except NoQueue:
            self._refresh_at = 0.0  # which drops the partitions
            return
        for number in moved:
            by_number[number].recorded = wanted[number][1]
        if len(moved) < len(wanted):
            there = store().positions(queue, self.consumer)
            for number in wanted.keys() - moved:
                self._follow_position(by_number[number], there.get(number))
            self._record_at = clock()

    def _release_all(self) -> None:
        """Record how far this worker is, and have others take at once what it held."""
        try:
            self._record()
        except (CoordinationError, StoreUnavailable) as error:
            logger.warning("What was handled last is handled again, as it could not be recorded: %s", error)
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
