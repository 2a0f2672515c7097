"""A bound on how long the body of a request may take to arrive.

Servers wait for a body as long as the connection stays, and a few that never end would take all their threads.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

BODY_SECONDS = 60.0
"""How long a body may take to come in."""

_until: dict[socket.socket, float] = {}
"""The connections that a body comes in over, and the time at which each is over."""

_late: set[socket.socket] = set()


@contextmanager
def limit_body_time(connection: socket.socket | None) -> Iterator[Callable[[], bool]]:
    """Have nothing more come in over a connection after ``BODY_SECONDS``, and give what tells whether that happened."""
    if connection is None:  # a server that has a bound of its own, or a test
        yield lambda: False
        return
    _watch()
    _until[connection] = time.monotonic() + BODY_SECONDS
    try:
        yield lambda: connection in _late
    finally:
        del _until[connection]
        _late.discard(connection)


@cache
def _watch() -> None:
    """Start what ends connections, once in a process."""
    threading.Thread(target=_end_what_is_late, name="message-store-bodies", daemon=True).start()


def _end_what_is_late() -> None:
    while True:
        time.sleep(BODY_SECONDS / 20)
        now = time.monotonic()
        for connection in [one for one, until in list(_until.items()) if until < now]:
            _late.add(connection)
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RD)
