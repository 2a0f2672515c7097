"""Read an archive's messages by position and as JSON, and delete an archive."""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import transaction

from accounts import audit
from accounts.models import Owner
from queues.archives.chunks import unpack
from queues.models import Archive
from rabbit.fetching import Fetched

LOOKED_AT, DOWNLOADED = "viewed messages", "downloaded messages"
"""Entries of the audit trail."""


def delete(archive: Archive, by: Owner) -> None:
    """Delete an archive and its messages, and record who did it."""
    with transaction.atomic():
        audit.record(by, "deleted", [archive])
        archive.delete()


def messages(archive: Archive, first: int = 1, count: int | None = None) -> Iterator[tuple[int, Fetched]]:
    """Yield the messages from position ``first`` on, each with its position. Only the chunks they are in are read."""
    end = archive.messages + 1 if count is None else first + count
    chunks = archive.chunks.filter(first__lt=end).order_by("first")
    spans = chunks.values_list("first", "count")
    wanted = [start for start, length in spans if start + length > first]
    for start in wanted:
        chunk = archive.chunks.get(first=start)
        for position, message in enumerate(unpack(bytes(chunk.data)), start):
            if first <= position < end:
                yield position, message


def look(archive: Archive, by: Owner, first: int, count: int, action: str = LOOKED_AT) -> Iterator[tuple[int, Fetched]]:
    """Record who looks at these messages, and return them as ``messages`` does."""
    audit.record(by, action, [archive], first=first, count=max(0, min(count, archive.messages - first + 1)))
    return messages(archive, first, count)


def as_json(position: int, message: Fetched) -> dict[str, Any]:
    """Return a message as the REST API and the download have it.

    ``encoding`` tells what ``body`` is: a value of JSON, a text, or base64.
    """
    body, encoding = read_body(message.body)
    return {
        "position": position,
        "body": body,
        "encoding": encoding,
        "properties": _plain(message.properties),
        "headers": _plain(message.headers),
        "exchange": _plain(message.exchange),
        "routing_key": _plain(message.routing_key),
        "redelivered": message.redelivered,
    }


def read_body(body: bytes) -> tuple[Any, str]:
    """Return a body as a value of JSON, as text or in base64, and which of these: json, text or base64."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return base64.b64encode(body).decode(), "base64"
    if text[:1] in ("{", "["):
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # what it can't express is a text
            return value, "json"
        except (ValueError, RecursionError):
            pass
    return text, "text"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _plain(value: Any) -> Any:
    """Return a value of AMQP's types as one of JSON's."""
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, datetime):
        return value.isoformat() + "Z"
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
