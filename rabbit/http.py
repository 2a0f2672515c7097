"""HTTP/1.1 over kept connections: httptools, which is the parser of Node.js, reads the answers.

The management API is asked for little, often: a registration of an agent is one small PUT. httpx takes half a
millisecond longer for that, which was a tenth of the whole registration, and http.client more than twice what the
system calls take. It is strict: an answer that could be read in two ways is none.
"""

import re
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

MOST_CONNECTIONS = 100
MOST_KEPT = 20

KEPT_SECONDS = 30.0
"""So long is an idle connection kept: shorter than the broker's own minute, so that it is rarely the broker who hangs
up."""

PART_BYTES = 64 * 1024

MOST_BESIDE_BODY = 64 * 1024
"""After more bytes than that without any of the body, an answer is given up on: its head or its end has none."""

PORTS = {"http": 80, "https": 443}

_TARGET = re.compile("[!-~]+")


class Unreachable(Exception):
    """No connection came about, so nothing was sent."""


class AllBusy(Exception):
    """As many connections as there may be are in use, and none became free in time. Nothing was sent."""


class TooLarge(Exception):
    """The body has more bytes than may be read."""


class TooSlow(Exception):
    """The answer was not complete in time."""


class Answer(NamedTuple):
    """What was answered. The names of headers are in lower case; of several of one name it is the first."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connections:
    """Connections to one server, for many threads.

    ``base`` is ``http://host:port`` or ``https://…``. ``connect_timeout`` and ``read_timeout`` are seconds, the second
    for each read; a whole answer may take ``answer_seconds``, and its body have ``most_bytes``. No proxy that the
    environment names is used: it is for the world outside, and would be handed every password.

    Raises:
        ValueError: the host's name can't be one.
    """

    def __init__(
        self, base: str, *, connect_timeout: float, read_timeout: float, answer_seconds: float, most_bytes: int
    ) -> None:
        parts = urlsplit(base)
        self._host = parts.hostname or ""
        self._port = PORTS[parts.scheme] if parts.port is None else parts.port
        self._host_header = _host_header(parts)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._answer_seconds = answer_seconds
        self._most_bytes = most_bytes
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._idle: list[tuple[socket.socket, float]] = []

    def send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        fresh: bool = False,
    ) -> Answer:
        """Send a request, any but a HEAD, and return the answer. ``fresh``: over a connection of its own.

        Raises:
            Unreachable, AllBusy: nothing was sent.
            TimeoutError: there was no answer in time.
            TooSlow, TooLarge: there was, and it took too long or its body has too many bytes.
            OSError: the connection was cut, or there is no HTTP. A TimeoutError is one too: catch it before.
            ValueError: it can't be sent as one request; there is a line break in a header, or a blank in ``target``.
        """
        whole = _whole(method, target, {"Host": self._host_header, **headers}, body)
        if not self._free.acquire(timeout=self._read_timeout):
            raise AllBusy
        try:
            connection = self._connect() if fresh else self._kept() or self._connect()
            try:
                connection.sendall(whole)
                answer, may_be_kept = self._read(connection)
            except BaseException:
                connection.close()
                raise
            # RabbitMQ 3.10 may refuse a PUT before it has read the body (no such vhost, no such user). The connection
            # is spoilt then: in one of twenty cases the next request on it isn't heard, and dies after five seconds.
            # So nothing is asked on it again.
            is_spoilt = body is not None and answer.status >= 400
            if fresh or is_spoilt or not may_be_kept or len(self._idle) >= MOST_KEPT:
                connection.close()
            else:
                self._idle.append((connection, time.monotonic()))
                self._drop_expired()
            return answer
        finally:
            self._free.release()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                self._idle.pop()[0].close()

    def _kept(self) -> socket.socket | None:
        """Return the idle connection that was used last and that the server hasn't closed; None: there is none."""
        while self._idle:
            try:
                connection, used_at = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - used_at < KEPT_SECONDS and not _has_something_to_say(connection):
                return connection
            connection.close()
        return None

    def _drop_expired(self) -> None:
        """Close what was idle for too long: those at the front, as the one that was used last is taken first."""
        with suppress(IndexError):  # another thread took the last one
            while time.monotonic() - self._idle[0][1] >= KEPT_SECONDS:
                self._idle.pop(0)[0].close()

    def _connect(self) -> socket.socket:
        connection = None
        try:
            connection = socket.create_connection((self._host, self._port), self._connect_timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=self._host)
        except (OSError, ValueError) as error:  # the second: a name that can't be a host's
            if connection is not None:
                connection.close()
            raise Unreachable(str(error)) from error
        connection.settimeout(self._read_timeout)
        return connection

    def _read(self, connection: socket.socket) -> tuple[Answer, bool]:
        """Return the whole answer, and whether its connection may be used again."""
        until = time.monotonic() + self._answer_seconds
        with _Reading() as reading:
            while not reading.is_whole:
                reading.take(self._part(connection, until))
                if len(reading.body) > self._most_bytes:
                    raise TooLarge
            return Answer(reading.status, reading.headers, bytes(reading.body)), reading.may_be_kept

    def _part(self, connection: socket.socket, until: float) -> bytes:
        """Return what comes next, by this ``time.monotonic()`` and by the timeout of each read; empty: it is the end.

        Raises:
            TooSlow: the time is over.
        """
        left = until - time.monotonic()
        if left >= self._read_timeout:
            return connection.recv(PART_BYTES)
        if left <= 0:
            raise TooSlow
        connection.settimeout(left)
        try:
            return connection.recv(PART_BYTES)
        except TimeoutError:
            raise TooSlow from None
        finally:
            connection.settimeout(self._read_timeout)


