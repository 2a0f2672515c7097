"""A queue read as site agents read theirs: by STOMP over WebSocket."""

import contextlib
import queue
import threading
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import stomp


class Received(NamedTuple):
    """One message: its headers and its body, both as they came."""

    headers: dict[str, str]
    body: str


class Refused(Exception):
    """The broker did not let this login in, or not read this queue; the text is what it said."""


class StompReader(stomp.ConnectionListener):  # type: ignore[misc]  # it has no types
    """One connection that reads one queue, which it never declares. A message counts as handled once it was sent."""

    def __init__(self, url: str, *, vhost: str, login: str, passcode: str, queue_name: str) -> None:
        """Choose; nothing is connected yet. ``url`` is ``ws://HOST:PORT/PATH``."""
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
            heartbeats=(10_000, 10_000),  # milliseconds, there and back
        )
        self._connection.set_listener("reader", self)

    def start(self, timeout: float = 10) -> Self:
        """Connect, and return when the queue is being read.

        Raises Refused, also where nobody answers within ``timeout`` seconds.
        """
        try:
            self._connection.connect(self._login, self._passcode, wait=True, headers={"accept-version": "1.2"})
        except stomp.exception.StompException as error:
            raise Refused(self._error_text or f"no connection: {error!r}") from error
        # `/amq/queue/` takes the queue as it is; `/queue/` would declare it with other arguments.
        self._connection.subscribe(
            f"/amq/queue/{self._queue_name}", id=self._queue_name, ack="auto", headers={"receipt": "reading"}
        )
        self._answered.wait(timeout)
        if not self._reading:
            # Where the queue isn't this login's, RabbitMQ says nothing and closes the connection.
            silence = "the broker closed the connection" if self.closed.is_set() else f"no answer in {timeout:.0f} s"
            raise Refused(self._error_text or silence)
        return self

    def take(self) -> str | None:
        """Give the body of the next message; None where there is none."""
        with contextlib.suppress(queue.Empty):
            return self.messages.get_nowait().body
        return None

    def is_closed(self) -> bool:
        """Whether the connection was open and is closed, by whomever."""
        return self.closed.is_set()

    def stop(self) -> None:
        """Close the connection, where it is open."""
        if self._connection.is_connected():
            self._connection.disconnect()

    def on_receipt(self, frame: Any) -> None:
        """Take note that the queue is being read."""
        if frame.headers["receipt-id"] == "reading":
            self._reading = True
            self._answered.set()

    def on_message(self, frame: Any) -> None:
        """Keep a message."""
        self.messages.put(Received(dict(frame.headers), frame.body))

    def on_error(self, frame: Any) -> None:
        """Keep what the broker said."""
        self._error_text = f"{frame.headers.get('message', '')}: {frame.body}".strip(": \n")
        self._answered.set()

    def on_disconnected(self) -> None:
        """Take note that the connection is closed, by whomever."""
        self.closed.set()
        self._answered.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
