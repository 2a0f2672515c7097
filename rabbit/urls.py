"""Parsing of the broker's URLs. No error contains a part of a password."""

from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit


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
