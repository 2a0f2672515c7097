"""Publishing to queues over AMQP, with the broker's confirmation of each message: one message to many queues.

By pika's ``SelectConnection``, which is run for as long as a call may take. ``BlockingConnection`` sends each message
when the one before is confirmed, and waits for that without an end where a queue's process hangs.
"""

import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import unquote

import pika
from pika.adapters.select_connection import IOLoop
from pika.exceptions import (
    ChannelClosedByBroker,
    ConnectionBlockedTimeout,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from rabbit.management import BrokerError, BrokerUnavailable, Refused
from rabbit.names import QueueName
from rabbit.threads import ContextThreadPool
from rabbit.urls import split_url

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""How long one call may take in all, the waiting for a connection included."""

BLOCKED_SECONDS = 3.0
"""How long the broker may keep a connection blocked, as it does under a resource alarm."""

MAX_CONNECTIONS = 32
"""Of one process, to all vhosts together."""

IDLE_SECONDS = 30.0
"""How long an unused connection is kept."""

HEARTBEAT_SECONDS = 90
"""Nobody sends heartbeats over a connection that isn't used, so this is well above ``IDLE_SECONDS``."""

CLOSING_SECONDS = 1.0
"""How long the broker may take to say goodbye."""

SHORTEST_SECONDS = 0.2
"""What is left to open a connection even where the call's time is up."""

TURNS = 5
"""The part of a call's time after which a vhost that confirms nothing makes way, where others wait for its place."""

NO_TIME = "there was no time left for them"

UNCONFIRMED_BYTES = 4 * 1024 * 1024
"""How much is sent to one vhost before its confirmations are waited for."""


class Result(Enum):
    """What became of the message for one queue."""

    DELIVERED = "delivered"
    """The queue has it."""
    REJECTED = "rejected"
    """The queue is full. With ``reject-publish-dlx`` the broker puts the message into the dead-letter queue."""
    GONE = "gone"
    """There is no such queue, no such vhost, or the broker doesn't let Guardian publish there."""


@dataclass(frozen=True)
class Message:
    """What is published: JSON, kept on disk by the broker. Its id lets a reader drop what it has had already."""

    message_id: str
    body: bytes
    type: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)


class OutcomeUnknown(BrokerUnavailable):
    """Some queues may have the message, or get it yet: they did not confirm it in time.

    ``message_id`` is the one to publish it with again; ``results`` is what is known, by queue. The text has no address
    in it, and may be shown to anybody.
    """

    def __init__(self, why: str, *, message_id: str, results: Mapping[QueueName, Result], queues: int) -> None:
        super().__init__(
            f"The outcome is unknown for {queues - len(results)} of {queues} queues: {why}. "
            f"Publish it again with the message id {message_id}, so that a reader who has had it can tell."
        )
        self.message_id = message_id
        self.results = dict(results)


