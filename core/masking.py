"""Masking of secrets in texts: passwords, tokens, links that sign in."""

import re
from collections.abc import Callable
from typing import Any

_NAMES = (
    r"passw(?:or)?d|passcode|pwd|secret|secret_key|api[_-]?key|access_key|[_-]token|token(?=\\?[\"'=])|sessionid"
    r"|csrftoken"
)
"""What a field with a secret in it is called, or ends with."""

_NAME = re.compile(rf"(?:{_NAMES}|token)$", re.IGNORECASE)


def _in_address(found: re.Match[str]) -> str:
    return "://".join(map(_without_credentials, found[0].split("://")))


def _without_credentials(address: str) -> str:
    """Return what follows the :// of an address without its password, and without its user where that may be a key."""
    place = _PLACE.match(address)
    end = place.end() if place else 0
    host = address.rfind("@", 0, end)
    if host < 0 and _NO_PORT.search(address, 0, end):
        host = address.rfind("@")  # what looks like the host and its path is a password with a slash in it
    if host < 0:
        return address
    user, colon, _ = address[:host].partition(":")
    return f"{user if colon else ''}{colon}…{address[host:]}"


_PLACE = re.compile(r"[^/?#]*")

_NO_PORT = re.compile(r"^(?!\[)(?:[^:]+:(?!\d*$)|:)")

# Each of these looks at a character a fixed number of times, however long the text is and whatever it is made of.
_SECRETS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # A link that signs in or confirms an address: whoever has it can use it.
    (re.compile(r"(/signin/link/|/addresses/)[^/\s\"'<>]+"), r"\1…"),
    # The user and the password of an address. The host begins after the last @ before its path.
    (re.compile(r"://[^\s\"<>]+"), _in_address),
    # A token of the REST API, also as the password of an agent's login.
    (re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{64}(?![0-9A-Za-z])"), "…"),
    (re.compile(r"\b(token|bearer|basic)( {1,4})[A-Za-z0-9+/=._~-]{16,}", re.IGNORECASE), r"\1\2…"),
    # A value by the name of its field: in a query, in JSON, in what Python prints. A quoted one goes to its closing
    # quote, or to the end of the line; one whose quotes are escaped, as of JSON in JSON, to the next that is as they.
    (
        re.compile(
            rf"({_NAMES})"
            r"((?:\\?[\"'])?\s?[=:]\s?)"
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
    (re.compile(r"([?&](?:code|state|token|key)=)[^\s\"'&#]+"), r"\1…"),
)


def mask_secrets(text: str) -> str:
    """Return a text without what is secret in it, whoever wrote it: passwords, tokens, links that sign in."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def mask_all_secrets(value: Any) -> Any:
    """Return a value without what is secret in it, by the names in it and in its texts, however deep they are."""
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
