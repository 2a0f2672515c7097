"""Addresses in settings."""

from urllib.parse import SplitResult, urlsplit


def split_address(url: str) -> SplitResult | None:
    """Return the parts of an address; None: it is none, and what is taken for its parts may be of a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    # A password with a slash in it ends the host for whoever reads the address, and goes on up to the @.
    return None if "@" in f"{parts.path}{parts.query}{parts.fragment}" else parts
