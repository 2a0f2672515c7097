"""Fetch a queue's messages without acknowledging them, to archive them before the queue is deleted or purged.

Everything happens on one channel. If the broker closes it, it requeues all fetched messages, and the queue must not be
deleted any more.
"""

import contextlib
import re
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import amqp
from amqp import spec

from rabbit.amqp import DeclareOk, Session
from rabbit.arguments import CLASSIC, QUORUM
from rabbit.decoding import decode, envelope_of, find_integer_header
from rabbit.errors import BrokerError, NotOnBroker, Refused

FIRST_MESSAGES = 20
"""The prefetch of the first consumer. The sizes of these messages show how many more there is room for."""

BATCH_MESSAGES = 500
BATCH_BYTES = 1024 * 1024

SILENCE_SECONDS = 1.0
"""If no message arrives in this time, the queue's ready count tells whether there are more."""

MAX_SILENCE_SECONDS = 3.0
"""If no message arrives in this time, none will, as when another consumer gets them."""

MAX_PREFETCH = 65_535

ACCESS_REFUSED = 403

DELIVERY_COUNT = "x-delivery-count"
"""The header in which a quorum queue says how often it delivered a message before."""

NACK_IS_NO_DELIVERY = (4, 3)
"""From this version on, a nack is not counted as a delivery of a quorum queue's messages. Closing the channel is."""

LAST = {"x-priority": -1}
"""Other consumers get messages first. At a higher priority, the end of a federated queue would make it fetch messages
from other brokers."""

CANCEL_IF_DELETED = {"x-cancel-on-ha-failover": True}
"""Without this argument, RabbitMQ 3 may move the consumer of a classic queue that is deleted and declared again at once
to the new queue, and not notify it. Other queues, and RabbitMQ 4, refuse the argument."""


class Bounds(NamedTuple):
    """The most that is fetched from one queue. The bytes are of whole messages: bodies, properties and headers."""

    messages: int
    bytes: int
    seconds: float


class Fetched(NamedTuple):
    """A message. ``properties`` are those of AMQP that are set; ``headers`` has the types of py-amqp.

    ``cut`` is how many bytes ``body`` lacks at its end.
    """

    body: bytes
    properties: Mapping[str, Any]
    headers: Mapping[Any, Any]
    exchange: str
    routing_key: str
    redelivered: bool
    cut: int = 0


class Undecoded(NamedTuple):
    """A message whose exchange, routing key, properties and headers are still encoded, in ``envelope``."""

    envelope: bytes
    body: bytes
    redelivered: bool
    cut: int = 0

    @property
    def size(self) -> int:
        return len(self.envelope) + len(self.body)

    def decode(self, max_values: int | None = None) -> Fetched:
        """Return it decoded. Headers with more values than ``max_values`` count as unreadable."""
        exchange, routing_key, properties = decode(self.envelope, max_values)
        headers = properties.pop("application_headers", {})
        return Fetched(self.body, properties, headers, exchange, routing_key, self.redelivered, self.cut)


