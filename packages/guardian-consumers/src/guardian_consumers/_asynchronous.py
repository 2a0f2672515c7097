"""The consumer and the publisher for asyncio.

A callback is a task of an event loop. Everything else is done by the threads of the blocking classes, and so by the
same rules: AMQP in the connection's thread, a limiter and failed messages in an executor, the time limit and the
shutdown in the thread that waits. So a callback that blocks the loop doesn't delay heartbeats, and the time limit finds
it. With pika's asyncio connection, AMQP would depend on the callbacks.
"""

import asyncio
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from functools import cache
from typing import Any

from guardian_consumers._consumer import FORCED_CLOSE_SECONDS, Consumer, run_until_stopped, stopping_at_signals
from guardian_consumers._delivery import Delivery
from guardian_consumers._errors import SettingsError
from guardian_consumers._handler import Handler, is_coroutine_function, require_result, stack_of
from guardian_consumers._message import Message
from guardian_consumers._publisher import Publication, Publisher
from guardian_consumers._workers import RateLimited, Workers

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
"""How long a callback may take to end after it was cancelled."""

CHECK_SECONDS = 0.1
"""The interval of checks while the shutdown waits for callbacks."""


class AsyncMessage(Message):
    """The message for a coroutine: as `Message`, but ``publish`` is a coroutine."""

    __slots__ = ()

    async def publish(  # type: ignore[override]
        self, body: Any, routing_key: str, *, timeout: float | None = None, **options: Any
    ) -> None:
        """Publish another message and wait for the broker's confirm; see `AsyncPublisher.publish`.

        While the consumer stops, it doesn't wait for a broker that accepts no messages.
        """
        publisher, is_stopping = self._consumer.publisher, self._consumer._connection.stopping.is_set
        await _send(publisher, publisher.prepare(body, routing_key, **options), timeout, is_stopping)


class AsyncPublisher(Publisher):
    """A `Publisher` for coroutines. Use it with ``async with``, or call ``aclose``.

    Concurrent coroutines share its connection, and each waits for its own confirm. It may be used from several event
    loops and threads. ``send`` and ``close`` block, as in `Publisher`.
    """

    async def __aenter__(self) -> "AsyncPublisher":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def publish(  # type: ignore[override]
        self, body: Any, routing_key: str, *, timeout: float | None = None, **options: Any
    ) -> None:
        """Publish a message and wait for the broker's confirm. The options are those of `prepare`.

        ``timeout`` is in seconds, by default the settings' ``publish_timeout``. If the waiting task is cancelled, the
        message may be published or not.
        Raises NotPublished, and Unroutable for a mandatory message that no queue gets.
        """
        await _send(self, self.prepare(body, routing_key, **options), timeout)

    async def aclose(self) -> None:
        """Close the connection. Unconfirmed messages fail; they may be published or not."""
        await asyncio.to_thread(self.close)


class _Tasks(Workers):
    """Up to ``threads`` tasks of an event loop that take deliveries and ``handle`` them, instead of threads."""

    _dispatcher: "Future[None] | None" = None

    def start(self, loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor) -> None:
        """Start the task that starts the others. It waits for a limiter in the executor."""
        self._loop = loop
        self._executor = executor
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._dispatcher = asyncio.run_coroutine_threadsafe(self._dispatch(), loop)

    def wake(self) -> None:
        """Start tasks if deliveries wait. Any thread may call this; it doesn't block."""
        if not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake)

    def end(self) -> None:
        self._ending.set()
        if self._dispatcher is not None:
            self.wake()

    def wait(self, until: float | None, give_up: Callable[[], bool]) -> bool:
        """Wait for the tasks to finish after `end`, as for threads."""
        if self._dispatcher is None:
            return True
        while not wait_for_futures([self._dispatcher], CHECK_SECONDS).done:
            if give_up() or (until is not None and time.monotonic() >= until):
                return False
        return True

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    # The event loop

    def _wake(self) -> None:
        self._waking = False  # before the length is read: a delivery added afterwards wakes again
        self._woken.set()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _dispatch(self) -> None:
        try:
            while not self._ending.is_set():
                self._woken.clear()
                if len(self._tasks) >= self.threads or not len(self._waiting):
                    await self._woken.wait()
                    continue
                if isinstance(self._waiting, RateLimited):
                    delivery = await self._loop.run_in_executor(self._executor, self._waiting.take)
                else:
                    delivery = self._waiting.take()
                if delivery is not None:
                    task = self._loop.create_task(self._handle(delivery))
                    self._tasks.add(task)
                    task.add_done_callback(self._finished)
        except Exception as error:
            logger.exception("%s: the task that starts callbacks failed", self._name)
            self._failed(error)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._woken.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: a task failed", self._name, exc_info=error)
            self._failed(error)


