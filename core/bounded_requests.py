"""Requests of ``requests`` to other servers, with one deadline, one size limit and one depth limit.

``requests`` itself limits only the pause between two bytes of an answer. Used by sign-in with OpenID Connect
(``Session``) and by channels (``notifications/public_https.py``).
"""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import requests
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.poolmanager import PoolManager

from core.certificates import SystemTrust

SECONDS = 9.0
"""The deadline of an exchange: of all requests of a sign-in, or of a message to a channel."""

CONNECT_SECONDS = 4.0

MAX_BYTES = 1024 * 1024
"""The limit of each answer's body, decompressed. Configurations and claims take some kilobytes."""

MAX_DEPTH = 100
"""The limit of nested objects and lists in JSON. Python's parser fails at about 1000, depending on its caller."""

THREAD_NAME = "bounded request"

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}

T = TypeVar("T")


class Unusable(requests.RequestException):
    """The answer is late or nested too deep."""


class Exchange:
    """The requests to another server that share a deadline."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + SECONDS
        self._ended = False
        self._sockets: list[socket.socket] = []
        self._last_run: Future[Any] | None = None
        self._lock = threading.Lock()

    def seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed. Then connections are closed, and errors of requests say nothing."""
        return time.monotonic() >= self._deadline

    def run(self, action: Callable[[], T]) -> T:
        """Return the action's result. The action runs in a thread of its own.

        That thread ends soon after the deadline, unless it waits for the resolver of host names, which has no timeout.
        Raises Unusable at and after the deadline, or the action's exception.
        """
        if self._ended:
            raise Unusable(late())
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=copy_context().run, args=(run,), name=THREAD_NAME, daemon=True).start()
        self._last_run = future
        if not wait([future], self.seconds_left()).done:
            self.end()
            raise Unusable(late())
        return future.result()

    def call_when_idle(self, action: Callable[[], object]) -> None:
        if self._last_run is None:
            action()
        else:
            self._last_run.add_done_callback(lambda _: action())

    def add_socket(self, connected: socket.socket) -> None:
        """Close this connection at the end. Raises OSError after the end."""
        with self._lock:
            if self._ended:
                connected.close()
                raise TimeoutError("it took too long")
            # TLS detaches this socket object, so keep a duplicate of the connection.
            self._sockets.append(connected.dup())

    def end(self) -> None:
        """Close the connections, and refuse further ones."""
        with self._lock:
            self._ended = True
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            self._sockets.clear()


def late() -> str:
    return f"no complete answer came within {SECONDS:g} s"


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


@contextmanager
def exchange() -> Iterator[Exchange]:
    """Begin an exchange. The requests inside belong to it."""
    begun = Exchange()
    token = _current.set(begun)
    try:
        yield begun
    finally:
        _current.reset(token)
        begun.end()


def current() -> Exchange:
    found = _current.get()
    assert found is not None  # noqa: S101 - requests are sent in an exchange only
    return found


class _Connection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        connected = super()._new_conn()
        current().add_socket(connected)
        return connected


class _TLSConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        connected = super()._new_conn()
        current().add_socket(connected)
        return connected


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


class Adapter(SystemTrust):
    """Send one request of an exchange. Of the answer's body, read up to ``MAX_BYTES``."""

    pools: Mapping[str, type[HTTPConnectionPool]] = {"http": _Pool, "https": _TLSPool}

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = dict(self.pools)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> PoolManager:
        manager: PoolManager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = dict(self.pools)
        return manager

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        left = current().seconds_left()
        try:
            response = super().send(
                request, True, (min(CONNECT_SECONDS, left), left), verify, cert, dict(proxies or {})
            )
            try:
                # A decompression bomb must not fill the memory, so limit the size while decompressing.
                content = response.raw.read(MAX_BYTES, decode_content=True)
            except Exception as error:
                raise requests.ConnectionError(f"the answer is incomplete: {error}") from error
        finally:
            self.close()
        response._content, response._content_consumed = content, True
        return response


class Session(requests.Session):
    """A session whose answers are cut at ``MAX_BYTES``, and at most ``MAX_DEPTH`` deep. Use it inside ``exchange``.

    Raises ``requests.RequestException`` for all failures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mount("https://", Adapter())
        self.mount("http://", Adapter())

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        response = current().run(lambda: super(Session, self).request(*args, **kwargs))
        if _is_too_deep(response.content):
            raise Unusable(f"the answer is nested more than {MAX_DEPTH} levels deep")
        return response


def _is_too_deep(body: bytes) -> bool:
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(body):
        depth += _STEPS.get(found[0], 0)
        if depth > MAX_DEPTH:
            return True
    return False


def _is_outside_exchange(_: logging.LogRecord) -> bool:
    return _current.get() is None


# At DEBUG, urllib3 logs the paths of requests. Those of webhooks are secrets.
logging.getLogger("urllib3.connectionpool").addFilter(_is_outside_exchange)
