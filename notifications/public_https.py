"""Requests to addresses that owners enter: over HTTPS, only to public IP addresses, with a deadline.

Apprise's plugins call ``requests.post`` and similar functions. ``confine`` replaces ``requests`` in the plugin's module
by ``client``. Its adapter resolves the name once, checks the IP addresses and connects to them, so neither DNS
rebinding nor a redirect circumvents the check. The module ``requests`` itself is unchanged. The deadline and the size
limit of answers are in ``core/bounded_requests.py``.
"""

import ipaddress
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import requests
from django.conf import settings
from requests.adapters import BaseAdapter
from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPSConnectionPool
from urllib3.util.connection import create_connection

from core import bounded_requests

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Unreachable(Exception):
    """The host is not allowed, or cannot be reached. The text says why, without the address."""


Headers = Callable[[bytes], Mapping[str, str]]
"""Returns the headers to add to a request with this body."""


def _no_headers(content: bytes) -> Mapping[str, str]:
    return {}


class Attempt:
    """The result of the requests of one ``run_with_deadline`` call."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.status: int | None = None
        """The HTTP status of the last answer."""
        self.reason = ""
        """Why there was no answer."""


_attempt: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


def run_with_deadline(action: Callable[[], bool], headers: Headers = _no_headers) -> tuple[bool, Attempt]:
    """Run an action that sends requests through ``client``, and return its result and that of the requests.

    ``headers`` are added to each request.

    The call returns at the deadline of ``bounded_requests``, however slow the server is.
    """
    attempt = Attempt(headers)

    def run() -> bool:
        _attempt.set(attempt)
        return action()

    with bounded_requests.exchange() as exchange:
        try:
            return exchange.run(run), attempt
        except bounded_requests.Unusable as error:
            attempt.reason = attempt.reason or str(error)
        except Exception as error:  # the plugin failed on the answer, in any way
            attempt.reason = attempt.reason or f"the answer could not be read ({type(error).__name__})"
    return False, attempt


def is_public(text: str) -> bool:
    """Return whether this IP address is public. One that embeds an IPv4 address is if that is.

    Teredo addresses are not public. Versions of Python disagree on whether those of 6to4 are.
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        in_nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in NAT64 else None
        embedded = address.ipv4_mapped or address.sixtofour or in_nat64
        if embedded is None and address not in GLOBAL_UNICAST:
            return False
        address = embedded or address
    return address.is_global and not address.is_multicast and not address.is_reserved


def require_public_literal(host: str) -> None:
    """Raise Unreachable for a host that is a private IP address, in any notation, or a name of this machine.

    Other names are resolved only for a connection.
    """
    if settings.GUARDIAN_CHANNELS_MAY_BE_PRIVATE:
        return
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        raise Unreachable(NOT_PUBLIC)
    try:
        # Like a connection, this reads 2130706433, 0x7f.1 and 017700000001 as 127.0.0.1. It sends no DNS query.
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return
    if not all(is_public(str(one[4][0])) for one in found):
        raise Unreachable(NOT_PUBLIC)


NOT_PUBLIC = "it is a private address, and messages are sent to public ones only; an operator can allow private ones"


NOT_REACHED = "no server was reached at '{host}'; check its spelling, and that it answers at a public address"
"""Whether the name is unknown or private, or the connection is refused or times out: the difference would describe the
network that Guardian is in to anybody who may add a channel."""


class _Connection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        """Connect to one of the host's IP addresses, if all of them are allowed."""
        host, port, attempt = self._dns_host.strip("[]"), self.port or 443, _attempt.get()
        assert attempt is not None  # noqa: S101 - the client works in an attempt only
        attempt.reason = NOT_REACHED.format(host=host)
        not_reached = Unreachable(attempt.reason)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise not_reached from error
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not settings.GUARDIAN_CHANNELS_MAY_BE_PRIVATE and not all(map(is_public, addresses)):
            raise not_reached
        deadline = time.monotonic() + bounded_requests.CONNECT_SECONDS
        for address in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                connected = create_connection((address, port), left, socket_options=self.socket_options)
            except OSError:
                continue
            attempt.reason = ""
            bounded_requests.current().add_socket(connected)
            return connected
        raise not_reached


class _Pool(HTTPSConnectionPool):
    ConnectionCls = _Connection


class _Adapter(bounded_requests.Adapter):
    """Send one request over HTTPS, with the certificate verified and without a proxy.

    An answer that is too large is truncated: for most services only its status counts.
    """

    pools: Mapping[str, Any] = {"https": _Pool}

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
        assert attempt is not None  # noqa: S101 - the client works in an attempt only
        try:
            if not (request.url or "").lower().startswith("https://"):
                raise Unreachable("it leads to a plain http:// address, and messages are sent over HTTPS only")
            content = request.body or b""
            request.headers.update(attempt.headers(content if isinstance(content, bytes) else str(content).encode()))
            response = super().send(request, verify=verify or True)
        except Unreachable as error:
            attempt.reason = str(error)
            raise requests.ConnectionError("not reached") from error
        except requests.exceptions.SSLError:
            attempt.reason = "its certificate can't be verified; the host needs one from a trusted authority"
            raise
        except Exception as error:
            attempt.reason = attempt.reason or (
                bounded_requests.late()
                if isinstance(error, requests.Timeout) or bounded_requests.current().is_late
                else "the connection was closed, or isn't HTTPS"
            )
            raise requests.ConnectionError("no answer") from error
        attempt.status = response.status_code
        return response


class _Session(requests.Session):
    def get_adapter(self, url: str | bytes) -> BaseAdapter:
        return _Adapter()


class Client:
    """The part of ``requests`` that apprise's plugins use. A plugin that uses more fails.

    It works inside ``run_with_deadline`` only.
    """

    codes = requests.codes
    RequestException = requests.RequestException

    def request(self, method: str, url: str, **options: Any) -> requests.Response:
        with _Session() as session:
            session.trust_env = False  # credentials in a .netrc file are not for hosts that owners enter
            return session.request(method, url, **options)

    def get(self, url: str, **options: Any) -> requests.Response:
        return self.request("GET", url, **options)

    def post(self, url: str, data: Any = None, **options: Any) -> requests.Response:
        return self.request("POST", url, data=data, **options)

    def delete(self, url: str, **options: Any) -> requests.Response:
        return self.request("DELETE", url, **options)


client = Client()


def confine(plugin: object) -> None:
    """Make this plugin of apprise send all its requests through ``client``.

    Raises KeyError if the plugin's module does not use ``requests``.
    """
    names = vars(sys.modules[type(plugin).__module__])
    names["requests"]  # raises KeyError
    names["requests"] = client
