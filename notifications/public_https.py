"""Requests to addresses that owners enter: over HTTPS, to public addresses only, finished within 12 seconds.

Apprise's plugins call ``requests.post`` and the like. ``confine`` puts ``client`` in the place of ``requests`` in the
plugin's own module, so that each of its requests goes through an adapter that checks the address it connects to, after
the name was resolved. A name that resolves to another address the second time, and a redirect, get no further. The
module ``requests`` itself stays as it is: sign-in by OpenID Connect uses it, too.
"""

import ipaddress
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any

import requests
from django.conf import settings
from requests.adapters import BaseAdapter, HTTPAdapter
from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPSConnectionPool
from urllib3.util.connection import create_connection

CONNECT_SECONDS = 4.0
READ_SECONDS = 8.0
MAX_RESPONSE_BYTES = 1024 * 1024
"""So much of an answer is read. What services answer has some hundred bytes."""

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Unreachable(Exception):
    """What was asked for isn't to be reached, or can't be; the text says why, without the address."""


class Attempt:
    """What became of the requests of one ``run_with_deadline`` call."""

    def __init__(self) -> None:
        self.status: int | None = None
        """The HTTP status of the last answer."""
        self.reason = ""
        """Why there was no answer."""
        self._over = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    def add_socket(self, connected: socket.socket) -> None:
        """Have this connection ended with the attempt."""
        with self._lock:
            if self._over:
                connected.close()
                raise Unreachable("it took too long")
            # TLS takes the socket over and leaves this object empty, hence a second one for the same connection.
            self._sockets.append(connected.dup())

    def end(self) -> None:
        """End its connections, and make no more."""
        with self._lock:
            self._over = True
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            self._sockets.clear()


_attempt: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


def run_with_deadline(action: Callable[[], bool]) -> tuple[bool, Attempt]:
    """Return the result of an action that sends requests through ``client``, and what became of them.

    It runs in a thread of its own, and returns within 12 seconds, however slow the other end is.
    """
    attempt = Attempt()
    done: list[bool] = []

    def act() -> None:
        _attempt.set(attempt)
        try:
            done.append(action())
        except Exception as error:  # whatever a service's code makes of an answer
            attempt.reason = attempt.reason or f"the answer can't be read ({type(error).__name__})"

    thread = threading.Thread(target=copy_context().run, args=(act,), daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS + READ_SECONDS)
    arrived = bool(done and done[0])  # asked before its connections are cut: a cut answer may look like a whole one
    if thread.is_alive():
        attempt.reason = f"no whole answer came within {CONNECT_SECONDS + READ_SECONDS:.0f} s"
    attempt.end()
    return arrived, attempt


def is_public(text: str) -> bool:
    """Return whether this IP address is one of the internet's, and leads to no other kind by way of a gateway."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return _is_global(address)
    if address.ipv4_mapped is not None:
        return _is_global(address.ipv4_mapped)
    if address in NAT64:
        return _is_global(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    wrapped = [address.sixtofour] if address.sixtofour else address.teredo or ()
    return address in GLOBAL_UNICAST and _is_global(address) and all(map(_is_global, wrapped))


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and not address.is_reserved


def require_public_literal(host: str) -> None:
    """Make sure that a host which is an IP address, in whatever notation, or this machine's own name, is public.

    Other names are looked up when they are connected to, and only then.

    Raises:
        Unreachable: it isn't.
    """
    if settings.GUARDIAN_CHANNELS_MAY_BE_PRIVATE:
        return
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        raise Unreachable(NOT_PUBLIC)
    try:
        # Takes 2130706433, 0x7f.1 and 017700000001 for 127.0.0.1, as connecting does, and asks nobody about a name.
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return
    if not all(is_public(str(one[4][0])) for one in found):
        raise Unreachable(NOT_PUBLIC)


NOT_PUBLIC = (
    "it is a private address, and messages go to public ones only; an operator can allow others "
    "with GUARDIAN_CHANNELS_MAY_BE_PRIVATE"
)


class _Connection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        """Connect to one of the host's addresses, if all of them are allowed."""
        host, port, attempt = self._dns_host.strip("[]"), self.port or 443, _attempt.get()
        assert attempt is not None  # noqa: S101 - there is no adapter of ours without
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"there is no host '{host}'; see that it is spelt right") from error
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not settings.GUARDIAN_CHANNELS_MAY_BE_PRIVATE and not all(map(is_public, addresses)):
            raise Unreachable(NOT_PUBLIC)
        until = time.monotonic() + CONNECT_SECONDS
        failure: OSError | None = None
        for address in addresses:
            left = until - time.monotonic()
            if left <= 0:
                break
            try:
                connected = create_connection((address, port), left, socket_options=self.socket_options)
            except OSError as error:
                failure = error
            else:
                attempt.add_socket(connected)
                return connected
        why = "nobody answers there" if failure is None or isinstance(failure, TimeoutError) else failure.strerror
        raise Unreachable(f"'{host}' can't be connected to ({why})")


