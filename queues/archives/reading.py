"""Read an archive's messages by position and as JSON, and delete an archive."""

import base64
import json
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from itertools import islice
from typing import Any

from django.db import transaction
from django.db.models import BinaryField
from django.db.models.functions import Substr

from accounts import audit
from accounts.models import Owner
from queues.archives.chunks import PIECE_BYTES, Stored, unpack, unpack_body
from queues.models import Archive
from rabbit.fetching import Fetched

PAGE_BYTES = 256 * 1024
"""A page of the API ends before the message with which its answer exceeds this size."""

MAX_BODY_BYTES = 1024 * 1024
"""The part of a body that is read to show it. The API omits longer bodies."""

MAX_TEXT_BYTES = 64 * 1024
"""A longer body is shown in base64: as JSON it would take up to 100 times its size of memory."""

MAX_HEADER_VALUES = 500
"""A message with more values in its headers is shown with its headers in base64, because decoding takes long."""

LOOKED_AT, DOWNLOADED = "viewed messages", "downloaded messages"
"""Entries of the audit trail."""


def delete(archive: Archive, by: Owner) -> None:
    """Delete an archive and its messages, and record who did it."""
    with transaction.atomic():
        audit.record(by, "deleted", [archive])
        archive.delete()


def messages(archive: Archive, first: int = 1, count: int | None = None) -> Iterator[tuple[int, Fetched]]:
    """Yield the messages from position ``first`` on, each with its position, whole."""
    for position, message in _stored(archive, first, count):
        yield position, message.decode()


def look(
    archive: Archive, by: Owner, first: int, count: int, action: str = LOOKED_AT, *, max_body: int = MAX_BODY_BYTES
) -> Iterator[tuple[int, Fetched]]:
    """Record who looks at these messages, and return them as they are shown: bodies are cut."""
    audit.record(by, action, [archive], first=first, count=max(0, min(count, archive.messages - first + 1)))
    return shown(archive, first, count, max_body)


def page(
    archive: Archive, by: Owner, messages: Iterable[tuple[int, Fetched]], first: int, count: int
) -> tuple[list[bytes], int | None]:
    """Record who looks at these messages, and return the first as JSON, and more while they have ``PAGE_BYTES``.

    There are at most ``count``. Also return the position of the message after which the page ends early, if it does.
    """
    found: list[bytes] = []
    size, last, ends_at = 0, first - 1, None
    for position, message in messages:
        line = json.dumps(as_json(position, message)).encode()
        size += len(line)
        if len(found) == count or (size > PAGE_BYTES and found):
            ends_at = last
            break
        found.append(line)
        last = position
    audit.record(by, LOOKED_AT, [archive], first=first, count=len(found))
    return found, ends_at


def shown(
    archive: Archive, first: int = 1, count: int | None = None, max_body: int = MAX_BODY_BYTES
) -> Iterator[tuple[int, Fetched]]:
    """Yield messages as they are shown: bodies are cut."""
    for position, message in _stored(archive, first, count, max_body):
        yield position, message.decode(MAX_HEADER_VALUES)


def body(archive: Archive, position: int) -> Iterator[bytes]:
    """Yield the whole body of a message in pieces."""
    start = archive.chunks.filter(first__lte=position).values_list("first", flat=True).latest("first")
    return unpack_body(_pieces(archive, start), position - start)


def _stored(
    archive: Archive, first: int, count: int | None, max_body: int | None = None
) -> Iterator[tuple[int, Stored]]:
    """Yield the messages from position ``first`` on, each with its position. Only the chunks they are in are read."""
    end = archive.messages + 1 if count is None else first + count
    chunks = archive.chunks.filter(first__lt=end).order_by("first")
    spans = chunks.values_list("first", "count")
    for start, stop in [(start, start + length) for start, length in spans if start + length > first]:
        found = islice(unpack(_pieces(archive, start), max_body), min(stop, end) - start)
        for position, message in enumerate(found, start):
            if position >= first:
                yield position, message


def _pieces(archive: Archive, start: int) -> Iterator[bytes]:
    """Yield the data of the chunk that starts at this position in pieces."""
    at, size = 1, PIECE_BYTES
    while True:
        piece = Substr("data", at, size, output_field=BinaryField())
        data = bytes(archive.chunks.filter(first=start).values_list(piece, flat=True).get())
        yield data
        if len(data) < size:
            return
        at, size = at + size, 4 * PIECE_BYTES


def as_json(position: int, message: Fetched) -> dict[str, Any]:
    """Return a message as the REST API and the download have it.

    ``encoding`` tells what ``body`` is: a value of JSON, a text, or base64; or omitted, because it is too long.
    """
    body, encoding = (None, "omitted") if message.cut else read_body(message.body)
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
        text = body.decode() if len(body) <= MAX_TEXT_BYTES else None
    except UnicodeDecodeError:
        text = None
    if text is None:
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
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, dict):
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
