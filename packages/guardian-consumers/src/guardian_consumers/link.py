"""One connection to the broker, kept up by a thread of its own: connect, serve, reconnect with backoff and jitter.

pika's SelectConnection and not the blocking one, nor yapw's clients: a blocking connection takes twice the time for a
message, yapw's reconnects at a fixed interval and has one channel. The thread does nothing but AMQP, so heartbeats go
out whatever the callbacks do.
"""

import logging
import math
import random
import re
import struct
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pika
from pika import spec
from pika.adapters.select_connection import IOLoop
from pika.exceptions import ChannelClosedByBroker, IncompatibleProtocolError, InvalidFrameError
from pika.frame import Header, decode_frame

from guardian_consumers.errors import ConsumerError, Refused
from guardian_consumers.retries import HEADERS_DROPPED

logger = logging.getLogger(__name__)

Steps = Generator[Callable[..., Any], Any, None]
"""What is done one after the other: each step is called with ``callback``, which the broker's answer is given to."""

MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
"""Seconds. The delay doubles with each failure; what is waited is from a half of it to all of it, at random."""

STABLE_SECONDS = 10.0
"""How long a connection has to last for the next delay to be the first again."""

REFUSAL_CODES = {403, 530}
"""Codes with which the broker says that account, password, permissions or vhost are wrong, when one connects."""

DECLARE_REFUSAL_CODES = {403, 406}
"""Codes with which it says that what is declared isn't allowed, or is there with other arguments."""


CLOSE_SECONDS = 10.0
"""How long the broker has to answer a goodbye."""


def open_channel(connection: Any) -> Callable[..., Any]:
    """Return the step that opens a channel."""
    return lambda callback: connection.channel(on_open_callback=callback)


_CLOSE_CODE = re.compile(r"ConnectionClosedByBroker: \((\d+)\)")
"""How pika tells, in a text alone, with which code the broker closed a connection that wasn't open yet."""

_CONNECTION_LIMIT = re.compile(r"limit \(\d+\) is reached")
"""How the broker says, by one of these codes too, that a vhost, an account or a node has too many connections."""

_DISCONNECTED = re.compile(r"Transport indicated EOF|Connection(Reset|Aborted)Error|BrokenPipeError")
"""How pika tells that the other end said nothing and went: a proxy does, while the broker behind it isn't there."""


class Link:
    """A connection that is made again when it is lost, until `close`.

    ``set_up`` is called with the link and each new connection, and does by steps what has to be done before it is of
    use; ``lost`` is called when that connection is of no more use and again when it is gone, with the reason, and at
    the end; ``refused`` when the broker refuses for good, and no further try is made. All three, and what is passed to
    `call`, run in the link's thread and must not block.
    """

    def __init__(
        self,
        parameters: Any,
        name: str,
        set_up: Callable[["Link", Any], Steps],
        lost: Callable[[str], None],
        refused: Callable[[ConsumerError], None],
    ) -> None:
        self._parameters = parameters
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
        """What is being set up, for the text of an error."""
        self.ready = False
        """Whether there is a connection that was set up."""
        self.connects = 0
        """How many connections were set up so far."""

    def start(self) -> None:
        """Start the thread, which connects."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Have the thread run this, soon, in the order in which it was asked to. Any thread may call this.

        After the thread's end nothing is run.
        """
        with self._end_lock:
            if not self._ended:
                self._loop.add_callback_threadsafe(function)

    def run_steps(self, steps: Steps) -> None:
        """Do these one after the other, on the connection of this moment; called in its thread alone."""
        self._run_step(steps, self._connection, None)

    def reconnect(self, reason: str) -> None:
        """Give this connection up and make another; called in its thread alone."""
        if self._connection is not None and not (self._connection.is_closing or self._connection.is_closed):
            self._reason = reason
            self.ready = False
            self._connection.close(320, reason[:200])
            self._lost(reason)  # now, and not when the broker has answered: nothing that is settled goes out any more
            # A broker that has stopped answers no goodbye.
            self._loop.call_later(self._parameters.socket_timeout, partial(self._abort, self._connection))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Say goodbye, for which all that was sent before is dealt with by the broker, and end the thread.

        The broker has ``timeout`` seconds to answer.
        """
        if self._thread.ident is None:
            return
        self.call(self._close)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.call(lambda: self._abort(self._connection))
            self._thread.join(timeout)

    # All below runs in the thread.

    def _run(self) -> None:
        try:
            self._connect()
            self._loop.start()
        except Exception as error:
            # pika raises whatever it falls over: what it reads, where that isn't AMQP, or a goodbye while it connects.
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
        self._connection = _Connection(
            self._parameters,
            on_open_callback=self._open_succeeded,
            on_open_error_callback=self._open_failed,
            on_close_callback=self._closed,
            custom_ioloop=self._loop,
        )

    def _open_succeeded(self, connection: Any) -> None:
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
        """Make another connection when this channel is closed by anybody but us: what it had is void."""
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
        # A broker that is just starting refuses what it will allow in a moment: its vhosts come up one by one.
        if refused and not self.connects:
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
        delay = min(MIN_BACKOFF_SECONDS * 2**self._failures, MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1)  # noqa: S311
        self._failures = min(self._failures + 1, 16)
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
        """Drop a connection without a word."""
        if connection is not None and connection is self._connection and not connection.is_closed:
            # All that pika offers besides waits for the broker's answer.
            connection._terminate_stream(ConsumerError("no answer"))

    @property
    def _where(self) -> str:
        return f"{self._parameters.host}:{self._parameters.port}, vhost {self._parameters.virtual_host}"


class _Connection(pika.SelectConnection):  # type: ignore[misc]
    """pika's, which is lost at headers that it can't read, and at the same message again: here it goes on without them.

    Such are a time of theirs past the year 9999, as it is where milliseconds are written for seconds.
    """

    def _read_frame(self) -> Any:
        try:
            return decode_frame(self._frame_buffer)
        except Exception as error:
            if isinstance(error, InvalidFrameError) or self._frame_buffer[0] != spec.FRAME_HEADER:
                raise
            return _decode_without_headers(self._frame_buffer, error)


def _decode_without_headers(data: bytes, error: Exception) -> tuple[int, Header]:
    """Return how long the frame is that these bytes begin with, and the properties in it, which say ``unreadable``."""
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
    """Return what went wrong at the bottom: pika wraps it up to three times."""
    inner = error
    while inner is not None:
        error, several = inner, getattr(inner, "exceptions", None)
        first = error.args[0] if error.args and isinstance(error.args[0], BaseException) else None
        inner = several[-1] if several else getattr(error, "exception", first)
    return error
