"""Publishing of one message to many queues over AMQP, with publisher confirms and a timeout."""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import amqp

from rabbit.addresses import split_addresses, without_credentials
from rabbit.amqp import NODE_DOWN, Session
from rabbit.confirmed import ConfirmChannel, Outcome
from rabbit.errors import BrokerError, BrokerUnavailable, ConnectionLimit, NotOnBroker, Refused
from rabbit.names import QueueName
from rabbit.threads import ContextThreadPool
from rabbit.urls import split_url

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""The timeout of a call, including the wait for a connection."""

BLOCKED_SECONDS = 3.0
"""The timeout of a connection that the broker blocks, as it does under a resource alarm."""

MAX_CONNECTIONS = 32
"""In one process, to all vhosts together."""

IDLE_SECONDS = 30.0
"""An unused connection is closed after this time."""

CLOSE_SECONDS = 1.0
"""The timeout of the broker's answer to ``connection.close``."""

MIN_CONNECT_SECONDS = 0.2
"""The timeout for opening a connection is never shorter, even if the call's time is up."""

TURNS_PER_CALL = 5
"""If a vhost confirms nothing for this fraction of a call's time, it gives its connection to a waiting vhost."""

OUT_OF_TIME = "there was no time left for them"
LOST = "the connection to the broker was lost"
TIMED_OUT = "the broker did not confirm it in time"
BLOCKED = "the broker takes no messages at the moment, because it is short of memory or disk space"

MAX_CHECKED = 50
"""Of the queues that did not take the message, this many are checked for whether their node is down."""

CHECK_SECONDS = 0.5
"""The timeout of such a check."""

NOT_ALLOWED = 530
"""AMQP's code of a refused vhost. A refused login has another."""

MAX_UNCONFIRMED_BYTES = 4 * 1024 * 1024
"""The limit of messages sent to one vhost before their confirms arrive."""


class Result(Enum):
    DELIVERED = "delivered"
    REJECTED = "rejected"
    """The queue is full. With ``reject-publish-dlx`` the message is in the dead-letter queue."""
    UNREACHABLE = "unreachable"
    """The queue's node is down, or its vhost accepts no further connection."""
    GONE = "gone"
    """The queue or the vhost does not exist, or Guardian may not publish there."""


RESULTS = {
    Outcome.CONFIRMED: Result.DELIVERED,
    Outcome.REJECTED: Result.REJECTED,
    Outcome.RETURNED: Result.GONE,
}


@dataclass(frozen=True)
class Message:
    """A persistent message with a body in JSON. Its id lets a reader drop duplicates."""

    message_id: str
    body: bytes
    type: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)


class OutcomeUnknown(BrokerUnavailable):
    """Some queues did not confirm the message in time. They may have it, or receive it later.

    ``message_id`` is the id to publish the message with again. ``results`` are the known outcomes, by queue. The text
    contains no address, so it may be shown to everybody.
    """

    def __init__(self, why: str, *, message_id: str, results: Mapping[QueueName, Result], queues: int) -> None:
        super().__init__(
            f"The outcome is unknown for {queues - len(results)} of {queues} queues: {why}. "
            f"Publish the message again with the message id {message_id}, so that readers can drop duplicates."
        )
        self.message_id = message_id
        self.results = dict(results)


class NotPublished(BrokerUnavailable):
    def __init__(self, text: str) -> None:
        super().__init__(text, never_reached=True)


