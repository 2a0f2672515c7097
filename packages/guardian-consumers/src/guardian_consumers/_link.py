"""A connection to the broker in its own thread, which reconnects with backoff and jitter.

It uses pika's SelectConnection: a blocking connection takes twice the time per message, and yapw's clients reconnect at
a fixed interval and have one channel. The thread only does AMQP, so long callbacks don't delay heartbeats.
"""

import logging
import math
import os
import random
import re
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import pika
from pika import spec
from pika.adapters.select_connection import IOLoop
from pika.exceptions import ChannelClosedByBroker, IncompatibleProtocolError, InvalidFrameError
from pika.frame import Header, decode_frame

from guardian_consumers._errors import ConsumerError, Refused
from guardian_consumers.headers import HEADERS_DROPPED

logger = logging.getLogger(__name__)

Steps = Generator[Callable[..., Any], Any, None]
"""Asynchronous requests in sequence. Each step is called with a ``callback``, which receives the broker's answer."""

MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
"""The backoff doubles with each failure. A random half of it is jitter."""

STABLE_SECONDS = 10.0
"""A connection that lasts this long resets the backoff."""

REFUSAL_CODES = {403, 530}
"""Reply codes for a wrong RabbitMQ user, password, permission or vhost while connecting."""

DECLARE_REFUSAL_CODES = {403, 406}
"""Reply codes for a declaration without permission or with other arguments."""


CLOSE_SECONDS = 10.0


def open_channel(connection: Any) -> Callable[..., Any]:
    return lambda callback: connection.channel(on_open_callback=callback)


_CLOSE_CODE = re.compile(r"ConnectionClosedByBroker: \((\d+)\)")
"""If the broker closes a connection that isn't open yet, pika has the reply code only in this text."""

_CONNECTION_LIMIT = re.compile(r"limit \(\d+\) is reached")
"""The broker also uses the refusal codes if a vhost, a RabbitMQ user or a node has too many connections."""

_DISCONNECTED = re.compile(r"Transport indicated EOF|Connection(Reset|Aborted)Error|BrokenPipeError")
"""pika's texts for a disconnection without an answer, as by a proxy whose broker is down."""