class NotPublished(BrokerUnavailable):
    """The broker was never reached, so nothing was published."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text, timed_out=timed_out, never_reached=True)


class Publisher:
    """Publishes over a pool of connections, for many threads of one process.

    ``amqp_url`` is ``amqp://user:password@host:port`` (or ``amqps://``), user and password percent-encoded, without a
    vhost. At most ``max_connections`` are open, and the least recently used one makes way for another; one that nobody
    used for ``idle_seconds`` is closed. A call ends within ``seconds``, and ``blocked_seconds`` after the broker said
    that it takes nothing. A connection that something went wrong with is dropped, and never used again.

    A call publishes to as many vhosts at once as there may be connections. A vhost that has none yet costs it about
    ten round trips, the leave-taking of another included. With 32 connections it reached 500 vhosts in 2 s on the
    broker's own machine, in 3 s at 10 ms a round trip and in 4 s at 20 ms, and at 100 ms 180 in its 5 s (two cores).
    Who is left counts as unknown. The order is another each time, so that the next calls reach them.

    Raises:
        ValueError: the URL isn't one.
    """

    def __init__(
        self,
        amqp_url: str,
        *,
        max_connections: int = MAX_CONNECTIONS,
        idle_seconds: float = IDLE_SECONDS,
        blocked_seconds: float = BLOCKED_SECONDS,
        seconds: float = SECONDS,
    ) -> None:
        self._parameters = _read_url(amqp_url) | {
            "heartbeat": HEARTBEAT_SECONDS,
            "blocked_connection_timeout": blocked_seconds,
        }
        self._address = f"{self._parameters['host']}:{self._parameters['port']}"
        self._max_connections = max_connections
        self._idle_seconds = idle_seconds
        self._seconds = seconds
        self._changed = threading.Condition()
        self._unused: list[_Connection] = []  # the least recently used first
        self._open = 0  # with those in use, and those that are being opened or closed
        self._waiting = 0  # for a place
        self._timer: threading.Timer | None = None

    def __repr__(self) -> str:
        return f"<Publisher {self._address}>"

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._changed:
            return self._open

    def publish(self, queues: Iterable[QueueName], message: Message) -> dict[QueueName, Result]:
        """Publish a message to each of these queues, given as (vhost, name), and return what became of it.

        Raises:
            OutcomeUnknown: some queues may have it.
            NotPublished: the broker can't be reached, or all connections are busy.
            Refused: the broker doesn't let this account in; nothing was published.
        """
        names: dict[str, list[str]] = {}
        for vhost, name in dict.fromkeys(queues):
            names.setdefault(vhost, []).append(name)
        call, number = _Call(message, time.monotonic() + self._seconds, len(names)), sum(map(len, names.values()))
        if len(names) == 1:
            self._publish_in(*names.popitem(), call)
        elif names:
            with ContextThreadPool(min(self._max_connections, len(names))) as threads:
                list(threads.map(lambda vhost: self._publish_in(vhost, names[vhost], call), self._in_order(names)))
        call.check(number)
        return call.results

    def _in_order(self, vhosts: Iterable[str]) -> list[str]:
        """Return those first that there is a connection to, and the others as it falls: all get there by and by."""
        with self._changed:
            connected = {connection.vhost for connection in self._unused}
        order = list(vhosts)
        random.shuffle(order)
        return sorted(order, key=lambda vhost: vhost not in connected)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        self._close_unused(since=float("inf"))

    def _publish_in(self, vhost: str, names: Sequence[str], call: "_Call") -> None:
        if not call.begin():
            return
        try:
            connection = self._take(vhost, call.until)
        except _ShutOut as shut_out:
            call.give_up(vhost, names, shut_out)
            return
        except BrokerError as error:
            call.fail(_Failure("the broker can't be reached", error), everywhere=True)
            return
        sound = False
        try:
            connection.publish(names, call, lambda: self._make_way(call))
            sound = True
        except _ShutOut as shut_out:
            call.give_up(vhost, names, shut_out)
        except _Unconfirmed as unconfirmed:
            call.fail(_Failure(str(unconfirmed), None), everywhere=unconfirmed.everywhere)
        finally:
            self._give_back(connection, sound)

    def _make_way(self, call: "_Call") -> bool:
        """Return whether others, of this call or of another, wait for a place."""
        with self._changed:
            return self._waiting > 0 or call.has_more()

    def _take(self, vhost: str, until: float) -> "_Connection":
        """Return a connection to this vhost that nobody else uses: one of the pool, or a fresh one.

        Raises:
            _ShutOut: there is no such vhost, or this account may not enter it.
            NotPublished: the broker can't be reached in time, or all connections stay busy.
            Refused: the broker doesn't let this account in.
        """
        used, out_of_the_way = self._reserve(vhost, until)
        try:
            if out_of_the_way is not None:
                out_of_the_way.close(until)
            if used is not None:
                if used.is_alive():
                    return used
                used.drop()
            return _Connection({**self._parameters, "virtual_host": vhost}, self._address, until)
        except BaseException:
            self._released()
            raise

    def _reserve(self, vhost: str, until: float) -> "tuple[_Connection | None, _Connection | None]":
        """Take a place in the pool: with a connection to this vhost, or with one that has to be closed for it first.

        Who came first is served first; otherwise a call to many vhosts would keep one to a single vhost waiting.
        """
        with self._changed:
            try:
                while self._waiting or not self._has_place():
                    self._waiting += 1
                    try:
                        in_time = self._changed.wait(until - time.monotonic())
                    finally:
                        self._waiting -= 1
                    if self._has_place():
                        break
                    if not in_time:
                        raise NotPublished(
                            f"AMQP to {self._address}: all {self._max_connections} connections of this process are busy; "
                            "ask again later"
                        )
                for number in reversed(range(len(self._unused))):
                    if self._unused[number].vhost == vhost:
                        return self._unused.pop(number), None
                if self._open < self._max_connections:
                    self._open += 1
                    return None, None
                return None, self._unused.pop(0)
            finally:
                if self._has_place():
                    self._changed.notify()  # who was told already may have been too late

    def _has_place(self) -> bool:
        return self._open < self._max_connections or bool(self._unused)

    def _give_back(self, connection: "_Connection", sound: bool) -> None:
        if not sound:
            try:
                connection.drop()
            finally:
                self._released()
            return
        with self._changed:
            connection.unused_since = time.monotonic()
            self._unused.append(connection)
            self._changed.notify()
            self._watch()

    def _released(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()

    def _watch(self) -> None:
        """See to it that what nobody uses is closed, even where nothing is published any more."""
        if self._timer is None and self._unused:
            wait = self._unused[0].unused_since + self._idle_seconds - time.monotonic()
            self._timer = threading.Timer(max(wait, 0), self._tidy)
            self._timer.daemon = True
            self._timer.start()

    def _tidy(self) -> None:
        try:
            self._close_unused(since=time.monotonic() - self._idle_seconds)
        finally:
            with self._changed:
                self._timer = None
                self._watch()

    def _close_unused(self, since: float) -> None:
        with self._changed:
            closing = [connection for connection in self._unused if connection.unused_since <= since]
            self._unused = [connection for connection in self._unused if connection.unused_since > since]
        for connection in closing:
            try:
                connection.close()
            finally:
                self._released()


class _Failure(NamedTuple):
    """Why the message can't have reached everybody. ``error`` None: some may have been sent."""

    why: str
    error: BrokerError | None


