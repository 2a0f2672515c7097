"""Receive messages that py-amqp can't read. What is unreadable in them becomes base64 in a header.

Some clients write times in milliseconds where AMQP means seconds, texts that are not UTF-8, or tables nested a thousand
levels deep. py-amqp raises an error at such a message, and then no message of its queue can be fetched.
"""

import base64
import struct
from collections.abc import Callable
from typing import Any

from amqp import Message, spec
from amqp.method_framing import frame_handler
from amqp.serialization import decode_properties_basic, dumps

HEADER = "x-guardian-unreadable"
"""The header with what is unreadable: a table of names, such as ``headers``, and base64."""

MAX_DEPTH = 50
"""Headers that are nested deeper count as unreadable: storing and showing them takes several calls for each level."""

_METHOD_FRAME, _HEADER_FRAME = 1, 2
_DELIVERIES = (struct.pack(">HH", *spec.Basic.Deliver), struct.pack(">HH", *spec.Basic.GetOk))
_FLAGS_AT = 12
_FLAGS = {name: 0x8000 >> position for position, (name, _) in enumerate(Message.PROPERTIES)}


def tolerant_frame_handler(connection: Any, callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return py-amqp's frame handler, which gets only frames that it can read."""
    on_frame = frame_handler(connection, callback)
    names: dict[int, dict[str, str]] = {}  # of the message that arrives, by channel

    def on_any_frame(frame: tuple[int, int, bytes]) -> Any:
        kind, channel, content = frame
        if kind == _METHOD_FRAME and content[:4] in _DELIVERIES:
            content, names[channel] = _readable_names(bytes(content))
        elif kind == _HEADER_FRAME:
            unreadable = names.pop(channel, {})
            if unreadable or not _is_readable(content):
                content = _readable_properties(bytes(content), unreadable)
        return on_frame((kind, channel, content))

    return on_any_frame


def _is_readable(content: bytes) -> bool:
    try:
        properties, _ = decode_properties_basic(content, _FLAGS_AT)
    except Exception:  # decoding raises various errors, even OSError
        return False
    level = [properties.get("application_headers", {})]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not level:
            return True
    return False


def _readable_names(content: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a delivery with "?" for what is not UTF-8 in its exchange and routing key, and these in base64."""
    at = 4
    if content.startswith(_DELIVERIES[0]):
        at += 1 + content[at]  # the consumer's tag
    at += 8 + 1  # the delivery's tag, and whether it was redelivered
    made, unreadable = content[:at], {}
    for name in ("exchange", "routing_key"):
        value = content[at + 1 : at + 1 + content[at]]
        at += 1 + len(value)
        try:
            value.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            unreadable[name] = base64.b64encode(value).decode()
            value = value.decode("utf-8", "replace").replace("\ufffd", "?").encode()
        made += bytes([len(value)]) + value
    return made + content[at:], unreadable


def _readable_properties(content: bytes, unreadable: dict[str, str]) -> bytes:
    """Return a message's header frame with its unreadable properties, and what else is unreadable, in a header."""
    (flags,) = struct.unpack_from(">H", content, _FLAGS_AT)
    at = _FLAGS_AT + 2
    readable = {}
    for name, kind in Message.PROPERTIES:
        if not flags & _FLAGS[name]:
            continue
        value = content[at : at + _size(kind, content, at)]
        at += len(value)
        if _is_readable(content[:_FLAGS_AT] + struct.pack(">H", _FLAGS[name]) + value):
            readable[name] = value
        elif kind == "F":
            unreadable["headers"] = base64.b64encode(value[4:]).decode()
        else:
            unreadable[name] = base64.b64encode(value[1:]).decode()
    headers = readable.get("application_headers", b"")[4:] + dumps("F", ({HEADER: unreadable},))[4:]
    readable["application_headers"] = struct.pack(">I", len(headers)) + headers
    flags = sum(_FLAGS[name] for name in readable)
    values = b"".join(readable[name] for name, _ in Message.PROPERTIES if name in readable)
    return content[:_FLAGS_AT] + struct.pack(">H", flags) + values


def _size(kind: str, content: bytes, at: int) -> int:
    """Return the size of an encoded property of this type, which starts there."""
    if kind == "s":
        return 1 + content[at]
    if kind == "F":
        return 4 + int.from_bytes(content[at : at + 4])
    return {"o": 1, "L": 8}[kind]