class _TaskHandler(Handler):
    """Handles deliveries in tasks of an event loop. A task owns its message while the callback runs."""

    _interrupted: dict[Hashable, "Future[str]"]

    def start(self, loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor) -> None:
        self._loop = loop
        self._executor = executor
        self._interrupted = {}
        self._thread = 0

    async def handle(self, delivery: Delivery) -> None:  # type: ignore[override]
        """Decode the message, await the callback, settle the message, and call the listeners."""
        task, message = asyncio.current_task(), AsyncMessage(self._consumer, delivery, None)
        self._thread = threading.get_ident()
        begun = self.begin(task, message)
        if begun is None:
            return
        trace = ""
        try:
            self.decode(message)
            require_result(await self._callback(message))  # type: ignore[misc]
        except BaseException as error:
            took = time.monotonic() - begun
            if task in self._interrupted:
                trace = "".join(traceback.format_exception(error))
                self.notify(message, None, took)
            elif isinstance(error, asyncio.CancelledError) and (
                self._connection.stopping.is_set() or task.cancelling()  # type: ignore[union-attr]
            ):
                raise  # the shutdown doesn't wait for it any longer, or the loop ends; the message is redelivered
            else:
                is_claimed = message._claim()
                await self._loop.run_in_executor(self._executor, self.raised, message, error, took, is_claimed)
        else:
            if task in self._interrupted:
                self.notify(message, None, time.monotonic() - begun)
            else:
                self.returned(message, time.monotonic() - begun)
        finally:
            del self.running[task]
            if (interrupted := self._interrupted.pop(task, None)) is not None:
                interrupted.set_result(trace)

    def interrupt(self, key: Hashable) -> tuple[str, bool]:
        """Cancel a callback. Return where it was, and whether it has ended.

        It has not if it ignores the cancellation or blocks the loop. Then return where the loop is.
        """
        ended = self._interrupted[key] = Future()
        if key not in self.running:  # it may have ended before it could find this future
            self._interrupted.pop(key, None)
            return "", True
        self._loop.call_soon_threadsafe(key.cancel)  # type: ignore[attr-defined]
        with suppress(FutureTimeout):
            return ended.result(CANCEL_SECONDS), True
        return stack_of(self._thread), False


class AsyncConsumer(Consumer):
    """Calls a coroutine function with each message of a source, in tasks of an event loop.

    The arguments, ``figures``, ``counts`` and ``listeners`` are those of `Consumer`. As many callbacks run concurrently
    as a consumer has threads: see the settings ``prefetch`` and ``threads``. The callback gets an `AsyncMessage`.

    Start it with ``await consumer.run()``, or several with `run_all_async`. With `run_all` or `start`, callbacks run in
    an event loop of this package, which has its own thread.
    """

    _handler_class = _TaskHandler
    _publisher_class = AsyncPublisher
    _workers_class = _Tasks
    _handler: _TaskHandler
    _workers: _Tasks
    _loop: asyncio.AbstractEventLoop | None = None
    _executor: ThreadPoolExecutor | None = None

    async def run(self, *, signals: bool = True) -> None:  # type: ignore[override]
        """Consume until SIGTERM or SIGINT, let running callbacks finish, and return. A second signal doesn't wait.

        Cancelling this coroutine stops the consumer, too. Only the main thread handles signals. Raises Refused, Halted
        or Hung after the same shutdown.
        """
        await run_all_async([self], signals=signals)

    def start(self) -> None:
        """Connect and consume in background threads. Callbacks run in an event loop in such a thread."""
        loop = self._loop or _background_loop(os.getpid())
        self._executor = ThreadPoolExecutor(self._workers.threads + 1, self.source.key)  # one waits for the limiter
        self._handler.start(loop, self._executor)
        self._workers.start(loop, self._executor)
        super().start()

    def close(self, *, is_forced: Callable[[], bool] = lambda: False) -> bool:
        """As for `Consumer`, and cancel callbacks that didn't finish. They get a moment to clean up."""
        finished = super().close(is_forced=is_forced)
        if not finished:
            begun = time.monotonic()
            self._workers.cancel()
            self._workers.wait(
                begun + CANCEL_SECONDS, lambda: is_forced() and time.monotonic() >= begun + FORCED_CLOSE_SECONDS
            )
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        return finished

    @staticmethod
    def _require_function(callback: Callable[..., object]) -> None:
        if not is_coroutine_function(callback):
            name = getattr(callback, "__qualname__", repr(callback))
            raise SettingsError(f"the callback {name} is not a coroutine function; write one, or use Consumer")


async def run_all_async(consumers: Sequence[Consumer], *, signals: bool = True) -> None:
    """Run several consumers, at least one of them an `AsyncConsumer`; see `AsyncConsumer.run`."""
    loop = asyncio.get_running_loop()
    for consumer in consumers:
        if isinstance(consumer, AsyncConsumer):
            consumer._loop = loop
    executor = ThreadPoolExecutor(1, "consumers")
    with stopping_at_signals(consumers, signals) as received:
        ended = loop.run_in_executor(executor, run_until_stopped, consumers, received)
        executor.shutdown(wait=False)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            for consumer in consumers:
                if isinstance(consumer, AsyncConsumer):
                    consumer._connection.stopping.set()  # at once: callbacks may be cancelled, too
                consumer.stop()
            await ended
            raise


@cache
def _background_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return this process's event loop for consumers that a program without one starts. It runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="callbacks", daemon=True).start()
    return loop


async def _send(
    publisher: Publisher,
    publication: Publication,
    timeout: float | None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Publish a message and wait for the broker's confirm, as `Publisher.send` does."""
    pending = publisher._enqueue(publication)
    confirm = asyncio.wrap_future(pending.done)
    try:
        for seconds in publisher._waits(pending, timeout, is_stopping):
            if (await asyncio.wait([confirm], timeout=seconds))[0]:
                confirm.result()
                return
    finally:
        pending.done.cancel()