class Link:
    """A connection that reconnects until `close`, to the next of its addresses each time.

    ``set_up`` is called with the link and each new connection, and returns the steps that prepare it. ``lost`` is
    called with the reason when a connection becomes unusable, again when it is closed, and at the end. ``refused`` is
    called when the broker refuses permanently; then the link doesn't reconnect. All three and the functions passed to
    `call` run in the link's thread and must not block.
    """

    def __init__(
        self,
        addresses: Sequence[Any],
        name: str,
        set_up: Callable[["Link", Any], Steps],
        lost: Callable[[str], None],
        refused: Callable[[ConsumerError], None],
    ) -> None:
        self._addresses = addresses
        self._process = os.getpid()
        self._turn = 0
        self._cluster = ""
        self._checked: set[int] = set()
        """The addresses at which this cluster was found."""
        self._refusals = 0
        """The number of addresses in a row that refused the first connection."""
        self._name = name
        self._set_up = set_up
        self._lost = lost
        self._refused = refused
        self._loop: Any = IOLoop()
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._failures = 0
        self._closing = False
        self._end_lock = threading.Lock()
        self._ended = False
        self._timer: Any = None
        self._ready_at = math.inf
        self._reason = ""
        self.current_step = ""
        """A description of the step in progress, for error texts."""
        self.ready = False
        """Whether the current connection is set up."""
        self.connects = 0
        """The number of connections set up so far."""

    def start(self) -> None:
        if os.getpid() != self._process:  # processes would share the loop's epoll
            raise ConsumerError(f"the {self._name} was created before a fork; create it in the process that starts it")
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Schedule a function in the link's thread. Functions run in the order of the calls.

        Any thread may call this. After the end of the link's thread it does nothing.
        """
        with self._end_lock:
            if not self._ended:
                self._loop.add_callback_threadsafe(function)

    def run_steps(self, steps: Steps) -> None:
        """Run steps on the current connection. Call this in the link's thread only."""
        self._run_step(steps, self._connection, None)

    @property
    def server_version(self) -> tuple[int, ...]:
        """The first two numbers of the broker's version, or (0, 0) if it is unknown."""
        version = str((self._connection.server_properties or {}).get("version", "")) if self._connection else ""
        numbers = version.split(".")[:2]
        return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else (0, 0)

    def reconnect(self, reason: str) -> None:
        """Close the current connection and open another. Call this in the link's thread only."""
        if self._connection is not None and not (self._connection.is_closing or self._connection.is_closed):
            self._reason = reason
            self.ready = False
            self._connection.close(320, reason[:200])
            self._lost(reason)  # immediately, since no further acks are sent
            # A stopped broker does not answer.
            self._loop.call_later(self._parameters.socket_timeout, partial(self._abort, self._connection))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Close the connection, after the broker has processed everything sent before, and end the thread.

        Abort the connection if the broker doesn't answer within ``timeout`` seconds.
        """
        if self._thread.ident is None:
            return
        self.call(self._close)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.call(lambda: self._abort(self._connection))
            self._thread.join(timeout)

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            self._connect()
            self._loop.start()
        except Exception as error:
            # pika raises various exceptions, for instance if the peer doesn't speak AMQP or closes during the
            # handshake.
            failed = not self._closing
            logger.log(logging.ERROR if failed else logging.DEBUG, "%s: its thread failed", self._name, exc_info=error)
            self.ready = False
            self._lost(f"the connection's thread failed: {error!r}")
            if failed:
                self._refused(ConsumerError(f"{self._name}: the connection's thread failed: {error!r}"))
        with self._end_lock:
            self._ended = True
        self._loop.close()

    def _connect(self) -> None:
        self._timer = None
        self._connection = Connection(
            self._parameters,
            on_open_callback=self._open_succeeded,
            on_open_error_callback=self._open_failed,
            on_close_callback=self._closed,
            custom_ioloop=self._loop,
        )

    def _open_succeeded(self, connection: Any) -> None:
        cluster = str((connection.server_properties or {}).get("cluster_name", ""))
        # A cluster without a name is named after the node that is asked, such as "rabbit@a".
        is_named = "@" not in cluster or "@" not in self._cluster
        # At an address that was used before, the cluster was renamed.
        if self._turn not in self._checked and self._cluster not in ("", cluster) and is_named:
            self.reconnect(f"{self._where} is a node of the cluster '{cluster}', not of '{self._cluster}'")
            return
        self._cluster = cluster
        self._checked.add(self._turn)
        self._run_step(self._set_up(self, connection), connection, None)

    def _run_step(self, steps: Steps, connection: Any, answer: Any = None) -> None:
        if connection is not self._connection or not connection.is_open:
            return
        try:
            do = steps.send(answer)
        except StopIteration:
            if not self.ready:
                self._is_ready(connection)
            return
        except ConsumerError as error:
            self._give_up(error)
            return
        do(callback=partial(self._run_step, steps, connection))

    def _is_ready(self, connection: Any) -> None:
        if self._closing:
            return
        self.ready = True
        self.connects += 1
        self._ready_at = time.monotonic()
        logger.log(logging.INFO if self.connects > 1 else logging.DEBUG, "%s: connected", self._name)

    def watch(self, channel: Any) -> None:
        """Reconnect if this channel is closed by the broker or an error."""
        channel.add_on_close_callback(self._channel_closed)

    def _channel_closed(self, channel: Any, reason: Any) -> None:
        if self._closing or channel.connection is not self._connection or not self._connection.is_open:
            return
        if not self.ready and isinstance(reason, ChannelClosedByBroker) and reason.reply_code in DECLARE_REFUSAL_CODES:
            self._give_up(Refused(f"{self.current_step}: {reason.reply_text} ({reason.reply_code})"))
            return
        what = f"{self.current_step}: " if not self.ready else ""
        self.reconnect(f"{what}the channel was closed: {_describe(reason)}")

    def _open_failed(self, _: Any, error: Any) -> None:
        self._connection = None
        cause = _root_cause(error)
        said = _CLOSE_CODE.search(str(cause))
        by_code = said is not None and int(said[1]) in REFUSAL_CODES and not _CONNECTION_LIMIT.search(str(cause))
        refused = by_code or (isinstance(error, IncompatibleProtocolError) and not _DISCONNECTED.search(str(cause)))
        # A starting broker may refuse temporarily, since its vhosts start one by one. So only give up before the first
        # connection, and if no address accepts it.
        self._refusals = self._refusals + 1 if refused else 0
        if self._refusals >= len(self._addresses) and not self.connects:
            self._give_up(Refused(f"can't connect to {self._where}: {_describe(cause)}; see RABBIT_URL"))
            return
        self._reconnect_later(f"can't connect to {self._where}: {_describe(cause)}")

    def _closed(self, _: Any, reason: Any) -> None:
        self._reconnect_later(self._reason or _describe(reason))

    def _reconnect_later(self, reason: str) -> None:
        if time.monotonic() - self._ready_at >= STABLE_SECONDS:
            self._failures = 0
        self._ready_at = math.inf
        self.ready = False
        self._reason = ""
        self._connection = None
        self._lost(reason)
        if self._closing:
            self._loop.stop()
            return
        rounds = self._failures // len(self._addresses)  # each address is tried with the same delay
        delay = min(MIN_BACKOFF_SECONDS * 2**rounds, MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1)  # noqa: S311
        self._failures = min(self._failures + 1, 16 * len(self._addresses))
        self._turn = (self._turn + 1) % len(self._addresses)
        logger.warning("%s: %s; connecting again in %.1f s", self._name, reason, delay)
        self._timer = self._loop.call_later(delay, self._connect)

    def _give_up(self, error: ConsumerError) -> None:
        self._closing = True
        self._refused(error)
        self._close()

    def _close(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._loop.remove_timeout(self._timer)
            self._timer = None
        if self._connection is None:
            self._lost("closed")
            self._loop.stop()
        elif not (self._connection.is_closing or self._connection.is_closed):
            self._connection.close()

    def _abort(self, connection: Any) -> None:
        """Drop a connection without a closing handshake."""
        if connection is not None and connection is self._connection and not connection.is_closed:
            # pika's public methods wait for the broker's answer.
            connection._terminate_stream(ConsumerError("no answer"))

    @property
    def _parameters(self) -> Any:
        return self._addresses[self._turn]

    @property
    def _where(self) -> str:
        return f"{self._parameters.host}:{self._parameters.port}, vhost {self._parameters.virtual_host}"


class Connection(pika.SelectConnection):  # type: ignore[misc]
    """pika's connection, but a message with undecodable headers is delivered without them.

    pika loses the connection at such a message, and again at each redelivery. An example is a timestamp past the year
    9999, as from milliseconds written for seconds.
    """

    def _read_frame(self) -> Any:
        try:
            return decode_frame(self._frame_buffer)
        except Exception as error:
            if isinstance(error, InvalidFrameError) or self._frame_buffer[0] != spec.FRAME_HEADER:
                raise
            return _decode_without_headers(self._frame_buffer, error)


def _decode_without_headers(data: bytes, error: Exception) -> tuple[int, Header]:
    """Return the first frame's length and its properties, with an attribute ``unreadable`` instead of headers."""
    _, channel, length = struct.unpack_from(">BHL", data)
    frame = data[spec.FRAME_HEADER_SIZE : spec.FRAME_HEADER_SIZE + length]
    _, _, body_size, flags = struct.unpack_from(">HHQH", frame)
    begin = at = struct.calcsize(">HHQH")
    for flag in (spec.BasicProperties.FLAG_CONTENT_TYPE, spec.BasicProperties.FLAG_CONTENT_ENCODING):
        at += 1 + frame[at] if flags & flag else 0
    [headers] = struct.unpack_from(">L", frame, at)
    others = frame[begin:at] + frame[at + 4 + headers :]
    properties = pika.BasicProperties()
    properties.decode(struct.pack(">H", flags & ~spec.BasicProperties.FLAG_HEADERS) + others)
    properties.headers = {HEADERS_DROPPED: True}
    properties.unreadable = f"the headers can't be read: {error}"
    return spec.FRAME_HEADER_SIZE + length + spec.FRAME_END_SIZE, Header(channel, body_size, properties)


def _describe(reason: Any) -> str:
    text = getattr(reason, "reply_text", None)
    return f"{text} ({reason.reply_code})" if text else str(reason) or repr(reason)


def _root_cause(error: Any) -> Any:
    """Return the root cause of an error, which pika wraps up to three times."""
    inner = error
    while inner is not None:
        error, several = inner, getattr(inner, "exceptions", None)
        first = error.args[0] if error.args and isinstance(error.args[0], BaseException) else None
        inner = several[-1] if several else getattr(error, "exception", first)
    return error
