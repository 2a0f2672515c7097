"""What a request to the API brings: its body, within bounds, and what is in it."""

import base64
import binascii
import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from core.body_timeout import limit_body_time
from message_store.queues import MAX_BATCH, REQUIRED, Invalid, MessageInput
from rabbit.names import readable

MAX_FORM_BYTES = 64 * 1024
"""Bytes of what is no message: a form, or positions."""

BASE64 = "base64"
"""What ``encoding`` says of a body that isn't text."""

_PIECE = 64 * 1024
_FORM = "application/x-www-form-urlencoded"
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class BodyTooLarge(Exception):
    """A body has more bytes than it may have, which its ``args`` say."""


class BodyTooSlow(Exception):
    """A body didn't come in within ``BODY_SECONDS``."""


class LengthRequired(Exception):
    """Nobody knows where the body ends."""


def content_type(request: HttpRequest) -> str:
    """Return the content type of a request as it was sent; empty where it has none."""
    return str(request.META.get("CONTENT_TYPE", ""))


def media_type(request: HttpRequest) -> str:
    """Return the content type of a request without its parameters, in lower case."""
    return content_type(request).partition(";")[0].strip().lower()


def body(request: HttpRequest, most: int | None = None) -> bytes:
    """Return the body of a request; without ``most``, of as many bytes as a message, or a batch, may have.

    Raises:
        BodyTooLarge: it has more than that, whatever its Content-Length says.
        BodyTooSlow: it takes too long to come in.
        LengthRequired: it comes in pieces, and the server doesn't say where it ends.
        Invalid: it broke off before its end; of the field ``body``.
    """
    most = settings.MESSAGE_STORE_MAX_BODY if most is None else most
    stream: Any = request
    length: int | None = _length(request)
    if "HTTP_TRANSFER_ENCODING" in request.META:
        # Django reads by the Content-Length alone.
        if not request.META.get("wsgi.input_terminated"):
            raise LengthRequired
        stream, length = request.META["wsgi.input"], None
    if length == 0:
        return b""
    if length is not None and length > most:
        raise BodyTooLarge(most)
    with limit_body_time(request.META.get("gunicorn.socket")) as is_late:
        try:
            read = _read(stream, most + 1 if length is None else length)
        except Exception as error:  # whatever the server raises where a connection breaks, or a piece is none
            raise BodyTooSlow if is_late() else Invalid({"body": "It broke off"}) from error
        if is_late():
            raise BodyTooSlow
    if len(read) > most:
        raise BodyTooLarge(most)
    if length is not None and len(read) < length:
        raise Invalid({"body": "It broke off"})
    return read


def form(request: HttpRequest) -> dict[str, str]:
    """Return the fields of a body that is form-encoded; of several with one name the last.

    Raises:
        BodyTooLarge, BodyTooSlow, LengthRequired, Invalid: as ``body``.
    """
    kind = media_type(request)
    data = body(request, MAX_FORM_BYTES)
    if not data:
        return {}
    if kind == "multipart/form-data":
        return _multipart(request, data)
    if kind not in ("", _FORM, "application/octet-stream", "text/plain"):
        raise Invalid({"body": f"It has to be {_FORM}"})
    return _fields(data)


def query(request: HttpRequest) -> dict[str, str]:
    """Return the fields of the query of a request; of several with one name the last.

    Raises:
        Invalid: it isn't form-encoded; of the field ``query``.
    """
    text = str(request.META.get("QUERY_STRING", ""))
    return _fields(text.encode("latin-1", "replace"), "query") if text else {}


def positions(request: HttpRequest) -> dict[str, Any]:
    """Return the positions of a body, by partition: of a form, or of an object in JSON.

    Raises:
        BodyTooLarge, BodyTooSlow, LengthRequired, Invalid: as ``body``.
    """
    if media_type(request) != "application/json":
        return dict(form(request))
    found = _json(body(request, MAX_FORM_BYTES))
    if not isinstance(found, dict):
        raise Invalid({"body": "It has to be an object"})
    return found


