"""A thread-safe publisher with confirms and its own connection.

A broker that runs short of memory or disk stops reading from connections that publish. On a shared connection this
would also block acks, and the queues could not get shorter. So consuming and publishing never share a connection.
(yapw publishes on its consuming channel, without confirms.)
"""

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import pika
import yapw.util

from guardian_consumers._decoding import JSON
from guardian_consumers._errors import ConsumerError, NotPublished, Unroutable
from guardian_consumers._link import CLOSE_SECONDS, Link, Steps, open_channel
from guardian_consumers._priority import MAX_PRIORITY, PRIORITY_HEADER
from guardian_consumers._settings import Settings

logger = logging.getLogger(__name__)

PATIENCE_CHECK_SECONDS = 0.5
"""The interval of checks while a thread waits for a confirm."""

BLOCKED_CLOSE_SECONDS = 0.5
"""Timeout for closing a connection while the broker accepts no messages: it reads nothing from this connection."""


class Publication(NamedTuple):
    """A message to send. ``routing_key`` is complete; ``properties`` are pika's, with a message id."""

    routing_key: str
    body: bytes
    properties: Any
    mandatory: bool


class _PendingMessage:
    __slots__ = ("done", "exchange", "publication", "returned", "sent")

    def __init__(self, exchange: str, publication: Publication) -> None:
        self.exchange = exchange
        self.publication = publication
        self.sent = False
        self.returned = False
        self.done: Future[None] = Future()

    def matches_return(self, method: Any, properties: Any, body: bytes) -> bool:
        routing_key, own_body, own, mandatory = self.publication
        returned = method.exchange, method.routing_key, properties.message_id, body
        return mandatory and returned == (self.exchange, routing_key, own.message_id, own_body)


