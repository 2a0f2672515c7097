"""URLs and hosts."""

import ipaddress
import unicodedata
from urllib.parse import SplitResult, urlsplit

import idna

MAX_DOMAIN_LENGTH = 253


def split_address(url: str) -> SplitResult | None:
    """Return the parts of a URL, or None if it is invalid: any part may then contain a piece of a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    # An unescaped slash in a password ends the host too early, and the @ is then in the path.
    return None if "@" in f"{parts.path}{parts.query}{parts.fragment}" else parts


def ascii_domain(domain: str) -> str:
    """Return a domain in lower case and in IDNA's ASCII form, such as xn--exmple-cua.org for exämple.org.

    A domain without such a form stays outside ASCII.
    """
    domain = unicodedata.normalize("NFC", domain.lower())
    if domain.isascii() or len(domain) > MAX_DOMAIN_LENGTH:
        return domain
    try:
        # IDNA 2008, as in browsers and registries: by the rules of 2003, Python's, straße.de is strasse.de.
        return idna.encode(domain).decode()
    except UnicodeError:
        return domain


def is_loopback(host: str) -> bool:
    """Return whether a host, as a name or an IP address, is this machine's."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
