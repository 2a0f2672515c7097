"""How Guardian's settings are read from the environment and from ``.env``: literally, or not at all.

An empty value counts as not set. If a value can't be read, ``unreadable`` records why, and the setting has its default.
The system checks report it.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured
from environ import Env

from guardian_site import env_file

Value = TypeVar("Value")

unreadable: dict[str, str] = {}
"""Settings that can't be read, and the reasons. No reason contains a part of the value."""

IN_PASSWORDS = "In a user or password write @ as %40, / as %2F, ? as %3F, # as %23, % as %25 and a comma as %2C."

IMPLICIT_TLS_PORT = 465
STARTTLS_PORTS = (25, 587)

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on", "y", "ok"), True),
    **dict.fromkeys(("0", "false", "no", "off", "n"), False),
}


class Limits(NamedTuple):
    """The limits of a setting's value, which the system checks apply."""

    least: float = -math.inf
    most: float = math.inf
    schemes: Sequence[str] = ()
    choices: Sequence[str] = ()


declared: dict[str, Limits] = {}
"""Every setting that was read, with its limits."""


class Unreadable(ValueError):
    """A value can't be read. The text says why, without any part of the value."""


def load(path: Path) -> None:
    """Add the variables of a file to the environment, except those that it has."""
    file = env_file.parse(path)
    unreadable.update(file.errors)
    for name, value in file.variables.items():
        os.environ.setdefault(name, value)


def read(name: str, parse: Callable[[str], Value], default: str, **limits: Any) -> Value:
    """Return the value of a setting. ``limits`` are those of ``Limits``."""
    declared[name] = Limits(**limits)
    text = os.environ.get(name, "")
    try:
        if text != text.strip():
            raise Unreadable("it begins or ends with a blank or a line break")
        return parse(text or default)
    except (ValueError, ImproperlyConfigured) as error:
        unreadable[name] = _reason(name, error, parse)
        return parse(default)


def _reason(name: str, error: Exception, parse: Callable[[str], Any]) -> str:
    if isinstance(error, Unreadable):
        return str(error)
    # Other errors about a URL may quote a part of its password.
    return "it is not a valid URL" if name.endswith("_URL") else "write a whole number" if parse is int else str(error)


def flag(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise Unreadable("write true or false")
    return _WORDS[text.lower()]


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Unreadable("write a number")
    return value


def items(text: str) -> list[str]:
    """Return the items of a comma-separated list, without spaces around them."""
    return [item.strip() for item in text.split(",") if item]


def log_level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise Unreadable("write DEBUG, INFO, WARNING or ERROR")
    return text.upper()


def url(text: str) -> str:
    urlsplit(text)
    return text.rstrip("/")


def host_of(url: str) -> str:
    """Return a URL's host as in a Host header: an IPv6 address has brackets."""
    host = urlsplit(url).hostname or "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def database(text: str) -> dict[str, Any]:
    parts = urlsplit(text)
    engine = Env.DB_SCHEMES.get(parts.scheme)
    if engine not in ("django.db.backends.sqlite3", "django.db.backends.postgresql"):
        raise Unreadable("begin it with sqlite:/// or postgres://")
    if parts.fragment or "@" in parts.path + parts.query:
        raise Unreadable(f"it has a # or a late @. {IN_PASSWORDS}")
    if parts.scheme == "sqlite" and parts.netloc not in ("", ":memory:"):
        raise Unreadable("write three slashes, or four for an absolute path: sqlite:///guardian.sqlite3")
    settings: dict[str, Any] = Env.db_url_config(text.replace("+", "%2B"))  # it would read a + as a blank
    return settings


def mail_server(text: str) -> dict[str, Any]:
    parts = urlsplit(text)
    if parts.scheme == "smtps":  # django-environ would use STARTTLS
        text = f"smtp+ssl{text[len(parts.scheme) :]}"
    settings: dict[str, Any] = Env.email_url_config(text)
    if parts.scheme.startswith("smtp"):
        is_implicit = settings.get("EMAIL_USE_SSL", False)
        if not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
            raise Unreadable(f"write smtp://user:password@host:25, with nothing after the port. {IN_PASSWORDS}")
        if parts.port in STARTTLS_PORTS and is_implicit:
            raise Unreadable(f"a connection to port {parts.port} begins without TLS: write smtp+tls://")
        if parts.port == IMPLICIT_TLS_PORT and not is_implicit:
            raise Unreadable(f"a connection to port {parts.port} begins with TLS: write smtps://")
    return settings