class Publisher:
    """Publishes over a pool of connections, for many threads of one process.

    ``amqp_url`` is ``amqp://user:password@host:port`` or ``amqps://…``, user and password percent-encoded, no vhost; or
    several, separated by commas, of nodes of one cluster. The first that accepts a connection is used.

    A connection that had an error is not used again. Past ``MAX_CONNECTIONS``, a new connection replaces the least
    recently used one.

    A call publishes to up to ``MAX_CONNECTIONS`` vhosts at the same time. Connecting to a vhost costs about ten round
    trips, including the closing of another connection. With 32 connections and two cores, a call reached 500 vhosts in
    2 s on the broker's machine, in 3 s at 10 ms a round trip, and in 4 s at 20 ms. At 100 ms it reached 180 in 5 s. The
    outcome of the remaining vhosts is unknown. Each call has a random order, so that later calls reach them.
    """

    def __init__(self, amqp_url: str) -> None:
        addresses = split_addresses(amqp_url) or [amqp_url]
        for address in addresses:
            _check_url(address)
        self._amqp_url = amqp_url
        self._where = ", ".join(map(without_credentials, addresses))
        self._changed = threading.Condition()
        self._unused: list[_Connection] = []  # the least recently used first
        self._open = 0  # including those in use, and those that are being opened or closed
        self._waiting = 0  # threads that wait for a connection
        self._timer: threading.Timer | None = None

    def __repr__(self) -> str:
        return f"<Publisher {self._where}>"

    @property
    def connections(self) -> int:
        with self._changed:
            return self._open

    def publish(self, queues: Iterable[QueueName], message: Message) -> dict[QueueName, Result]:
        """Publish a message to each of these queues, and return the outcomes.

        Raises OutcomeUnknown if some queues may have the message, and NotPublished if none has it because the broker
        can't be reached or all connections are busy.
        """
        names: dict[str, list[str]] = {}
        for vhost, name in dict.fromkeys(queues):
            names.setdefault(vhost, []).append(name)
        call = _Call(message, time.monotonic() + CALL_SECONDS, len(names))
        number = sum(map(len, names.values()))
        if len(names) == 1:
            self._publish_in(*names.popitem(), call)
        elif names:
            with ContextThreadPool(min(MAX_CONNECTIONS, len(names))) as threads:
                list(threads.map(lambda vhost: self._publish_in(vhost, names[vhost], call), self._in_order(names)))
        call.raise_failure(number)
        return call.results

    def _in_order(self, vhosts: Iterable[str]) -> list[str]:
        """Return the vhosts with a connection first, then the others in random order."""
        with self._changed:
            connected = {connection.vhost for connection in self._unused}
        order = list(vhosts)
        random.shuffle(order)
        return sorted(order, key=lambda vhost: vhost not in connected)

    def close(self) -> None:
        self._close_unused(since=float("inf"))

    def _publish_in(self, vhost: str, names: Sequence[str], call: "_Call") -> None:
        if not call.begin():
            return
        try:
            connection = self._acquire(vhost, call.until)
        except _VhostRefused as refusal:
            call.set_gone(vhost, names, refusal)
            return
        except BrokerError as error:
            call.fail(error, everywhere=True)
            return
        is_healthy = False
        try:
            connection.publish(names, call, lambda: self._should_yield(call))
            is_healthy = True
            self._find_unreachable(vhost, names, call)
        except _VhostRefused as refusal:
            call.set_gone(vhost, names, refusal)
        except _Unconfirmed as unconfirmed:
            call.fail(unconfirmed, everywhere=unconfirmed.everywhere)
        finally:
            self._release(connection, is_healthy)

    def _find_unreachable(self, vhost: str, names: Sequence[str], call: "_Call") -> None:
        """Find the queues whose node is down, among those that did not take the message.

        The broker returns or rejects their messages like those of missing and full queues. It also rejects a message
        while it doesn't know the leader of a quorum queue: such a queue is empty, or its leader doesn't answer.
        """
        failed = [name for name in names if call.results[vhost, name] in (Result.REJECTED, Result.GONE)]
        if not failed:
            return
        with Session(self._amqp_url, vhost, CHECK_SECONDS) as session:
            for name in failed[:MAX_CHECKED]:
                if time.monotonic() > call.until - CHECK_SECONDS:
                    return
                try:
                    depth = session.declare_passively(name)
                    if call.results[vhost, name] is Result.REJECTED and (depth is None or not depth.ready):
                        call.results[vhost, name] = Result.UNREACHABLE
                except NotOnBroker as error:
                    if NODE_DOWN in str(error):
                        call.results[vhost, name] = Result.UNREACHABLE
                except BrokerUnavailable as error:
                    if not error.timed_out:
                        return
                    call.results[vhost, name] = Result.UNREACHABLE  # RabbitMQ 4.3 gives no answer
                except BrokerError:
                    return

    def _should_yield(self, call: "_Call") -> bool:
        """Return whether a vhost of this call, or another call, waits for a connection."""
        with self._changed:
            return self._waiting > 0 or call.has_more()

    def _acquire(self, vhost: str, until: float) -> "_Connection":
        """Return a connection to this vhost for this thread alone: from the pool, or a new one.

        Raises _VhostRefused, or NotPublished if the broker can't be reached in time or all connections stay busy.
        """
        pooled, evicted = self._reserve(vhost, until)
        try:
            if evicted is not None:
                evicted.close(until)
            if pooled is not None:
                if pooled.is_alive():
                    return pooled
                pooled.drop()
            return self._connect(vhost, until)
        except BaseException:
            self._decrement_open()
            raise

    def _connect(self, vhost: str, until: float) -> "_Connection":
        session = Session(self._amqp_url, vhost, max(until - time.monotonic(), MIN_CONNECT_SECONDS))
        try:
            return _Connection(session)
        except BrokerError as error:
            session.close()
            is_refused = isinstance(error, Refused) and error.status == NOT_ALLOWED
            if is_refused or isinstance(error, NotOnBroker) or f"vhost '{vhost}' is down" in str(error):
                raise _VhostRefused(str(error)) from error
            if isinstance(error, Refused):
                text = f"AMQP to {self._where}: {error}; check the user and the password in RABBIT_URL"
                raise Refused(text, status=error.status, reason=error.reason) from error
            text = f"AMQP to {self._where}: {error}; check that RabbitMQ runs there, and that the port is AMQP's"
            raise NotPublished(text) from error

    def _reserve(self, vhost: str, until: float) -> "tuple[_Connection | None, _Connection | None]":
        """Reserve one of the pool's connections. Return a pooled one to this vhost, or one to close first.

        Threads are served in order. Otherwise a call to many vhosts could delay a call to one vhost.
        """
        with self._changed:
            try:
                while self._waiting or not self._has_free():
                    self._waiting += 1
                    try:
                        in_time = self._changed.wait(until - time.monotonic())
                    finally:
                        self._waiting -= 1
                    if self._has_free():
                        break
                    if not in_time:
                        raise NotPublished(
                            f"AMQP to {self._where}: all {MAX_CONNECTIONS} connections of this process "
                            "are busy; retry later"
                        )
                for number in reversed(range(len(self._unused))):
                    if self._unused[number].vhost == vhost:
                        return self._unused.pop(number), None
                if self._open < MAX_CONNECTIONS:
                    self._open += 1
                    return None, None
                return None, self._unused.pop(0)
            finally:
                if self._has_free():
                    self._changed.notify()  # the thread notified before may have timed out

    def _has_free(self) -> bool:
        return self._open < MAX_CONNECTIONS or bool(self._unused)

    def _release(self, connection: "_Connection", is_healthy: bool) -> None:
        if not is_healthy:
            try:
                connection.drop()
            finally:
                self._decrement_open()
            return
        with self._changed:
            connection.unused_since = time.monotonic()
            self._unused.append(connection)
            self._changed.notify()
            self._start_timer()

    def _decrement_open(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()

    def _start_timer(self) -> None:
        """Schedule the closing of idle connections, because there may be no further call."""
        if self._timer is None and self._unused:
            wait = self._unused[0].unused_since + IDLE_SECONDS - time.monotonic()
            self._timer = threading.Timer(max(wait, 0), self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    def _close_idle(self) -> None:
        try:
            self._close_unused(since=time.monotonic() - IDLE_SECONDS)
        finally:
            with self._changed:
                self._timer = None
                self._start_timer()

    def _close_unused(self, since: float) -> None:
        with self._changed:
            closing = [connection for connection in self._unused if connection.unused_since <= since]
            self._unused = [connection for connection in self._unused if connection.unused_since > since]
        for connection in closing:
            try:
                connection.close()
            finally:
                self._decrement_open()


class _VhostRefused(Exception):
    """There is no such vhost, or Guardian may not publish in it. The text is the broker's."""


class _Unconfirmed(Exception):
    """A message was sent, but not confirmed. The text is the reason; it contains no address.

    ``everywhere``: the messages to other vhosts would not be confirmed, either.
    """

    def __init__(self, why: str, *, everywhere: bool = False) -> None:
        super().__init__(why)
        self.everywhere = everywhere


class _Call:
    """The state of one call, shared by its threads. ``until`` is its deadline on the monotonic clock."""

    def __init__(self, message: Message, until: float, vhosts: int) -> None:
        self.message = message
        self.until = until
        self.turn_seconds = (until - time.monotonic()) / TURNS_PER_CALL
        self.results: dict[QueueName, Result] = {}
        self._failures: list[BrokerError | _Unconfirmed] = []
        self._is_over = False
        self._lock = threading.Lock()
        self._remaining_vhosts = vhosts

    def begin(self) -> bool:
        """Begin with a vhost. Return False if the call is over: the broker is unavailable, or time is up."""
        with self._lock:
            self._remaining_vhosts -= 1
        return not self._is_over and time.monotonic() < self.until

    def has_more(self) -> bool:
        return self._remaining_vhosts > 0 and not self._is_over

    def fail(self, failure: BrokerError | _Unconfirmed, *, everywhere: bool) -> None:
        """Record a failure in a vhost. ``everywhere``: the remaining vhosts would fail too, so end the call."""
        self._failures.append(failure)
        self._is_over = self._is_over or everywhere

    def set_gone(self, vhost: str, names: Sequence[str], why: _VhostRefused) -> None:
        """Record that the queues of a vhost are gone, or unreachable for now, except those with an outcome."""
        logger.warning("Guardian can't publish in the vhost %s: %s", vhost, why)
        result = Result.UNREACHABLE if isinstance(why.__cause__, ConnectionLimit) else Result.GONE
        for name in names:
            self.results.setdefault((vhost, name), result)

    def raise_failure(self, queues: int) -> None:
        """Raise the errors of ``Publisher.publish``, unless all ``queues`` have an outcome."""
        if len(self.results) == queues:
            return
        errors = [failure for failure in self._failures if isinstance(failure, BrokerError)]
        nothing_sent = len(errors) == len(self._failures) and set(self.results.values()) <= {Result.GONE}
        if nothing_sent:
            raise errors[0] if errors else NotPublished(f"AMQP: {OUT_OF_TIME}")
        unconfirmed = [str(failure) for failure in self._failures if isinstance(failure, _Unconfirmed)]
        reason = next(iter(unconfirmed), "the broker can't be reached" if errors else OUT_OF_TIME)
        raise OutcomeUnknown(reason, message_id=self.message.message_id, results=self.results, queues=queues)


class _Connection:
    """A session with a channel in confirm mode. One thread uses it at a time."""

    def __init__(self, session: Session) -> None:
        self.vhost = session.vhost
        self.unused_since = 0.0
        self._session = session
        self._channel = ConfirmChannel(session, key_of=lambda routing_key, _: routing_key)

    def is_alive(self) -> bool:
        """Process the frames received since the last use, and return whether the connection is open."""
        try:
            self._channel.poll()
        except BrokerError:
            return False
        return True

    def publish(self, names: Sequence[str], call: _Call, should_yield: Callable[[], bool]) -> None:
        """Publish to each of these queues, and record the outcomes. Raises _VhostRefused and _Unconfirmed."""
        sent = call.message
        message = amqp.Message(
            sent.body,
            content_type="application/json",
            delivery_mode=2,  # persistent
            message_id=sent.message_id,
            type=sent.type,
            application_headers=dict(sent.headers),
        )
        batch = max(1, MAX_UNCONFIRMED_BYTES // (len(sent.body) + 512))
        self._channel.outcomes.clear()
        try:
            for start in range(0, len(names), batch):
                for name in names[start : start + batch]:
                    self._channel.publish(name, message, exchange="", routing_key=name)
                self._wait_for_confirms(call, should_yield)
        except (Refused, NotOnBroker) as error:
            raise _VhostRefused(str(error)) from error
        except BrokerError as error:
            logger.warning("A message in the vhost %s was not confirmed: %s", self.vhost, error)
            raise _Unconfirmed(LOST) from error
        finally:
            for name, outcome in self._channel.outcomes.items():
                call.results[self.vhost, name] = RESULTS[outcome]

    def _wait_for_confirms(self, call: _Call, should_yield: Callable[[], bool]) -> None:
        """Wait until all messages are confirmed. Give up when time is up, or after a turn without any confirm."""
        while True:
            known = len(self._channel.outcomes)
            blocked_until = self._channel.blocked_since + BLOCKED_SECONDS
            if self._channel.wait(min(call.until, time.monotonic() + call.turn_seconds, blocked_until)):
                return
            now, is_blocked = time.monotonic(), self._channel.blocked_since < math.inf
            if now >= self._channel.blocked_since + BLOCKED_SECONDS:
                raise _Unconfirmed(BLOCKED, everywhere=True)
            # A blocked connection does not yield: the broker blocks all of them, and BLOCKED_SECONDS ends the wait.
            is_stuck = len(self._channel.outcomes) == known and not is_blocked and should_yield()
            if now >= call.until or is_stuck:
                raise _Unconfirmed(TIMED_OUT)

    def close(self, until: float = math.inf) -> None:
        left = until - time.monotonic()
        if left > 0:
            self._session.disconnect(min(left, CLOSE_SECONDS))
        self.drop()

    def drop(self) -> None:
        """Close the TCP connection without a handshake: a broker that blocks a connection doesn't read from it."""
        self._session.close()


def _check_url(amqp_url: str) -> None:
    url = split_url(amqp_url, ("amqp", "amqps"), _URL_FORM)
    if not url.hostname or url.port == 0:
        raise ValueError("it has no host, or port 0; " + _URL_FORM)


_URL_FORM = "write amqp://user:password@host:5672, with the user and the password percent-encoded"