def _host_header(parts: SplitResult) -> str:
    """Return what requests to this address have in their Host header.

    Raises:
        ValueError: the name can't be a host's.
    """
    host = (parts.hostname or "").partition("%")[0]  # without the zone of an IPv6 address
    if not host.isascii():
        host = host.encode("idna").decode()
    elif ":" in host:
        host = f"[{host}]"
    return host if parts.port is None else f"{host}:{parts.port}"


def _whole(method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return a request, its head and its body together: in two pieces a PUT takes RabbitMQ 0.25 ms longer.

    Raises:
        ValueError: it would be read as another request than it is.
    """
    if not _TARGET.fullmatch(target):
        raise ValueError("a request is for a path without blanks and control characters, percent-encoded")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {len(body or b'')}")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
        raise ValueError("a header is one line")
    return head.encode("latin-1") + b"\r\n\r\n" + (body or b"")


class _Reading:
    """An answer as it comes: ``is_whole`` is False until its end. Interim ones (100, 103) before it are passed over.

    To be left as a context: it and its parser hold each other, and all that was read.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.may_be_kept = False
        self.is_whole = False
        self._beside_body = 0
        self._parser = HttpResponseParser(self)

    def __enter__(self) -> "_Reading":
        return self

    def __exit__(self, *_: object) -> None:
        del self._parser

    def take(self, part: bytes) -> None:
        """Take what came next; empty: the connection was closed.

        Raises:
            ConnectionError: that was too early, or it is no HTTP.
        """
        if part:
            self._feed(part)
        elif self.status and not {"content-length", "transfer-encoding"} & self.headers.keys():
            self.is_whole = True  # nothing but this was to tell its end
        else:
            raise ConnectionError("it was closed before the answer was whole")

    def _feed(self, part: bytes) -> None:
        before = len(self.body)
        handled = sys.exc_info()[1]
        try:
            self._parser.feed_data(part)
        except HttpParserCallbackError as error:
            # What a signal's handler raised, as Ctrl-C does, or that there is no memory: the parser hides it, and where
            # another exception is being handled, for good.
            hidden = error.__context__
            raise error if hidden is None or hidden is handled else hidden from None
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self.is_whole:
                raise ConnectionError(f"its answer can't be read as HTTP/1.1: {_why(error)}") from error
            self.may_be_kept = False  # it went on after the answer
        self._beside_body = 0 if len(self.body) > before else self._beside_body + len(part)
        if self._beside_body > MOST_BESIDE_BODY and not self.is_whole:
            raise ConnectionError(f"{MOST_BESIDE_BODY} bytes brought nothing of the answer's body")

    # What the parser tells

    def on_message_begin(self) -> None:
        self.may_be_kept = False  # until it is known, and for good where there is more than one answer

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers.setdefault(name.lower().decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        if self.status:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
        else:
            self.status, self.may_be_kept = status, self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        if not self.is_whole:
            self.body += part

    def on_message_complete(self) -> None:
        self.is_whole = self.status > 0


def _why(error: HttpParserError | HttpParserUpgrade) -> str:
    return "it changes to another protocol" if isinstance(error, HttpParserUpgrade) else str(error)


def _has_something_to_say(connection: socket.socket) -> bool:
    """Return whether there is something to read where nothing was asked: the server has hung up, mostly."""
    look = select.poll()
    look.register(connection, select.POLLIN)
    return bool(look.poll(0))