class _ShutOut(Exception):
    """The broker doesn't let Guardian publish in this vhost, or there is no such vhost. The text is the broker's."""


class _Unconfirmed(Exception):
    """Something was sent, and not confirmed. The text says why, and has no address in it."""

    def __init__(self, error: BaseException | None) -> None:
        self.everywhere = isinstance(error, ConnectionBlockedTimeout)  # it would be the same in all vhosts
        if self.everywhere:
            why = "the broker takes no messages at the moment, as its memory or disk is short"
        elif error is not None:
            why = "the connection to the broker was lost"
        else:
            why = "the broker did not confirm it in time"
        super().__init__(why)


class _Call:
    """One message on its way, ``until`` a moment of the monotonic clock; several threads work at it."""

    def __init__(self, message: Message, until: float, vhosts: int) -> None:
        self.message = message
        self.until = until
        self.turn_seconds = (until - time.monotonic()) / TURNS
        self.results: dict[QueueName, Result] = {}
        self._failures: list[_Failure] = []
        self._over = False
        self._lock = threading.Lock()
        self._to_begin = vhosts

    def begin(self) -> bool:
        """Return whether there is any use in another vhost: the broker is there, and time is left."""
        with self._lock:
            self._to_begin -= 1
        return not self._over and time.monotonic() < self.until

    def has_more(self) -> bool:
        """Return whether vhosts are left to begin with."""
        return self._to_begin > 0 and not self._over

    def fail(self, failure: "_Failure", *, everywhere: bool) -> None:
        """Note why a vhost's queues can't all have it; ``everywhere``: it is the same for those to come."""
        self._failures.append(failure)
        self._over = self._over or everywhere

    def give_up(self, vhost: str, names: Sequence[str], why: _ShutOut) -> None:
        """Note that these can't have it, other than those that have."""
        logger.warning("Nothing can be published in the vhost %s: %s", vhost, why)
        for name in names:
            self.results.setdefault((vhost, name), Result.GONE)

    def check(self, queues: int) -> None:
        """Raise what ``Publisher.publish`` does, where it failed; ``queues`` is the number of all."""
        if len(self.results) == queues:
            return
        errors = [failure.error for failure in self._failures if failure.error is not None]
        nothing_sent = len(errors) == len(self._failures) and set(self.results.values()) <= {Result.GONE}
        if nothing_sent:
            raise errors[0] if errors else NotPublished(f"AMQP: {NO_TIME}")
        whys = [failure.why for failure in self._failures if failure.error is None]
        whys += [failure.why for failure in self._failures]
        why = whys[0] if whys else NO_TIME
        raise OutcomeUnknown(why, message_id=self.message.message_id, results=self.results, queues=queues)


