"""Reading the broker's URLs, without a word of their passwords in an error."""

from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit


def split_url(url: str, schemes: Sequence[str], form: str) -> SplitResult:
    """Return the parts of a URL with one of these schemes. ``form`` says in an error how to write one.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Its text may have the password in it, and so may its cause.
        raise ValueError("it is no URL, or its port is no number from 1 to 65535; " + form) from None
    if parts.scheme not in schemes:
        raise ValueError(f"it doesn't start with {' or '.join(f'{scheme}://' for scheme in schemes)}; {form}")
    return parts
