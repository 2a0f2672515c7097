"""HTTP requests to RabbitMQ over pooled connections of httpx.

This module adds what httpx lacks: a timeout for a whole answer, a limit for all requests of a page
(``deadline.py``), and a retry of a request that was sent.
"""

import ssl
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import httpcore
import httpx

from rabbit import deadline

MAX_CONNECTIONS = 100
MAX_IDLE_CONNECTIONS = 20

MAX_BYTES = 512 * 1024 * 1024
"""The limit of an answer's body. The full list of 10,000 queues has about 14 MB."""

CONNECT_SECONDS = 2.0

MIN_TIMEOUT = 0.001

IDLE_SECONDS = 30.0
"""RabbitMQ closes a connection that is idle for a minute. Closing it earlier avoids most retries."""

CONNECTION_DIED = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)


class NoAnswer(Exception):
    """There is no complete answer.

    ``timed_out``: the answer timed out. ``never_reached``: there was no connection, so the request was not executed.
    ``is_another_cluster``: the request was not sent, because the address leads to another cluster.
    """

    def __init__(
        self, text: str, *, timed_out: bool = False, never_reached: bool = False, is_another_cluster: bool = False
    ) -> None:
        super().__init__(text)
        self.timed_out = timed_out
        self.never_reached = never_reached
        self.is_another_cluster = is_another_cluster


class TooLarge(Exception):
    """The body has more than ``MAX_BYTES``."""

    def __init__(self) -> None:
        super().__init__(f"the answer has more than {MAX_BYTES} bytes")


class Answer(NamedTuple):
    """An answer, whatever its status.

    ``sent_twice``: the request was retried, so it may have been executed twice. ``address``: of several, the one that
    answered. ``request``: method and path, for the texts of errors.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    sent_twice: bool = False
    address: str = ""
    request: str = ""


class PooledClient:
    """An HTTP client of one server, for many threads.

    ``base`` is ``http://host:port`` or ``https://…``; ``credentials`` are a user and a password. The timeouts are
    seconds: ``read_timeout`` limits each read, ``answer_timeout`` a whole answer. Proxies named in the environment are
    not used: they would see every password.
    """

    def __init__(
        self, base: str, credentials: tuple[str, str] | None, read_timeout: float, answer_timeout: float
    ) -> None:
        try:
            self._url = httpx.URL(base)
        except httpx.InvalidURL as error:
            raise ValueError(str(error)) from error
        self._url.host.encode("idna")  # raise now, and not with the first request
        self._base = base
        self._credentials = credentials
        self._read_timeout = read_timeout
        self._answer_timeout = answer_timeout
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._pooled = self._new_client()

    def send(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send an idempotent request and return its answer. Retry once, on a fresh connection, if its connection dies.

        ``target`` is the path and the query, percent-encoded; it is sent as it is. Raises NoAnswer and TooLarge.
        """
        request = self._pooled.build_request(
            method,
            self._url,
            content=body,
            headers=headers,
            extensions={"target": target.encode("ascii")},  # httpx would normalize a path in the URL
        )
        is_retry = False
        timeout = deadline.seconds_left(self._read_timeout)
        if timeout <= 0:
            raise NoAnswer("an earlier request took all the time", never_reached=True)
        try:
            try:
                return self._exchange(self._pooled, request)
            except CONNECTION_DIED:
                is_retry = True
                with self._new_client() as fresh:
                    return self._exchange(fresh, request)._replace(sent_twice=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NoAnswer(f"can't connect to {self._base} ({error})", never_reached=not is_retry) from error
        except httpx.PoolTimeout as error:
            raise NoAnswer("all connections of this process are busy", never_reached=True) from error
        except _AnswerTimeout as error:
            raise NoAnswer(f"the answer was not complete within {error} s", timed_out=True) from error
        except httpx.TimeoutException as error:
            raise NoAnswer(f"no answer within {timeout:.3g} s", timed_out=True) from error
        except CONNECTION_DIED as error:
            raise NoAnswer(f"the connection was cut, or HTTP isn't spoken there ({error})") from error

    def close(self) -> None:
        self._pooled.close()

    def _new_client(self) -> httpx.Client:
        return httpx.Client(
            auth=self._credentials,
            # A small compressed answer could expand to a large one.
            headers={"Accept-Encoding": "identity", "User-Agent": "Guardian"},
            transport=_Transport(self._tls, self._answer_timeout),
            trust_env=False,
        )

    def _exchange(self, client: httpx.Client, request: httpx.Request) -> Answer:
        read = max(deadline.seconds_left(self._read_timeout), MIN_TIMEOUT)
        request.extensions["timeout"] = httpx.Timeout(read, connect=min(CONNECT_SECONDS, read)).as_dict()
        response = client.send(request, stream=True)
        connection = response.extensions["network_stream"]
        try:
            if not connection.has_read:
                # The server sent two answers to the previous request. This is the second.
                connection.close()
                raise httpx.RemoteProtocolError("an answer came before its request")
            body = bytearray()
            # iter_raw() would return the connection to the pool before it can be closed.
            for part in cast(Iterable[bytes], response.stream):
                body += part
                if len(body) > MAX_BYTES:
                    raise TooLarge
            # RabbitMQ 3.10 may refuse a PUT before it reads the body. One in twenty next requests on that connection
            # gets no answer.
            if response.is_error and request.content:
                connection.close()
            deadline.record_answer()
            return Answer(response.status_code, response.headers, bytes(body))
        finally:
            response.close()


class _AnswerTimeout(Exception):
    """The whole answer timed out. The text is the timeout in seconds."""


class _Transport(httpx.HTTPTransport):
    """httpx's transport with connections that have a timeout for a whole answer."""

    def __init__(self, tls: ssl.SSLContext | None, answer_timeout: float) -> None:
        # HTTPTransport has no argument for the network backend, so its pool is replaced.
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls,
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_SECONDS,
            network_backend=_Backend(answer_timeout),
        )


class _Backend(httpcore.SyncBackend):
    def __init__(self, answer_timeout: float) -> None:
        self._answer_timeout = answer_timeout

    def connect_tcp(self, *arguments: Any, **options: Any) -> httpcore.NetworkStream:
        return _Connection(super().connect_tcp(*arguments, **options), self._answer_timeout)


class _Connection(httpcore.NetworkStream):
    """A connection whose reads end ``answer_timeout`` seconds after the last write."""

    def __init__(self, stream: httpcore.NetworkStream, answer_timeout: float) -> None:
        self._stream = stream
        self._answer_timeout = answer_timeout
        self._timeout = answer_timeout
        self._deadline = 0.0
        self.has_read = False
        """Whether anything was read after the last write."""

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._timeout = deadline.seconds_left(self._answer_timeout)
        self._deadline = time.monotonic() + self._timeout
        self.has_read = False
        self._stream.write(buffer, timeout)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self.has_read = True
        left = self._deadline - time.monotonic()
        if timeout is not None and left >= timeout:
            return self._stream.read(max_bytes, timeout)
        if left <= 0:
            raise _AnswerTimeout(f"{self._timeout:.3g}")
        try:
            return self._stream.read(max_bytes, left)
        except httpcore.ReadTimeout:
            raise _AnswerTimeout(f"{self._timeout:.3g}") from None

    def start_tls(self, *arguments: Any, **options: Any) -> httpcore.NetworkStream:
        return _Connection(self._stream.start_tls(*arguments, **options), self._answer_timeout)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def close(self) -> None:
        self._stream.close()
