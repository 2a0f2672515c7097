"""How settings are read from the environment and from ``.env``: literally, or not at all.

If a value can't be read, ``unreadable`` records why, and the setting has its default. The system checks report it.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import environ
from django.core.exceptions import ImproperlyConfigured

from guardian_site import env_file

unreadable: dict[str, str] = {}
"""Settings that can't be read, and the reasons. No reason contains a part of the value."""

IN_PASSWORDS = "In a user or password write @ as %40, / as %2F, ? as %3F, # as %23, % as %25 and a comma as %2C."

IMPLICIT_TLS_PORT = 465
STARTTLS_PORTS = (25, 587)

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on", "y", "ok"), True),
    **dict.fromkeys(("0", "false", "no", "off", "n", ""), False),
}
_REMEDIES: dict[Any, str] = {int: "write a whole number", float: "write a number", bool: "write true or false"}


class Unreadable(ValueError):
    """A value can't be read. The text says why, without any part of the value."""


def load(path: Path) -> None:
    """Add the variables of a file to the environment, except those that it has."""
    file = env_file.parse(path)
    unreadable.update(file.errors)
    for name, value in file.variables.items():
        os.environ.setdefault(name, value)


class Environment(environ.Env):  # type: ignore[misc]  # it has no type hints
    """The variables of the environment. django-environ would read another variable for a value that begins with $."""

    def get_value(self, var: str, cast: Any = None, default: Any = None, parse_default: bool = False) -> Any:
        """Return a variable as this type, or the default if there is none, or it can't be read."""
        text = os.environ.get(var)
        if text is None:
            return super().get_value(var, cast=cast, default=default, parse_default=parse_default)
        try:
            if text != text.strip():
                raise Unreadable("it begins or ends with a blank or a line break")
            return _parse(text, cast)
        except ValueError as error:
            unreadable[var] = _reason(var, error, cast)
            return default


def _parse(text: str, cast: Any) -> Any:
    if cast is bool:
        if text.lower() not in _WORDS:
            raise ValueError
        return _WORDS[text.lower()]
    if cast is float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    return environ.Env.parse_value(text, cast)


def _reason(name: str, error: Exception, cast: Any = None) -> str:
    if isinstance(error, Unreadable):
        return str(error)
    # Other errors about a URL may quote a part of its password.
    return "it is not a valid URL" if name.endswith("_URL") else _REMEDIES.get(cast) or str(error)


env = Environment()


def read(name: str, cast: Callable[..., Any], default: Any) -> Any:
    """Return a setting. ``cast`` is one of ``env``'s methods, or one of the functions below."""
    try:
        return cast(name, default=default)
    except (ValueError, ImproperlyConfigured) as error:
        unreadable[name] = _reason(name, error)
        return cast("NO_SUCH_SETTING", default=default)


def items(name: str, default: list[str]) -> list[str]:
    """Return the items of a comma-separated setting, without spaces around them."""
    return [item.strip() for item in env.list(name, default=default)]


def log_level(name: str, default: str) -> str:
    """Return the name of a log level."""
    value: str = env.str(name, default=default).upper()
    if value not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise Unreadable("write DEBUG, INFO, WARNING or ERROR")
    return value


def url(name: str, default: str) -> str:
    """Return a URL without a trailing slash."""
    value: str = env.str(name, default=default).rstrip("/")
    urlsplit(value)
    return value


def host_of(url: str) -> str:
    """Return a URL's host as in a Host header: an IPv6 address has brackets."""
    host = urlsplit(url).hostname or "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def database(name: str, default: str) -> dict[str, Any]:
    """Return Django's settings for a database's URL."""
    text: str = env.str(name, default=default)
    parts = urlsplit(text)
    engine = env.DB_SCHEMES.get(parts.scheme)
    if engine not in ("django.db.backends.sqlite3", "django.db.backends.postgresql"):
        raise Unreadable("begin it with sqlite:/// or postgres://")
    if parts.fragment or "@" in parts.path + parts.query:
        raise Unreadable(f"it has a # or a late @. {IN_PASSWORDS}")
    if parts.scheme == "sqlite" and parts.netloc not in ("", ":memory:"):
        raise Unreadable("write three slashes, or four for an absolute path: sqlite:///guardian.sqlite3")
    settings: dict[str, Any] = env.db_url_config(text.replace("+", "%2B"))  # it would read a + as a blank
    return settings


def mail_server(name: str, default: str) -> dict[str, Any]:
    """Return Django's settings for a mail server's URL."""
    text: str = env.str(name, default=default)
    parts = urlsplit(text)
    if parts.scheme == "smtps":  # django-environ would use STARTTLS
        text = f"smtp+ssl{text[len(parts.scheme) :]}"
    settings: dict[str, Any] = env.email_url_config(text)
    if parts.scheme.startswith("smtp"):
        is_implicit = settings.get("EMAIL_USE_SSL", False)
        if not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
            raise Unreadable(f"write smtp://user:password@host:25, with nothing after the port. {IN_PASSWORDS}")
        if parts.port in STARTTLS_PORTS and is_implicit:
            raise Unreadable(f"a connection to port {parts.port} begins without TLS: write smtp+tls://")
        if parts.port == IMPLICIT_TLS_PORT and not is_implicit:
            raise Unreadable(f"a connection to port {parts.port} begins with TLS: write smtps://")
    return settings
