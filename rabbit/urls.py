"""Parsing of the broker's URLs. No error contains a part of a password."""

import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit


class Server(NamedTuple):
    """One address: ``http://host:port`` with the path, the path alone, and the user and the password."""

    base: str
    path: str
    credentials: tuple[str, str] | None


def read_server(url: str, form: str) -> Server:
    """Return the server at an HTTP URL, or raise ValueError with the ``form`` it must have."""
    parts = split_url(url, ("http", "https"), form)
    host = parts.hostname
    if not host or re.search(r"[\s%]", host):
        raise ValueError("it has no host; " + form)
    if parts.port == 0:
        raise ValueError("its port is not a number from 1 to 65535; " + form)
    if parts.query or parts.fragment or "@" in parts.path:
        raise ValueError("it has a '?', a '#' or an '@' after the host; in a password these are %3F, %23 and %40")
    if re.search(r"[^!-~]", parts.path):
        raise ValueError("its path has a character that is not allowed there; percent-encode it")
    credentials = None
    if parts.username is not None:
        credentials = unquote(parts.username), unquote(parts.password or "")
        try:
            "".join(credentials).encode()
        except UnicodeEncodeError:
            raise ValueError("its user or password is not UTF-8; percent-encode them as UTF-8") from None
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError("its host name is invalid; " + form) from None
    path = parts.path.rstrip("/")
    return Server(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}", path, credentials)


def split_url(url: str, schemes: Sequence[str], form: str) -> SplitResult:
    """Return the parts of a URL with one of these schemes, or raise ValueError with the ``form`` it must have."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # The text of this error, and of its cause, may contain the password.
        raise ValueError("it is not a URL, or its port is not a number from 1 to 65535; " + form) from None
    if parts.scheme not in schemes:
        raise ValueError(f"it doesn't start with {' or '.join(f'{scheme}://' for scheme in schemes)}; {form}")
    return parts
