"""Masking of secrets in texts: passwords, tokens, links that sign in."""

import re
from collections.abc import Callable
from typing import Any

_NAMES = (
    r"passw(?:or)?d|passcode|pwd|secret|secret_key|api[_-]?key|access_key|[_-]token|token(?=\\?[\"'=])|sessionid"
    r"|csrftoken"
)
"""Names of fields with a secret, or the ends of such names."""

_NAME = re.compile(rf"(?:{_NAMES}|token|authorization)$", re.IGNORECASE)


def _in_address(found: re.Match[str]) -> str:
    return "://".join(map(_without_credentials, found[0].split("://")))


def _without_credentials(address: str) -> str:
    """Return the part of a URL after :// without its password. A user without a password may be a key: mask it too."""
    authority = _AUTHORITY.match(address)
    end = authority.end() if authority else 0
    at = address.rfind("@", 0, end)
    if at < 0 and _NO_PORT.search(address, 0, end):
        at = address.rfind("@")  # the password contains a slash, so the authority seems to end there
    if at < 0:
        return address
    user, colon, _ = address[:at].partition(":")
    return f"{user if colon else ''}{colon}…{address[at:]}"


_AUTHORITY = re.compile(r"[^/?#]*")

_NO_PORT = re.compile(r"^(?!\[)(?:[^:]+:(?!\d*$)|:)")

# These expressions take linear time for any text.
_SECRETS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # Links that sign in or confirm an address work for everybody who has them.
    (re.compile(r"(/signin/link/|/addresses/)[^/\s\"'<>]+"), r"\1…"),
    # The user and the password in a URL. The host begins after the last @ before the path.
    (re.compile(r"://[^\s\"<>]+"), _in_address),
    # A token of the REST API, which is also the password of an agent's login.
    (re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{64}(?![0-9A-Za-z])"), "…"),
    (re.compile(r"\b(token|bearer|basic)( {1,4})[A-Za-z0-9+/=._~-]{16,}", re.IGNORECASE), r"\1\2…"),
    (re.compile(r"(authorization[\"']?\s?[=:]\s?[\"']?[a-z]{1,20} {1,4})[^\s\"',]+", re.IGNORECASE), r"\1…"),
    # The value of a named field in a query, in JSON or in a Python repr. A quoted value ends at its closing quote or at
    # the end of the line; a value in escaped quotes, as of JSON in JSON, ends at the next escaped quote.
    (
        re.compile(
            rf"({_NAMES})"
            r"((?:\\?[\"'])?\s?[=:]\s?(?:b(?=[\"']))?)"
            r"(?:"
            r"(\\\")(?:[^\"\\\n]+|\\\\(?:\\[^\n])?|\\[^\"\\\n])*"
            r"|(\")(?:[^\"\\\n]+|\\[^\n])*"
            r"|(')(?:[^'\\\n]+|\\[^\n])*"
            r"|[^\s\"'&,;]+"
            r")",
            re.IGNORECASE,
        ),
        lambda found: f"{found[1]}{found[2]}{found[3] or found[4] or found[5] or ''}…",
    ),
    (re.compile(r"([?&](?:code|state|token|key|sig)=)[^\s\"'&#]+"), r"\1…"),
)


def mask_secrets(text: str) -> str:
    """Return a text with its passwords, tokens and links that sign in masked."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def mask_all_secrets(value: Any) -> Any:
    """Return a value with its secrets masked, at any depth: in its texts, and by the names of its fields."""
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {
            key: "…" if inner and isinstance(key, str) and _NAME.search(key) else mask_all_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_all_secrets(inner) for inner in value]
    return value


def text_of(error: Exception) -> str:
    """Return an error's text. A ValueError may quote a part of a password, so its text is replaced."""
    quotes_value = isinstance(error, ValueError) and not isinstance(error, OSError)
    return "it can't be read" if quotes_value else str(error)
