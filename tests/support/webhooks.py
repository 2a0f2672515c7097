"""HTTPS servers on this machine in place of chat services, with a certificate that a test can trust."""

import datetime
import ipaddress
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.recorder import Recorder


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


class Webhook(Recorder):
    """A server that receives messages, with TLS if it has a certificate."""

    def __init__(self, certificate: Path | None, host: str = "127.0.0.1") -> None:
        super().__init__(b"ok", certificate=certificate, host=host)
        self.headers = {}

    def url(self, path: str = "/hooks/s3cr3t", host: str = "localhost") -> str:
        """Return the URL of the server. Its path is the secret."""
        return f"https://{host}:{self.port}{path}"


def trickle(write: Callable[[bytes], Any]) -> None:
    """Write an answer byte by byte with pauses, for 30 seconds."""
    with suppress(OSError):
        write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        for _ in range(100):
            write(b"x")
            time.sleep(0.3)