class Publisher:
    """Publishes to the settings' exchange, and declares it. It connects at the first use.

    It is thread-safe: all threads share a channel, and each waits for its own confirms. A forked child has a connection
    of its own. Call ``close``, or use it as a context manager.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = settings.names
        self._closed = False
        self._begin()
        _publishers.add(self)

    def _begin(self) -> None:
        """Begin without a connection. A forked child has neither the link's thread nor the owners of locks."""
        self._link: Link | None = None
        self._start_lock = threading.Lock()
        self._failure: ConsumerError | None = None
        self.blocked = False
        """Whether the broker accepts no messages, since it runs short of memory or disk."""
        self._unsent: deque[_PendingMessage] = deque()
        """Publishers add to it under ``_start_lock``; the link's thread removes from it."""
        # Only the link's thread uses the rest.
        self._channel: Any = None
        self._can_send = False
        self._last_tag = 0
        self._unconfirmed: dict[int, _PendingMessage] = {}

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self, body: Any, routing_key: str, *, timeout: float | None = None, **options: Any) -> None:
        """Publish a message and wait for the broker's confirm. The options are those of `prepare`.

        ``timeout`` is in seconds, by default the settings' ``publish_timeout``.
        Raises NotPublished, and Unroutable for a mandatory message that no queue gets.
        """
        self.send(*self.prepare(body, routing_key, **options), timeout=timeout)

    def prepare(
        self,
        body: Any,
        routing_key: str,
        *,
        content_type: str = JSON,
        priority: int | None = None,
        headers: Mapping[str, Any] | None = None,
        message_id: str | None = None,
        mandatory: bool = False,
        **properties: Any,
    ) -> Publication:
        """Return a message for `send`.

        ``routing_key`` is without the exchange's prefix. ``body`` is encoded as JSON; for another ``content_type`` it
        must be bytes or text. Only consumers declare queues: without one the message is dropped, unless ``mandatory``.
        ``priority`` is from 0, the default, to 9. ``properties`` are other AMQP properties.
        """
        if priority is not None:
            if not 0 <= priority <= MAX_PRIORITY:
                raise ValueError(f"a priority must be from 0 to {MAX_PRIORITY}, not {priority}")
            headers = {**(headers or {}), PRIORITY_HEADER: str(priority)}  # exchanges can't route by the property
        if content_type == JSON:
            encoded = yapw.util.json_dumps(body)
        elif isinstance(body, str):
            encoded = body.encode()
        elif isinstance(body, bytes):
            encoded = body
        else:
            raise TypeError(f"a body of {content_type} must be bytes or text, not {type(body).__name__}")
        all_properties = pika.BasicProperties(
            content_type=content_type,
            delivery_mode=2,
            priority=priority,
            headers=dict(headers) if headers else None,
            message_id=message_id or uuid.uuid4().hex,
            timestamp=int(time.time()),
            **properties,
        )
        return Publication(self._names.routing_key(routing_key), encoded, all_properties, mandatory)

    def send(
        self,
        routing_key: str,
        body: bytes,
        properties: Any,
        mandatory: bool,
        *,
        timeout: float | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Publish a message with a complete routing key, and wait for the broker's confirm.

        ``properties`` need a message id. Once ``is_stopping()`` is true, don't wait for a broker that accepts no
        messages.
        Raises NotPublished, and Unroutable for a mandatory message that no queue gets.
        """
        pending = self._enqueue(Publication(routing_key, body, properties, mandatory))
        for seconds in self._waits(pending, timeout, is_stopping):
            with suppress(FutureTimeout):
                pending.done.result(seconds)
                return

    def _waits(
        self, pending: _PendingMessage, timeout: float | None, is_stopping: Callable[[], bool]
    ) -> Iterator[float]:
        """Yield how long to wait for a confirm, again after each wait. Raises NotPublished when it is time to stop."""
        begun = time.monotonic()
        until = begun + (self._settings.publish_timeout if timeout is None else timeout)
        is_late = is_hopeless = False
        while not ((is_late or is_hopeless) and pending.done.cancel()):
            is_hopeless = self.blocked and is_stopping()  # read before the wait: a confirm may be on its way
            left = until - time.monotonic()
            yield min(left, PATIENCE_CHECK_SECONDS) if left > 0 else PATIENCE_CHECK_SECONDS
            is_late = time.monotonic() >= until
        if self.blocked:
            why = "it accepts no messages, since it runs short of memory or disk"
        else:
            why = "no answer" if self._can_send else "not connected"
        text = f"the broker has not confirmed the message in {time.monotonic() - begun:.2g} s: {why}"
        raise NotPublished(text, unknown=pending.sent)

    def publish_async(self, routing_key: str, body: bytes, properties: Any, *, mandatory: bool) -> Future[None]:
        """Publish a message as `send` does, without waiting. The future finishes with the broker's confirm.

        Messages of one thread are published in order. This and the future raise NotPublished.
        """
        return self._enqueue(Publication(routing_key, body, properties, mandatory)).done

    def _enqueue(self, publication: Publication) -> _PendingMessage:
        pending = _PendingMessage(self._names.exchange, publication)
        with self._start_lock:  # so that nothing is added after `_fail_unsent`
            link = self._started_link()
            self._unsent.append(pending)
        link.call(self._send_unsent)
        pending.done.add_done_callback(partial(self._finished, link))
        return pending

    def _finished(self, link: Link, done: Future[None]) -> None:
        if done.cancelled():
            # Otherwise cancelled messages would pile up until the broker accepts messages again.
            link.call(self._discard_cancelled)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Close the connection within ``timeout`` seconds. Unconfirmed messages fail; they may be published or not."""
        with self._start_lock:
            self._closed = True
            link = self._link
        if link is not None:
            link.close(min(timeout, BLOCKED_CLOSE_SECONDS) if self.blocked else timeout)
            self._fail_unsent(NotPublished("the publisher was closed"))

    def _started_link(self) -> Link:
        if self._closed:
            raise NotPublished("the publisher is closed")
        if self._failure is not None:
            raise NotPublished(str(self._failure)) from self._failure
        if self._link is None:
            name = f"publisher of {self._names.exchange}"
            self._link = Link(self._settings.addresses, name, self._set_up, self._lost, self._refused)
            self._link.start()
        return self._link

    # The methods below run in the link's thread.

    def _set_up(self, link: Link, connection: Any) -> Steps:
        connection.add_on_connection_blocked_callback(partial(self._set_blocked, True))
        connection.add_on_connection_unblocked_callback(partial(self._set_blocked, False))
        channel = yield open_channel(connection)
        link.watch(channel)
        channel.add_on_return_callback(self._on_return)
        link.current_step = f"the exchange {self._names.exchange}"
        yield declare_exchange(channel, self._names.exchange)
        self._last_tag = 0
        yield partial(channel.confirm_delivery, self._on_confirmation)
        self._channel = channel
        self._can_send = True
        self._send_unsent()

    def _set_blocked(self, blocked: bool, *_: Any) -> None:
        self.blocked = blocked
        state = "runs short of memory or disk and accepts no messages" if blocked else "accepts messages again"
        logger.warning("The broker %s.", state)
        if not blocked:
            self._send_unsent()

    def _discard_cancelled(self) -> None:
        for pending in list(self._unsent):
            if pending.done.cancelled():
                with suppress(ValueError):  # the publisher is being closed
                    self._unsent.remove(pending)

    def _send_unsent(self) -> None:
        while self._unsent and self._can_send and not self.blocked:
            pending = self._unsent.popleft()
            # Set before checking for a cancellation: `send` cancels first and reads this afterwards.
            pending.sent = True
            if pending.done.cancelled():
                continue
            self._last_tag += 1
            self._unconfirmed[self._last_tag] = pending
            try:
                self._channel.basic_publish(pending.exchange, *pending.publication)
            except Exception as error:
                # A property can't be encoded. Nothing was sent.
                self._last_tag -= 1
                del self._unconfirmed[self._last_tag + 1]
                _fail(pending, NotPublished(f"the message can't be encoded: {error!r}"))

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        """Mark an unroutable message. The broker returns it before its confirm, without the delivery tag."""
        for pending in self._unconfirmed.values():
            if not pending.returned and pending.matches_return(method, properties, body):
                pending.returned = True
                return

    def _on_confirmation(self, frame: Any) -> None:
        tag, rejected = frame.method.delivery_tag, isinstance(frame.method, pika.spec.Basic.Nack)
        tags = [sent for sent in self._unconfirmed if sent <= tag] if frame.method.multiple else [tag]
        for one in tags:
            pending = self._unconfirmed.pop(one, None)
            if pending is None:
                continue  # the connection is being closed, and the message has failed
            if rejected:
                _fail(pending, NotPublished("the broker rejected the message; a queue may be full"))
            elif pending.returned:
                routing_key = pending.publication.routing_key
                _fail(pending, Unroutable(f"no queue is bound to {pending.exchange} by {routing_key}"))
            else:
                _finish(pending)

    def _lost(self, reason: str) -> None:
        self._can_send = self.blocked = False
        self._channel = None
        unconfirmed = list(self._unconfirmed.values())
        self._unconfirmed.clear()
        for pending in unconfirmed:
            _fail(pending, NotPublished(f"the connection was lost before the broker confirmed: {reason}", unknown=True))

    def _refused(self, error: ConsumerError) -> None:
        with self._start_lock:
            self._failure = error
        logger.error("%s", error)
        self._fail_unsent(NotPublished(str(error)))

    def _fail_unsent(self, error: NotPublished) -> None:
        with suppress(IndexError):
            while True:
                _fail(self._unsent.popleft(), error)


_publishers: WeakSet[Publisher] = WeakSet()


def _begin_in_child() -> None:
    for publisher in list(_publishers):
        publisher._begin()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_in_child)


def declare_exchange(channel: Any, exchange: str) -> Callable[..., Any]:
    """Return the step that declares a direct durable exchange, as yapw does."""
    return partial(channel.exchange_declare, exchange, exchange_type="direct", durable=True)


def _finish(pending: _PendingMessage) -> None:
    if pending.done.set_running_or_notify_cancel():  # otherwise it was cancelled
        pending.done.set_result(None)


def _fail(pending: _PendingMessage, error: NotPublished) -> None:
    if pending.done.set_running_or_notify_cancel():
        pending.done.set_exception(error)
