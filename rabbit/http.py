"""HTTP/1.1 over kept connections: the standard library connects and reads the answers.

The management API is asked for little, often: a registration of an agent is one small PUT. httpx takes half a
millisecond longer for that, which was a tenth of the whole registration.
"""

import http.client
import io
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

MOST_CONNECTIONS = 100
MOST_KEPT = 20

KEPT_SECONDS = 30.0
"""So long is an idle connection kept: shorter than the broker's own minute, so that it is rarely the broker who hangs
up."""

PART_BYTES = 256 * 1024

_TARGET = re.compile("[!-~]+")

DIED = (OSError, http.client.HTTPException)
"""What a connection raises that was cut, or where no HTTP is spoken. A ``TimeoutError`` is one too: catch it before."""


class Unreachable(Exception):
    """No connection came about, so nothing was sent."""


class AllBusy(Exception):
    """As many connections as there may be are in use, and none became free in time. Nothing was sent."""


class TooLarge(Exception):
    """The body has more bytes than may be read."""


class TooSlow(Exception):
    """The answer was not complete in time."""


class Answer(NamedTuple):
    """What was answered."""

    status: int
    headers: http.client.HTTPMessage
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
        self._host, self._port = parts.hostname or "", parts.port
        self._host_header = _host_header(parts)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._answer_seconds = answer_seconds
        self._most_bytes = most_bytes
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []

    def send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        fresh: bool = False,
    ) -> Answer:
        """Send a request and return the answer. ``fresh``: over a connection of its own.

        Raises:
            Unreachable, AllBusy: nothing was sent.
            TimeoutError: there was no answer in time.
            TooSlow, TooLarge: there was, and it took too long or its body has too many bytes.
            DIED: the connection was cut, or what is there speaks no HTTP.
            ValueError: it can't be sent as one request; there is a line break in a header, or a blank in ``target``.
        """
        whole = _whole(method, target, {"Host": self._host_header, **headers}, body)
        if not self._free.acquire(timeout=self._read_timeout):
            raise AllBusy
        try:
            connection = self._connect() if fresh else self._kept() or self._connect()
            try:
                connection.sock.sendall(whole)
                until = time.monotonic() + self._answer_seconds
                # It is closed by hand where it fails: else it keeps the socket open for as long as the error is kept.
                with _Response(self._read_timeout, until, connection.sock, method=method) as response:
                    response.begin()
                    answer, may_be_kept = self._read(response)
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

    def _kept(self) -> http.client.HTTPConnection | None:
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

    def _connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._connect_timeout)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._connect_timeout, context=self._tls
            )
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # the second: a name that can't be a host's
            connection.close()
            raise Unreachable(str(error)) from error
        connection.sock.settimeout(self._read_timeout)
        return connection

    def _read(self, response: http.client.HTTPResponse) -> tuple[Answer, bool]:
        """Return the whole answer, and whether its connection may be used again."""
        body = bytearray()
        while part := response.read1(PART_BYTES):
            body += part
            if len(body) > self._most_bytes:
                raise TooLarge
        if response.length:
            raise http.client.IncompleteRead(bytes(body), response.length)
        response.close()  # it is read, and lets go of its connection
        return Answer(response.status, response.headers, bytes(body)), not response.will_close


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


class _Response(http.client.HTTPResponse):
    """An answer that has to be whole at a time of ``time.monotonic()``: its headers too, and what precedes them."""

    def __init__(self, read_timeout: float, until: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock, read_timeout, until))

    def _read_status(self) -> tuple[str, int, str]:
        """Return the first line of the answer itself: interim ones (100 Continue, 103 Early Hints) are passed over."""
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if status >= 200:
                return version, status, reason
            http.client.parse_headers(self.fp)


class _Reader(io.RawIOBase):
    """Reads from a socket until the time is over."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, read_timeout: float, until: float) -> None:
        self._raw, self._sock = raw, sock
        self._read_timeout, self._until = read_timeout, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - time.monotonic()
        if left >= self._read_timeout:
            return self._raw.readinto(buffer)
        if left <= 0:
            raise TooSlow
        self._sock.settimeout(left)
        try:
            return self._raw.readinto(buffer)
        except TimeoutError:
            raise TooSlow from None
        finally:
            self._sock.settimeout(self._read_timeout)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _has_something_to_say(connection: http.client.HTTPConnection) -> bool:
    """Return whether there is something to read where nothing was asked: the server has hung up, mostly."""
    if connection.sock is None:
        return True
    look = select.poll()
    look.register(connection.sock, select.POLLIN)
    return bool(look.poll(0))
