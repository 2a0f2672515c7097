"""Read and parse the bodies and queries of API requests.

The functions raise ``Invalid`` for the field that is invalid, ``query`` or ``body``. Those that read a body also raise
the errors of ``body``.
"""

import base64
import binascii
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from django.utils.http import parse_etags

from core import body_timeout
from message_store.parameters import (
    GIVEN_TWICE,
    MAX_PARTITIONS,
    REQUIRED,
    Invalid,
    collect_error,
    parse_number,
    readable_text,
)
from message_store.queues import MAX_BATCH, MessageInput, check_name
from rabbit.names import readable

MAX_FORM_BYTES = 64 * 1024
"""The limit of bodies without messages: forms and positions."""

MAX_LEASE_SECONDS = 3600
MAX_BEATS = 2**63 - 1

MAX_DISCARDED_BYTES = 8 * 1024 * 1024
"""A body that exceeds its limit by more is refused unread."""
DISCARD_SECONDS = 2.0

BASE64 = "base64"
"""The value of the field ``encoding`` for binary bodies."""

_CHUNK_BYTES = 64 * 1024
_FORM = "application/x-www-form-urlencoded"
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_WORKER_ID = re.compile(r"[0-9a-f]{32}")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class BodyTooLarge(Exception):
    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"More bytes than maximum value {max_bytes}")


class BodyTooSlow(Exception):
    """A body did not arrive within ``BODY_SECONDS``."""

    def __init__(self) -> None:
        super().__init__(f"Not received within {body_timeout.BODY_SECONDS:g} seconds")


class LengthRequired(Exception):
    """The end of the body can't be determined."""


def body(request: HttpRequest, max_bytes: int | None = None) -> bytes:
    """Return the body of a request, up to a limit, whatever its Content-Length says.

    The default limit is ``MESSAGE_STORE_MAX_BODY``. Raises BodyTooLarge, BodyTooSlow and LengthRequired.
    """
    max_bytes = settings.MESSAGE_STORE_MAX_BODY if max_bytes is None else max_bytes
    stream: Any = request
    length: int | None = _length(request)
    if "HTTP_TRANSFER_ENCODING" in request.META:
        # Django itself only supports Content-Length.
        if not request.META.get("wsgi.input_terminated"):
            raise LengthRequired
        stream, length = request.META["wsgi.input"], None
    if length == 0:
        return b""
    if length is not None and length > max_bytes:
        if length <= max_bytes + MAX_DISCARDED_BYTES:
            _discard(request, length)
        raise BodyTooLarge(max_bytes)
    with body_timeout.limit_body_time(request.META.get("gunicorn.socket")) as is_late:
        try:
            read = _read(stream, max_bytes + 1 if length is None else length)
        except Exception as error:  # servers raise different errors for broken connections and invalid chunks
            raise BodyTooSlow if is_late() else Invalid({"body": "The body is incomplete"}) from error
        if is_late():
            raise BodyTooSlow
    if len(read) > max_bytes:
        raise BodyTooLarge(max_bytes)
    if length is not None and len(read) < length:
        raise Invalid({"body": "The body is incomplete"})
    return read


def _discard(request: HttpRequest, length: int) -> None:
    """Read a body that is refused. A proxy that can't send all of it answers 502 in place of the refusal."""
    with body_timeout.limit_body_time(request.META.get("gunicorn.socket"), DISCARD_SECONDS), suppress(Exception):
        while length > 0 and (chunk := request.read(min(_CHUNK_BYTES, length))):
            length -= len(chunk)


def form(request: HttpRequest) -> dict[str, str]:
    """Return the fields of a form-encoded body. Each may be given once."""
    data = body(request, MAX_FORM_BYTES)
    if not data:
        return {}
    if request.content_type == "multipart/form-data":
        return _multipart(request, data)
    if request.content_type not in ("", _FORM, "application/octet-stream", "text/plain"):
        raise Invalid({"body": f"Must be {_FORM}"})
    return _fields(data)


def query(request: HttpRequest) -> dict[str, str]:
    """Return the parameters of a request's query. Each may be given once."""
    text = str(request.META.get("QUERY_STRING", ""))
    return _fields(text.encode("latin-1", "replace"), "query") if text else {}


def positions(request: HttpRequest) -> dict[str, Any]:
    """Return positions by partition from a form or a JSON object."""
    return json_object(request) if request.content_type == "application/json" else dict(form(request))


def json_object(request: HttpRequest) -> dict[str, Any]:
    found = _json(body(request, MAX_FORM_BYTES))
    if not isinstance(found, dict):
        raise Invalid({"body": "Must be an object"})
    return found


def worker(consumer: str, worker_id: str) -> tuple[str, uuid.UUID]:
    errors: dict[str, str] = {}
    collect_error(errors, "consumer", lambda: check_name(consumer))
    if not _WORKER_ID.fullmatch(worker_id):
        errors["worker"] = "Must be a UUID in 32 hex digits"
    if errors:
        raise Invalid(errors)
    return consumer, uuid.UUID(worker_id)


def lease_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= MAX_LEASE_SECONDS:
        raise Invalid({"seconds": f"Must be a number from 1 to {MAX_LEASE_SECONDS}"})
    return seconds


def beats(text: str | None) -> int | None:
    try:
        return parse_number(text, 0, MAX_BEATS) if text else None
    except ValueError as error:
        raise Invalid({"beats": str(error)}) from None


