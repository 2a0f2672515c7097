"""Model fields for what the broker names: it allows NUL in names, which PostgreSQL can't store.

A NUL is stored as its symbol ␀, and ␀ and ␛ themselves after an escape character ␛. A name of up to 255 bytes stays
within 255 characters, because these two symbols take three bytes each.
"""

import re
from collections.abc import Callable
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

NUL, STORED_NUL, ESCAPE = "\0", "\N{SYMBOL FOR NULL}", "\N{SYMBOL FOR ESCAPE}"

_ENCODED = re.compile(f"[{NUL}{STORED_NUL}{ESCAPE}]")
_DECODED = re.compile(f"{ESCAPE}(.)|{STORED_NUL}", re.DOTALL)


def encode(text: str) -> str:
    """Return the text without NUL, for the database."""
    return _ENCODED.sub(lambda found: STORED_NUL if found[0] == NUL else ESCAPE + found[0], text)


def decode(stored: str) -> str:
    """Return the text that :func:`encode` got."""
    if STORED_NUL not in stored and ESCAPE not in stored:  # nearly always, and a pass reads each queue's names
        return stored
    return _DECODED.sub(lambda found: found[1] or NUL, stored)


class BrokerNameField(models.CharField):  # type: ignore[type-arg]
    """A name on the broker, which may contain NUL. The column is that of a ``CharField``, as migrations see it."""

    def deconstruct(self) -> Any:
        name, _, arguments, options = super().deconstruct()
        return name, "django.db.models.CharField", arguments, options

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        return encode(value) if isinstance(value, str) else value

    def from_db_value(self, value: str | None, expression: Any, connection: BaseDatabaseWrapper) -> str | None:
        return None if value is None else decode(value)


class BrokerJSONField(models.JSONField):
    """JSON with names and texts from the broker, which may contain NUL. The column is that of a ``JSONField``."""

    def deconstruct(self) -> Any:
        name, _, arguments, options = super().deconstruct()
        return name, "django.db.models.JSONField", arguments, options

    def get_prep_value(self, value: Any) -> Any:
        return _in_json(encode, super().get_prep_value(value))

    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> Any:
        return _in_json(decode, super().from_db_value(value, expression, connection))


def _in_json(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_in_json(change, key): _in_json(change, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(change, one) for one in value]
    return value