class _Pool(HTTPSConnectionPool):
    ConnectionCls = _Connection


class _Adapter(HTTPAdapter):
    """Sends one request over HTTPS, with the certificate verified and without a proxy."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"https": _Pool}

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        attempt = _attempt.get()
        assert attempt is not None  # noqa: S101 - there is no adapter of ours without
        try:
            if not (request.url or "").lower().startswith("https://"):
                raise Unreachable("it leads to a plain http:// address, and messages go over https:// only")
            response = super().send(
                request, stream=True, timeout=(CONNECT_SECONDS, READ_SECONDS), verify=verify or True
            )
            # An answer without an end, or one that grows when it is unpacked, must not fill the memory.
            content = response.raw.read(MAX_RESPONSE_BYTES, decode_content=True)
        except Unreachable as error:
            attempt.reason = str(error)
            raise requests.ConnectionError("not reached") from error
        except requests.exceptions.SSLError:
            attempt.reason = "its certificate can't be verified; the host needs one of a known authority"
            raise
        except Exception as error:
            timed_out = isinstance(error, requests.Timeout)
            attempt.reason = attempt.reason or (
                f"no answer came within {READ_SECONDS:.0f} s" if timed_out else "the connection was cut, or isn't HTTPS"
            )
            raise requests.ConnectionError("no answer") from error
        finally:
            self.close()
        response._content, response._content_consumed = content, True
        attempt.status = response.status_code
        return response


class _Session(requests.Session):
    def get_adapter(self, url: str | bytes) -> BaseAdapter:
        return _Adapter()


class Client:
    """What apprise's plugins use of ``requests``; the rest is missing, so that a plugin which uses more fails.

    It works inside ``run_with_deadline`` only.
    """

    codes = requests.codes
    RequestException = requests.RequestException

    def request(self, method: str, url: str, **options: Any) -> requests.Response:
        """Send a request, and return the answer."""
        with _Session() as session:
            return session.request(method, url, **options)

    def get(self, url: str, **options: Any) -> requests.Response:
        """Send a GET request, and return the answer."""
        return self.request("GET", url, **options)

    def post(self, url: str, data: Any = None, **options: Any) -> requests.Response:
        """Send a POST request, and return the answer."""
        return self.request("POST", url, data=data, **options)


client = Client()


def confine(plugin: object) -> None:
    """Have this plugin of apprise send all its requests through ``client``.

    Raises:
        KeyError: the plugin's module does not use ``requests``.
    """
    names = vars(sys.modules[type(plugin).__module__])
    names["requests"]  # it would send by something else
    names["requests"] = client


def _is_not_ours(_: logging.LogRecord) -> bool:
    return _attempt.get() is None


# At DEBUG, urllib3 logs the paths that are asked for. Those of webhooks are secrets.
logging.getLogger("urllib3.connectionpool").addFilter(_is_not_ours)
