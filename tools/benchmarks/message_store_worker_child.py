"""A worker, alternating with a bare loop over the store. Runs in ``tools.benchmarks.child``."""

import os
import time
from collections.abc import Callable
from typing import Any

from guardian_store import Worker, ids
from message_store import queues
from message_store.queues import MessageInput
from message_store.store import StoredQueue, store
from message_store.worker import StoreTransport

BATCH_SIZE = 1000


def measure(vhost: str, rounds: int, messages: int, size: int, batch: int) -> dict[str, Any]:
    """Return the seconds of each from the first message of a partition to the last."""
    queue = queues.create("bench", "queue")
    for _ in range(messages // BATCH_SIZE):
        queues.post_all(queue, [MessageInput(os.urandom(size)) for _ in range(BATCH_SIZE)])
    kinds = {"worker": _worker, "bare": _bare}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds if number % 2 else reversed(kinds):
            seconds[kind].append(kinds[kind](queue, messages, batch))
    return seconds


def _bare(queue: StoredQueue, messages: int, batch: int) -> float:
    clock = _Clock(messages)
    start = None
    while not clock.seconds:
        for message in store().read(queue, 1, start=start, limit=batch):
            clock.tick(message, None)
        start = ids.place_after(message.id)
    return clock.seconds


def _worker(queue: StoredQueue, messages: int, batch: int) -> float:
    queues.delete_positions(queue, "worker")
    clock = _Clock(messages)
    worker = Worker("worker", clock.tick, StoreTransport("bench"), batch=batch)
    clock.at_end = worker.stop
    worker.run()
    return clock.seconds


class _Clock:
    """Measures the time from the first to the last of ``messages`` messages, then calls ``at_end``."""

    def __init__(self, messages: int) -> None:
        self.at_end: Callable[[], None] = lambda: None
        self._messages = messages
        self._count = 0
        self._begun = 0.0
        self.seconds = 0.0

    def tick(self, message: Any, context: Any) -> None:
        """Count a message. Both call this as their work."""
        self._count += 1
        if self._count == 1:
            self._begun = time.perf_counter()
        elif self._count == self._messages:
            self.seconds = time.perf_counter() - self._begun
            self.at_end()
