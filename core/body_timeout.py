"""A timeout for the body of a request.

A server waits for a body as long as its connection is open. A few endless bodies would block all its threads.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

BODY_SECONDS = 60.0

_deadlines: dict[socket.socket, float] = {}
"""The connections that receive a body, with the monotonic time of each deadline."""

_timed_out: set[socket.socket] = set()


@contextmanager
def limit_body_time(connection: socket.socket | None, seconds: float | None = None) -> Iterator[Callable[[], bool]]:
    """Stop reading from a connection after this time, by default ``BODY_SECONDS``.

    Yield a function that returns whether that happened. Without a connection there is no limit: the server has its own,
    or this is a test.
    """
    if connection is None:
        yield lambda: False
        return
    _start_thread()
    _deadlines[connection] = time.monotonic() + (BODY_SECONDS if seconds is None else seconds)
    try:
        yield lambda: connection in _timed_out
    finally:
        del _deadlines[connection]
        _timed_out.discard(connection)


@cache
def _start_thread() -> None:
    threading.Thread(target=_shut_down_late_connections, name="message-store-bodies", daemon=True).start()


def _shut_down_late_connections() -> None:
    while True:
        time.sleep(BODY_SECONDS / 20)
        now = time.monotonic()
        for connection in [one for one, deadline in list(_deadlines.items()) if deadline < now]:
            _timed_out.add(connection)
            with suppress(OSError):  # the connection is closed already
                connection.shutdown(socket.SHUT_RD)