def partitions(given: Mapping[str, Any], field: str) -> list[tuple[str, int]]:
    """Return the partitions that a field lists by queue, as in ``{"orders": [1, 2]}``."""
    by_queue = given.get(field, {})
    if not isinstance(by_queue, dict) or not all(isinstance(numbers, list) for numbers in by_queue.values()):
        raise Invalid({field: "Must be an object with a list of partitions for each queue"})
    try:
        for queue in by_queue:
            check_name(queue)
        return [(queue, parse_number(one, 1, MAX_PARTITIONS)) for queue, some in by_queue.items() for one in some]
    except ValueError as error:
        raise Invalid({field: str(error)}) from None


def batch(request: HttpRequest) -> tuple[list[MessageInput | None], dict[str, str]]:
    """Return the messages of a JSON body and their errors by ``index.field``. An invalid message is None."""
    data = body(request)
    if not data:
        raise Invalid({"body": REQUIRED})
    found = _json(data)
    if not isinstance(found, dict):
        raise Invalid({"body": "Must be an object with a list of messages"})
    messages = found.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Invalid({"messages": REQUIRED if not messages else "Must be a list"})
    if len(messages) > MAX_BATCH:
        raise Invalid({"messages": f"{len(messages)} messages are more than {MAX_BATCH}"})
    entries: list[MessageInput | None] = []
    errors: dict[str, str] = {}
    for index, message in enumerate(messages):
        try:
            entries.append(_entry(message))
        except Invalid as invalid:
            entries.append(None)
            errors.update({f"{index}.{field}" if field else str(index): why for field, why in invalid.errors.items()})
    return entries, errors


def flag(fields: Mapping[str, str], name: str) -> bool:
    """Return the value of a boolean field; False without the field."""
    value = fields.get(name, "").lower()
    if value in _TRUE:
        return True
    if value in _FALSE or not value:
        return False
    raise Invalid({name: f'"{readable(value[:50])}" is not one of true, false'})


def _entry(message: Any) -> MessageInput:
    """Parse a message of a batch. The field of an error is empty if the message is not an object."""
    if not isinstance(message, dict):
        raise Invalid({"": "Must be an object"})
    text, encoding, kind = message.get("body"), message.get("encoding"), message.get("content_type")
    if text is None or text == "":
        raise Invalid({"body": REQUIRED})
    if not isinstance(text, str):
        raise Invalid({"body": "Must be text"})
    if kind is not None and not isinstance(kind, str):
        raise Invalid({"content_type": "Must be text"})
    if encoding not in (None, BASE64):
        raise Invalid({"encoding": f'"{readable_text(encoding)}" is not one of {BASE64}'})
    try:
        content = base64.b64decode(text, validate=True) if encoding else text.encode()
    except (binascii.Error, ValueError):
        raise Invalid({"body": "Not valid base64"}) from None
    return MessageInput(content, _value(message, "ttl"), _value(message, "partition"), kind or "")


def _value(message: Mapping[str, Any], name: str) -> Any:
    value = message.get(name)
    return None if value == "" else value


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Invalid({"body": f"Invalid JSON: {str(error)[:100]}"}) from None


def _fields(data: bytes, where: str = "body") -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in data.split(b"&"):
        name, _, value = part.partition(b"=")
        if name:
            key = _decoded(name, where, where)
            if key in fields:
                raise Invalid({readable(key[:50]): GIVEN_TWICE})
            fields[key] = _decoded(value, readable(key[:50]), where)
    return fields


def _decoded(part: bytes, field: str, where: str) -> str:
    try:
        text = part.decode()
        if _BAD_ESCAPE.search(text):
            raise Invalid({field: "Write % as %25"})
        return unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeDecodeError:
        raise Invalid({field: "Not valid UTF-8"}) from None


def _multipart(request: HttpRequest, data: bytes) -> dict[str, str]:
    meta = {**request.META, "CONTENT_LENGTH": len(data)}
    try:
        fields, _ = MultiPartParser(meta, BytesIO(data), [], "utf-8").parse()
    except (MultiPartParserError, SuspiciousOperation, TypeError, ValueError) as error:
        raise Invalid({"body": f"Unreadable: {readable(str(error)[:100])}"}) from None
    for name, values in fields.lists():
        if len(values) > 1:
            raise Invalid({readable(name[:50]): GIVEN_TWICE})
    return {name: str(value) for name, value in fields.items()}


def _length(request: HttpRequest) -> int:
    try:
        return max(0, int(request.META.get("CONTENT_LENGTH") or 0))
    except ValueError:
        return 0


def _read(stream: Any, length: int) -> bytes:
    chunks = []
    while length > 0 and (chunk := stream.read(min(_CHUNK_BYTES, length))):
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def versions(request: HttpRequest) -> list[str] | None:
    """Return the versions of positions in If-Match, or None for any. A proxy that compresses makes a tag weak."""
    tags = parse_etags(request.headers.get("If-Match", "*"))
    return None if "*" in tags else [tag.removeprefix("W/").strip('"') for tag in tags]


def message_input(request: HttpRequest) -> MessageInput:
    headers = request.META
    ttl, partition = headers.get("HTTP_X_TTL") or None, headers.get("HTTP_X_PARTITION") or None
    return MessageInput(body(request), ttl, partition, str(headers.get("CONTENT_TYPE", "")))
