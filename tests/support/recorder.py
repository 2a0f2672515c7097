"""HTTP and HTTPS servers on this machine that record requests."""

import gzip
import json
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.support.toolbox import wait_until


class Received(NamedTuple):
    """A received request, with its body decompressed."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: tests let clients hang up or distrust the certificate."""


class Recorder:
    """Records requests, and answers each with ``status``, ``headers`` and ``body``; use it in a ``with``.

    With a certificate it speaks TLS. If ``slowly`` is set, it is called with a function that writes to the client,
    instead of answering.
    """

    def __init__(
        self, body: bytes = b"{}", status: int = 200, *, certificate: Path | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.received: list[Received] = []
        self.connections = 0
        self.status = status
        self.headers = {"Content-Type": "application/json"}
        self.body = body
        self.slowly: Callable[[Callable[[bytes], Any]], None] | None = None
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                recorder.connections += 1
                super().setup()

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                recorder.received.append(Received(self.command, self.path, dict(self.headers), body))
                if recorder.slowly is not None:
                    self.close_connection = True
                    recorder.slowly(self.wfile.write)
                    return
                self.send_response(recorder.status)
                for name, value in {"Content-Length": str(len(recorder.body)), **recorder.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(recorder.body)

            do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names in http.server

            def log_message(self, *args: object) -> None:
                pass

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = type("Server", (_Server,), {"address_family": family})((host, 0), Handler)
        self.port: int = self._server.server_address[1]
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

    def wait_for(self, number: int) -> None:
        """Wait until this many requests were received."""
        wait_until(lambda: len(self.received) >= number)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
