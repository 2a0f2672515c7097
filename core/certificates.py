"""Which certificate authorities Guardian trusts: those of the system's store, or of the file in SSL_CERT_FILE.

Python's ``ssl`` uses them. ``requests`` has authorities of its own, so its sessions use ``SystemTrust``.
"""

import os
import ssl
from typing import Any

from requests.adapters import HTTPAdapter


class SystemTrust(HTTPAdapter):
    """An adapter that trusts the authorities of the system's store, too."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, ssl_context=ssl.create_default_context(), **kwargs)


def store_error() -> str:
    """Return why the file in SSL_CERT_FILE can't be used, or an empty text. OpenSSL reports no error."""
    file = os.environ.get("SSL_CERT_FILE")
    try:
        if file:
            ssl.create_default_context(cafile=file)
    except OSError as error:  # includes ssl.SSLError
        return f"SSL_CERT_FILE ({file}): {error.strerror or error}"
    return ""