class _Connection:
    """A connection with one channel that confirms. One thread uses it at a time.

    Its loop runs only inside its methods, none of which takes longer than it is given.
    """

    def __init__(self, parameters: Mapping[str, Any], address: str, until: float) -> None:
        """Open it.

        Raises:
            _ShutOut, NotPublished, Refused: as ``Publisher._take`` does.
        """
        self.vhost = str(parameters["virtual_host"])
        self.unused_since = 0.0
        self._what = f"AMQP to {address}"
        self._loop = IOLoop()
        self._channel: Any = None
        self._confirms = False
        self._blocked = False
        self._error: BaseException | None = None  # why the connection or its channel can't be used any more
        self._sent = 0
        self._unconfirmed: dict[int, str] = {}
        self._returned: set[str] = set()
        self._results: dict[QueueName, Result] = {}
        # Pika fails when it is interrupted while it connects, so it has to end that by itself.
        seconds = max(until - time.monotonic(), SHORTEST_SECONDS)
        self._connection = pika.SelectConnection(
            pika.ConnectionParameters(**parameters, socket_timeout=seconds, stack_timeout=seconds),
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._on_channel),
            on_open_error_callback=self._on_closed,
            on_close_callback=self._on_closed,
            custom_ioloop=self._loop,
        )
        self._connection.add_on_connection_blocked_callback(lambda *_: self._set_blocked(True))
        self._connection.add_on_connection_unblocked_callback(lambda *_: self._set_blocked(False))
        self._run(time.monotonic() + seconds + SHORTEST_SECONDS)
        if not self._confirms or self._error is not None:
            error = self._error
            self.drop()
            raise self._refusal(error)

    def is_alive(self) -> bool:
        """Read what the broker sent meanwhile, and return whether the connection still stands."""
        self._run(time.monotonic())
        return self._error is None

    def publish(self, names: Sequence[str], call: _Call, make_way: Callable[[], bool]) -> None:
        """Publish to each of these queues, and enter the results. ``make_way``: whether others wait for this place.

        Raises:
            _ShutOut: this account may not publish here.
            _Unconfirmed: something was sent, and not confirmed.
        """
        message, self._results = call.message, call.results
        self._returned.clear()
        properties = pika.BasicProperties(
            content_type="application/json",
            delivery_mode=2,  # kept on disk
            message_id=message.message_id,
            type=message.type,
            headers=dict(message.headers),
        )
        at_once = max(1, UNCONFIRMED_BYTES // (len(message.body) + 512))
        for start in range(0, len(names), at_once):
            if self._error is not None:
                raise _Unconfirmed(self._error)
            for name in names[start : start + at_once]:
                self._sent += 1
                self._unconfirmed[self._sent] = name
                self._channel.basic_publish("", name, message.body, properties, mandatory=True)
            self._wait_for_confirmations(call, make_way)
            if isinstance(self._error, ChannelClosedByBroker):
                raise _ShutOut(self._error.reply_text)
            if self._unconfirmed:
                raise _Unconfirmed(self._error)

    def _wait_for_confirmations(self, call: _Call, make_way: Callable[[], bool]) -> None:
        """Wait until all is confirmed or time is up; not beyond a turn without any where others wait."""
        while self._unconfirmed and self._error is None and time.monotonic() < call.until:
            before = len(self._unconfirmed)
            self._run(min(call.until, time.monotonic() + call.turn_seconds))
            # A broker that takes nothing takes it from nobody, and its own bound tells.
            if len(self._unconfirmed) == before and not self._blocked and make_way():
                return

    def close(self, until: float = float("inf")) -> None:
        """Take leave of the broker, who may be slow to answer."""
        if self.is_alive():
            self._connection.close()
            self._run(min(until, time.monotonic() + CLOSING_SECONDS))
        self.drop()

    def drop(self) -> None:
        """Hang up without a word: a broker that takes nothing wouldn't hear it."""
        if self._connection.is_open or self._connection.is_closing:
            # All that pika offers besides waits for the broker's answer.
            self._connection._terminate_stream(BrokerUnavailable("dropped"))
            self._run(time.monotonic() + CLOSING_SECONDS)
        self._loop.close()

    def _run(self, until: float) -> None:
        """Let the loop run until something stops it, or until this moment."""
        timer = self._loop.call_later(max(until - time.monotonic(), 0), self._loop.stop)
        try:
            self._loop.start()
        except Exception as error:
            # What isn't AMQP makes pika raise whatever it happens to fall over.
            logger.warning("%s: what the broker said can't be read (%r)", self._what, error)
            self._error = self._error or error
        self._loop.remove_timeout(timer)

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._on_closed)
        channel.add_on_return_callback(lambda _, method, *message: self._returned.add(method.routing_key))
        channel.confirm_delivery(self._on_confirmation, callback=self._on_confirms)

    def _on_confirms(self, _: Any) -> None:
        self._confirms = True
        self._loop.stop()

    def _on_confirmation(self, frame: Any) -> None:
        """Enter the result of one message, or of all up to one. Of a message that comes back, that came before."""
        tag, rejected = frame.method.delivery_tag, isinstance(frame.method, pika.spec.Basic.Nack)
        tags = [sent for sent in self._unconfirmed if sent <= tag] if frame.method.multiple else [tag]
        for sent in tags:
            name = self._unconfirmed.pop(sent)
            gone = Result.GONE if name in self._returned else Result.DELIVERED
            self._results[self.vhost, name] = Result.REJECTED if rejected else gone
        if not self._unconfirmed:
            self._loop.stop()

    def _on_closed(self, _: Any, error: BaseException) -> None:
        self._error = self._error or error
        self._loop.stop()

    def _refusal(self, error: BaseException | None) -> Exception:
        """Return what is to be raised where the connection did not open; None: it took too long."""
        cause = TimeoutError("timeout") if error is None else _cause(error)
        said = str(cause) or repr(cause)
        if isinstance(error, ProbableAuthenticationError) and "ACCESS_REFUSED" in said:
            see = "see the account and the password in RABBIT_URL"
            return Refused(f"{self._what}: refused ({said}); {see}", status=403, reason=said)
        by_broker = "ClosedByBroker" in said and "CONNECTION_FORCED" not in said  # which it says when it stops
        if isinstance(error, ProbableAccessDeniedError) and by_broker:
            return _ShutOut(said)  # the account is known; the vhost isn't, or is down, full or closed to it
        timed_out = "timeout" in said.lower()
        happened = "no answer in time" if timed_out else f"can't connect ({said})"
        see = "see that RabbitMQ runs there, and that the port is AMQP's"
        return NotPublished(f"{self._what}: {happened}; {see}", timed_out=timed_out)


def _cause(error: BaseException) -> BaseException:
    """Return what went wrong at the bottom: pika wraps it up to three times."""
    inner: Any = error
    while inner is not None:
        error, several = inner, getattr(inner, "exceptions", None)
        first = error.args[0] if error.args and isinstance(error.args[0], BaseException) else None
        inner = several[-1] if several else getattr(error, "exception", first)
    return error


def _read_url(amqp_url: str) -> dict[str, Any]:
    """Return the parameters of pika's connections that the URL holds."""
    url = split_url(amqp_url, ("amqp", "amqps"), _URL_FORM)
    host, port = url.hostname, url.port
    if not host or port == 0:
        raise ValueError("it names no host, or the port 0; " + _URL_FORM)
    encrypted = url.scheme == "amqps"
    return {
        "host": host,
        "port": port or (5671 if encrypted else 5672),
        "credentials": pika.PlainCredentials(unquote(url.username or "guest"), unquote(url.password or "guest")),
        "ssl_options": pika.SSLOptions(ssl.create_default_context(), host) if encrypted else None,
    }


_URL_FORM = "write amqp://user:password@host:5672, with the user and the password percent-encoded"
