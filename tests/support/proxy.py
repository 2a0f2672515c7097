"""A TCP proxy between a client and the broker that can delay, cut and replace answers.

It does not parse HTTP: it changes the answer to whatever the client sends next.
"""

import selectors
import socket
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit


class Proxy:
    """Listens on a free port of this machine; use it in a ``with``. It forwards everything at first."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        """The number of accepted connections."""
        self.requests = 0
        """The number of received pieces; a small HTTP request is one."""
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._dead: set[socket.socket] = set()
        self.forward()

    @classmethod
    def before(cls, url: str) -> "Proxy":
        """Return a proxy in front of the server in this URL."""
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        return cls(parts.hostname, parts.port)

    def url(self, url: str) -> str:
        """Return this URL with the proxy as its host. Credentials and path stay."""
        parts = urlsplit(url)
        credentials = parts.netloc.rpartition("@")[0]
        return parts._replace(netloc=f"{credentials}@127.0.0.1:{self.port}".lstrip("@")).geturl()

    # Modes, which apply to open connections too

    def forward(self) -> None:
        """Forward everything unchanged."""
        self._delay_seconds = 0.0
        self._bytes_left: int | None = None
        self._to_close = 0
        self._requests_left: int | None = None
        self._reset = False
        self._parts: Iterable[bytes] | None = None
        self._pause_seconds = 0.0

    def delay(self, seconds: float) -> None:
        """Delay each piece of an answer by these seconds."""
        self._delay_seconds = seconds

    def cut_after(self, count: int) -> None:
        """Close one connection after this number of further answer bytes."""
        self._bytes_left = count

    def close_next(self, count: int, *, reset: bool = False) -> None:
        """Close the connections of the next ``count`` requests without an answer, with ``reset`` by a TCP reset.

        The requests do not reach the server.
        """
        self._to_close = count
        self._reset = reset

    def close_open(self) -> None:
        """Close each connection that is open now at its next request. Forward new connections."""
        with self._lock:
            self._dead |= self._open

    def refuse(self) -> None:
        """Refuse new connections from now on, permanently."""
        # Closing alone would leave the thread in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close_after(self, count: int) -> None:
        """Forward this number of further requests, and close the connections of all later ones."""
        self._requests_left = count

    def answer(self, *parts: bytes) -> None:
        """Answer every request with these bytes and close the connection, without the server."""
        self._parts = parts

    def answer_slowly(self, parts: Iterable[bytes], pause: float) -> None:
        """Answer with these parts, which may be endless, and pause for these seconds after each."""
        self._parts = parts
        self._pause_seconds = pause

    # Implementation

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.refuse()
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            upstream = socket.create_connection(self._upstream)
        except OSError:
            client.close()
            return
        both = {client, upstream}
        with self._lock:
            self._open |= both
        try:
            with suppress(OSError), selectors.DefaultSelector() as ready:
                for one in both:
                    ready.register(one, selectors.EVENT_READ)
                going = True
                while going and not self._stopped.is_set():
                    for key, _ in ready.select():
                        step = self._from_client if key.fileobj is client else self._from_upstream
                        going = going and step(client, upstream)
        finally:
            with self._lock:
                self._open -= both
            client.close()
            upstream.close()

    def _from_client(self, client: socket.socket, upstream: socket.socket) -> bool:
        data = client.recv(65536)
        if not data:
            return False
        with self._lock:
            self.requests += 1
            close = self._to_close > 0
            self._to_close -= close
            close = close or client in self._dead
            if self._requests_left is not None:
                close = close or self._requests_left <= 0
                self._requests_left -= 1
        if close:
            if self._reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if self._parts is not None:
            for part in self._parts:
                client.sendall(part)
                if self._stopped.wait(self._pause_seconds):
                    break
            return False
        upstream.sendall(data)
        return True

    def _from_upstream(self, client: socket.socket, upstream: socket.socket) -> bool:
        data = upstream.recv(65536)
        if not data:
            return False
        if self._stopped.wait(self._delay_seconds):
            return False
        with self._lock:
            left = self._bytes_left
            if left is not None:
                self._bytes_left = left - len(data) if left > len(data) else None
        if left is not None and left <= len(data):
            client.sendall(data[:left])
            return False
        client.sendall(data)
        return True


def http_answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    """Return the bytes of a complete HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
