"""HTTPS servers on this machine in place of chat services, with a certificate that a test can trust."""

import datetime
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    json: Any
    body: bytes


def make_certificate(folder: Path) -> Path:
    """Write a self-signed certificate for this machine's names, with its key, and return the file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    addresses = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), *map(x509.IPAddress, addresses)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "webhooks.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return file


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: tests let clients hang up or distrust the certificate."""


class Webhook:
    """A server that receives messages; use it in a ``with``. It answers ``status``, 200 by default.

    If ``slowly`` is set, it is called with a function that writes to the client, instead of answering.
    """

    def __init__(self, certificate: Path | None, host: str = "127.0.0.1") -> None:
        self.received: list[Received] = []
        self.connections = 0
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body = b"ok"
        self.slowly: Callable[[Callable[[bytes], Any]], None] | None = None
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                hook.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with suppress(ValueError):
                    hook.received.append(Received(self.path, dict(self.headers), json.loads(body), body))
                if hook.slowly is not None:
                    hook.slowly(self.wfile.write)
                    return
                self.send_response(hook.status)
                for name, value in {"Content-Length": str(len(hook.body)), **hook.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(hook.body)

            do_GET = do_POST  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Log nothing."""

        server_class = type(
            "Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET}
        )
        self._server = server_class((host, 0), Handler)
        self.port: int = self._server.server_address[1]
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

    def url(self, path: str = "/hooks/s3cr3t", host: str = "localhost") -> str:
        """Return the URL of the server. Its path is the secret."""
        return f"https://{host}:{self.port}{path}"

    def __enter__(self) -> "Webhook":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def trickle(pause: float = 0.3, most: float = 30) -> Callable[[Callable[[bytes], Any]], None]:
    """Return a function that writes an answer byte by byte with pauses, for ``most`` seconds."""

    def write(out: Callable[[bytes], Any]) -> None:
        until = time.monotonic() + most
        with suppress(OSError):
            out(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while time.monotonic() < until:
                out(b"x")
                time.sleep(pause)

    return write
