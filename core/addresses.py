"""URLs and hosts."""

import ipaddress
from urllib.parse import SplitResult, urlsplit


def split_address(url: str) -> SplitResult | None:
    """Return the parts of a URL, or None if it is invalid: any part may then contain a piece of a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    # An unescaped slash in a password ends the host too early, and the @ is then in the path.
    return None if "@" in f"{parts.path}{parts.query}{parts.fragment}" else parts


def is_loopback(host: str) -> bool:
    """Return whether a host, as a name or an IP address, is this machine's."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
