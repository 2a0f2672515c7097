"""Read a queue as site agents do: with STOMP over WebSocket."""

import contextlib
import queue
import threading
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import stomp
from websocket import WebSocketException


class Received(NamedTuple):
    headers: dict[str, str]
    body: str


class Refused(Exception):
    """The broker refused the login or the subscription, with this text."""


class StompReader(stomp.ConnectionListener):  # type: ignore[misc]  # it has no types
    """A connection that reads an existing queue with automatic acknowledgement."""

    def __init__(self, url: str, *, vhost: str, login: str, passcode: str, queue_name: str) -> None:
        """Create the reader without connecting. ``url`` is ``ws://HOST:PORT/PATH``."""
        address = urlsplit(url)
        self.messages: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self.closed = threading.Event()
        self._answered = threading.Event()
        self._reading = False
        self._error_text = ""
        self._login = login
        self._passcode = passcode
        self._queue_name = queue_name
        self._connection = stomp.WSStompConnection(
            [(address.hostname, address.port)],
            ws_path=address.path,
            vhost=vhost,
            reconnect_attempts_max=1,
            heartbeats=(10_000, 10_000),  # milliseconds in both directions
        )
        self._connection.set_listener("reader", self)

    def start(self, timeout: float = 10) -> Self:
        """Connect, and wait until the subscription is active.

        Raises Refused, also without an answer within ``timeout`` seconds.
        """
        try:
            self._connection.connect(self._login, self._passcode, wait=True, headers={"accept-version": "1.2"})
        except stomp.exception.StompException as error:
            raise Refused(self._error_text or f"no connection: {error!r}") from error
        # `/amq/queue/` uses the existing queue; `/queue/` would declare it with other arguments.
        self._connection.subscribe(f"/amq/queue/{self._queue_name}", id=self._queue_name, ack="auto")
        # RabbitMQ 4 sends a receipt for a refused SUBSCRIBE too, but none for the frame after it.
        with contextlib.suppress(stomp.exception.StompException, WebSocketException, OSError):  # closed by now
            self._connection.begin("after-subscribe", headers={"receipt": "reading"})
        self._answered.wait(timeout)
        if not self._reading:
            # Without permission for the queue, RabbitMQ closes the connection without an error.
            silence = "the broker closed the connection" if self.closed.is_set() else f"no answer in {timeout:.0f} s"
            raise Refused(self._error_text or silence)
        return self

    def take(self) -> str | None:
        with contextlib.suppress(queue.Empty):
            return self.messages.get_nowait().body
        return None

    def is_closed(self) -> bool:
        return self.closed.is_set()

    def stop(self) -> None:
        if self._connection.is_connected():
            self._connection.disconnect()

    def on_receipt(self, frame: Any) -> None:
        if frame.headers["receipt-id"] == "reading":
            self._reading = True
            self._answered.set()

    def on_message(self, frame: Any) -> None:
        self.messages.put(Received(dict(frame.headers), frame.body))

    def on_error(self, frame: Any) -> None:
        self._error_text = f"{frame.headers.get('message', '')}: {frame.body}".strip(": \n")
        self._answered.set()

    def on_disconnected(self) -> None:
        self.closed.set()
        self._answered.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
