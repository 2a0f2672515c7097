"""An HTTP server on this machine that records requests and gives the same answer to each."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from tests.support.toolbox import wait_until


class RecordedRequest(NamedTuple):
    """A received request, with its body decompressed."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Recorder:
    """Listens on a free port; use it in a ``with``."""

    def __init__(self, status: int = 200, answer: bytes = b"{}") -> None:
        self.asked: list[RecordedRequest] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                recorder.asked.append(RecordedRequest(self.command, self.path, dict(self.headers), body))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names in http.server

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def wait_for(self, number: int, seconds: float = 30) -> list[RecordedRequest]:
        """Return the requests once there are this many."""
        wait_until(lambda: len(self.asked) >= number, seconds)
        return self.asked

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