class Fetch:
    """The messages of one queue, fetched on a channel of their own. Call the methods in their order.

    ``kept`` messages were yielded; ``excess`` ones were fetched past the bounds. Every method may raise a
    ``BrokerError``. Then all fetched messages are requeued, and no other method may be called.
    An ``is_auto_delete`` queue is fetched with basic.get, because the broker would delete it with its last consumer.
    With a ``delivery_limit``, the broker drops a message that was delivered more often. ``has_exhausted``: it would
    drop a fetched one if that was returned. ``last_arrival`` is when the last message arrived, in monotonic time.
    ``consumers`` is their number at the last passive declare.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        *,
        queue_type: str,
        is_auto_delete: bool = False,
        delivery_limit: int | None = None,
    ) -> None:
        self.has_exhausted = False
        self.last_arrival = 0.0
        self.consumers = 0
        self.kept = 0
        self.kept_bytes = 0
        self.excess = 0
        self._session = session
        self.vhost = session.vhost
        self.name = name
        self._is_classic = queue_type == CLASSIC
        self._is_quorum = queue_type == QUORUM
        self._is_auto_delete = is_auto_delete
        self.delivery_limit = delivery_limit
        self._is_cancelled = False
        self._consumer = ""
        self._fetched_bytes = 0
        self._arrived: list[Undecoded] = []
        self._has_exhausted_arrived = False
        self._arrived_bytes = 0
        self._last_tag = 0
        self._bounds = Bounds(0, 0, 0)
        self._first_messages = FIRST_MESSAGES
        self._channel = session.new_channel()
        version = re.match(r"(\d+)\.(\d+)", str(self._channel.connection.server_properties.get("version")))
        self._broker_version = tuple(int(part) for part in version.groups()) if version else ()

    @property
    def _has_consumer(self) -> bool:
        """Whether the queue has a consumer of this channel. A cancelled one counts while it holds messages."""
        return bool(self._consumer or (self.fetched and not self._is_auto_delete))

    @property
    def fetched(self) -> int:
        return self.kept + self.excess

    @property
    def misses_deletion(self) -> bool:
        """Whether messages were fetched, and this channel does not notice if their queue is deleted and declared again.

        An active consumer notices it, and a passive declare of a quorum queue.
        """
        return self.fetched > 0 and not self._consumer and not self._is_quorum

    @property
    def requeue_counts(self) -> bool:
        """Whether ``requeue`` counts as a delivery of the fetched messages."""
        return self.fetched > 0 and self.delivery_limit is not None and self._broker_version < NACK_IS_NO_DELIVERY

    def declare_passively(self) -> DeclareOk | None:
        """Return the ready messages and consumers of the queue, or None if its leader may not have answered."""
        began = time.monotonic()
        answer = self._request(lambda: self._channel.queue_declare(self.name, passive=True, auto_delete=False))
        self.consumers = answer.consumer_count
        if self._is_classic:
            return DeclareOk(answer.message_count, answer.consumer_count)
        if self._is_quorum and self._has_consumer and not answer.consumer_count:
            return None  # the leader's node is down, and there is no new leader yet
        return DeclareOk.after(answer, time.monotonic() - began)

    def batches(self, ready: int, bounds: Bounds, first_messages: int = FIRST_MESSAGES) -> Iterator[list[Undecoded]]:
        """Yield the messages in batches, up to the bounds or to ``ready`` messages.

        ``first_messages`` are fetched whatever their size.
        """
        self._bounds = bounds
        self._first_messages = first_messages
        target = min(ready, bounds.messages)
        deadline = time.monotonic() + bounds.seconds
        is_passed_over = True
        if target and not self._is_auto_delete and self._consume(min(target, first_messages)):
            is_passed_over = self._is_passed_over()
            if is_passed_over:
                self.cancel()
            else:
                yield from self._consume_batches(target, deadline)
        if self._is_classic and (is_passed_over or not self.fetched):
            yield from self._get_batches(target, deadline)
        if self._arrived:
            yield self._batch()

    def delete_queue(self) -> int:
        """Delete the queue with all that was fetched, and return how many other ready messages it had."""
        self.cancel()
        with self._session.time_for_deletion():
            dropped = int(self._request(lambda: self._channel.queue_delete(self.name)))
        self.close()
        return dropped

    def purge_queue(self) -> int:
        """Acknowledge the fetched messages, purge the queue, and return the number of purged messages."""
        self.cancel()
        if self._last_tag:
            self._request(lambda: self._channel.basic_ack(self._last_tag, multiple=True))
        dropped = int(self._request(lambda: self._channel.queue_purge(self.name)))
        self.close()
        return dropped

    def acknowledge(self, positions: Collection[int]) -> None:
        """Acknowledge these messages, by their positions in the order of arrival, the first is 1. Wait for the broker.

        If these are all, close the channel. After an error the broker may have returned them.
        """
        self.cancel()
        if len(positions) == self.fetched:
            self._request(lambda: self._channel.basic_ack(self._last_tag, multiple=True))
            self._request(self._channel.close)
            return
        for tag in positions:  # the channel is new, so these are its delivery tags
            self._request(lambda: self._channel.basic_ack(tag))  # noqa: B023
        self.declare_passively()

    def requeue(self) -> None:
        """Requeue the fetched messages that are not acknowledged.

        Where a nack is no delivery, use nack. Otherwise close the channel, because that keeps their order.
        """
        self.cancel()
        if self._last_tag and self._broker_version >= NACK_IS_NO_DELIVERY:
            # py-amqp has no method for it.
            self._request(lambda: self._channel.send_method(spec.Basic.Nack, "Lbb", (self._last_tag, True, True)))
            self._request(self._channel.close)  # without its answer, the nack may be lost
        else:
            self.close()

    def close(self) -> None:
        """Close the channel, which requeues the fetched messages."""
        with contextlib.suppress(BrokerError):  # then the session has dropped the connection
            self._request(self._channel.close)

    def _consume_batches(self, target: int, deadline: float) -> Iterator[list[Undecoded]]:
        """Yield batches from consumers. The next has a prefetch for what fits by the mean size of the fetched ones."""
        last_arrival = time.monotonic()
        prefetched = min(target, self._first_messages)
        while self._needs_more(target, deadline):
            if self.fetched >= prefetched:
                fits = (self._bounds.bytes - self.kept_bytes) * self.fetched // self._fetched_bytes
                if not fits:
                    break
                self.cancel()
                prefetch = min(target - self.fetched, fits, MAX_PREFETCH)
                self._consume(prefetch)
                prefetched = self.fetched + prefetch
            seconds = min(SILENCE_SECONDS, max(0.01, deadline - time.monotonic()))
            if self._request(lambda: self._session.drain(self._channel, seconds)):  # noqa: B023
                last_arrival = time.monotonic()
            elif self._is_drained(time.monotonic() - last_arrival):
                break
            if self._is_batch_full():
                yield self._batch()
        if self._arrived:
            yield self._batch()  # before the cancel: while the caller stores it, the consumer notices a deletion
        if self.fetched < prefetched or not self._is_classic:
            self.cancel()
        else:
            self.declare_passively()  # the consumer gets no more messages, and still notices a deletion

    def _get_batches(self, target: int, deadline: float) -> Iterator[list[Undecoded]]:
        """Yield batches fetched with basic.get, which works beside an exclusive or a single active consumer."""
        while self._needs_more(target, deadline):
            message = self._request(lambda: self._channel.basic_get(self.name))
            if message is None:
                break
            self._on_message(message)
            if self._is_batch_full():
                yield self._batch()

    def _is_passed_over(self) -> bool:
        """Return whether a classic queue gives its messages to a single active consumer.

        To any other consumer it sends the first messages before it answers the next request.
        """
        if not self._is_classic:
            return False
        depth = self.declare_passively()
        return depth is not None and depth.ready > 0 and depth.consumers > 1 and not self.fetched

    def _needs_more(self, target: int, deadline: float) -> bool:
        return self.fetched < target and self.kept_bytes < self._bounds.bytes and time.monotonic() < deadline

    def _is_drained(self, silence: float) -> bool:
        """Return whether no more messages will arrive, after this many seconds without one."""
        depth = self.declare_passively()
        if depth is None:
            return False  # the next leader sends the others
        if silence >= MAX_SILENCE_SECONDS:
            return True
        # The ready count of a quorum queue on RabbitMQ 3.10 may be 0 long before its messages arrive.
        return not depth.ready and (self._is_classic or self.fetched > 0)

    def _consume(self, prefetch: int) -> bool:
        """Start a consumer. Return False if another consumer of a classic queue is exclusive."""
        self._request(lambda: self._channel.basic_qos(0, prefetch, a_global=False))
        try:
            is_3 = self._is_classic and self._broker_version[:1] == (3,)
            arguments = LAST | CANCEL_IF_DELETED if is_3 else LAST
            self._consumer = self._request(
                lambda: self._channel.basic_consume(
                    self.name, callback=self._on_message, arguments=arguments, on_cancel=self._on_cancel
                )
            )
        except Refused as error:
            if error.status != ACCESS_REFUSED or self.fetched or not self._is_classic:
                raise
            return False  # py-amqp has reopened the channel, which had no messages
        return True

    def cancel(self) -> None:
        """Cancel the consumer. The fetched messages stay unacknowledged."""
        if not self._consumer:
            return
        self._request(lambda: self._channel.basic_cancel(self._consumer))
        self._consumer = ""

    def _on_cancel(self, _: str) -> None:
        self._is_cancelled = True

    def _on_message(self, message: amqp.Message) -> None:
        info = message.delivery_info
        self._last_tag = info["delivery_tag"]
        body = bytes(message.body or b"")  # type: ignore[arg-type]  # py-amqp's body of no bytes is a str
        arrived = Undecoded(envelope_of(message), body, bool(info["redelivered"]))
        is_exhausted = self.is_exhausted(arrived)
        self._has_exhausted_arrived |= is_exhausted
        self.has_exhausted |= is_exhausted
        self.last_arrival = time.monotonic()
        self._fetched_bytes += arrived.size
        is_excess = self.kept >= self._bounds.messages or self.kept_bytes + arrived.size > self._bounds.bytes
        if is_excess and not is_exhausted:
            self.excess += 1
            return
        self._arrived.append(arrived)
        self.kept += 1
        self.kept_bytes += arrived.size
        self._arrived_bytes += arrived.size

    def is_exhausted(self, message: Undecoded) -> bool:
        """Return whether the broker drops a message when it is returned."""
        if self.delivery_limit is None:
            return False
        # Publishers may set the header, but not the redelivered flag.
        deliveries = find_integer_header(message.envelope, DELIVERY_COUNT) if message.redelivered else 0
        return deliveries >= self.delivery_limit

    def _batch(self) -> list[Undecoded]:
        batch, self._arrived, self._arrived_bytes = self._arrived, [], 0
        self._has_exhausted_arrived = False
        return batch

    def _is_batch_full(self) -> bool:
        """Return whether the messages that arrived are due to be stored, at once if one may have no other copy."""
        is_large = len(self._arrived) >= BATCH_MESSAGES or self._arrived_bytes >= BATCH_BYTES
        return is_large or self._has_exhausted_arrived

    def _request(self, request: Any) -> Any:
        try:
            answer = self._session.request(request)
            if self._is_cancelled:  # another queue may have this name now
                raise NotOnBroker(f"vhost '{self.vhost}': the queue '{self.name}' no longer exists")
        except BrokerError:
            if self.fetched:
                # py-amqp reopens a channel after an error. A deletion on it would delete the requeued messages.
                self._session.close()
            raise
        return answer