def batch(request: HttpRequest) -> tuple[list[MessageInput | None], dict[str, str]]:
    """Return the messages of a body in JSON, and what is wrong with those that are None, by ``index.field``.

    Raises:
        BodyTooLarge, BodyTooSlow, LengthRequired, Invalid: as ``body``; or it is no batch at all, of ``body`` or ``messages``.
    """
    data = body(request)
    if not data:
        raise Invalid({"body": REQUIRED})
    found = _json(data)
    if not isinstance(found, dict):
        raise Invalid({"body": "It has to be an object with a list of messages"})
    messages = found.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Invalid({"messages": REQUIRED if not messages else "It has to be a list"})
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
    """Return whether a field says yes; not where it isn't there.

    Raises:
        Invalid: it says something else than yes or no.
    """
    said = fields.get(name, "").lower()
    if said in _TRUE:
        return True
    if said in _FALSE or not said:
        return False
    raise Invalid({name: f'"{readable(said[:50])}" is not one of true, false'})


def _entry(message: Any) -> MessageInput:
    """Return a message of a batch.

    Raises:
        Invalid: it is none; of its fields, or of the field without a name.
    """
    if not isinstance(message, dict):
        raise Invalid({"": "It has to be an object"})
    text, encoding, kind = message.get("body"), message.get("encoding"), message.get("content_type")
    if text is None or text == "":
        raise Invalid({"body": REQUIRED})
    if not isinstance(text, str):
        raise Invalid({"body": "It has to be text"})
    if kind is not None and not isinstance(kind, str):
        raise Invalid({"content_type": "It has to be text"})
    if encoding not in (None, BASE64):
        raise Invalid({"encoding": f'"{readable(str(encoding)[:50])}" is not one of {BASE64}'})
    try:
        content = base64.b64decode(text, validate=True) if encoding else text.encode()
    except (binascii.Error, ValueError):
        raise Invalid({"body": "It isn't base64"}) from None
    return MessageInput(content, _given(message, "ttl"), _given(message, "partition"), kind or "")


def _given(message: Mapping[str, Any], name: str) -> Any:
    value = message.get(name)
    return None if value == "" else value


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Invalid({"body": f"It isn't JSON: {str(error)[:100]}"}) from None


def _fields(data: bytes, where: str = "body") -> dict[str, str]:
    """Return the fields that are form-encoded here.

    Raises:
        Invalid: they aren't, or aren't text.
    """
    fields: dict[str, str] = {}
    for part in data.split(b"&"):
        name, _, value = part.partition(b"=")
        if name:
            key = _decoded(name, where, where)
            fields[key] = _decoded(value, readable(key[:50]), where)
    return fields


def _decoded(part: bytes, field: str, where: str) -> str:
    try:
        text = part.decode()
        if _BAD_ESCAPE.search(text):
            raise Invalid({field: "A % has to be written as %25"})
        return unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeDecodeError:
        raise Invalid({field: "It isn't text in UTF-8"}) from None


def _multipart(request: HttpRequest, data: bytes) -> dict[str, str]:
    meta = {**request.META, "CONTENT_LENGTH": len(data)}
    try:
        fields, _ = MultiPartParser(meta, BytesIO(data), [], "utf-8").parse()
    except (MultiPartParserError, SuspiciousOperation, ValueError) as error:
        raise Invalid({"body": f"It can't be read: {readable(str(error)[:100])}"}) from None
    return {name: str(value) for name, value in fields.items()}


def _length(request: HttpRequest) -> int:
    try:
        return max(0, int(request.META.get("CONTENT_LENGTH") or 0))
    except ValueError:
        return 0


def _read(stream: Any, length: int) -> bytes:
    """Return so many bytes, or as many as there are before the end."""
    pieces = []
    while length > 0 and (piece := stream.read(min(_PIECE, length))):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
