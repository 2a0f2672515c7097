"""Receive messages without decoding them, and decode them later, when they are shown or replayed.

Decoding a message with 16,000 headers takes 15 to 100 ms and 1.3 MB. So py-amqp gets each message with its envelope
(exchange, routing key and properties, as the broker encoded them) as the bytes of one header.

Some clients write times in milliseconds where AMQP means seconds, texts that are not UTF-8, or tables nested a thousand
levels deep. What py-amqp can't decode becomes base64 in a header.
"""

import base64
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from re import finditer
from typing import Any, NamedTuple

from amqp import Message, spec
from amqp.method_framing import frame_handler
from amqp.serialization import decode_properties_basic, loads

HEADER = "x-guardian-unreadable"
"""The header with what is unreadable: a table of names, such as ``headers``, and base64."""

MAX_DEPTH = 50
"""Headers that are nested deeper count as unreadable: storing and showing them takes several calls for each level."""

_ENVELOPE = "envelope"
_ENVELOPE_KEY = bytes([len(_ENVELOPE)]) + _ENVELOPE.encode() + b"x"
_METHOD_FRAME, _HEADER_FRAME = 1, 2
_DELIVERIES = (struct.pack(">HH", *spec.Basic.Deliver), struct.pack(">HH", *spec.Basic.GetOk))
_FLAGS_AT = 12
_FLAGS = {name: 0x8000 >> position for position, (name, _) in enumerate(Message.PROPERTIES)}
_VALUE_SIZES = {**dict.fromkeys(b"tbB", 1), **dict.fromkeys(b"sUu", 2), **dict.fromkeys(b"Iif", 4),
                **dict.fromkeys(b"LldT", 8), ord("D"): 5, ord("V"): 0}  # fmt: skip


class Decoded(NamedTuple):
    """A decoded envelope. ``properties`` has the headers, too, as ``application_headers``."""

    exchange: str
    routing_key: str
    properties: dict[str, Any]


def undecoded_frame_handler(connection: Any, callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return py-amqp's frame handler, which gets each message with its undecoded envelope. See ``envelope_of``."""
    on_frame = frame_handler(connection, callback)
    names: dict[int, bytes] = {}  # of the message that arrives, by channel

    def on_any_frame(frame: tuple[int, int, bytes]) -> Any:
        kind, channel, content = frame
        if kind == _METHOD_FRAME and content[:4] in _DELIVERIES:
            content, names[channel] = _without_names(bytes(content))
        elif kind == _HEADER_FRAME and channel in names:
            envelope = names.pop(channel) + content[_FLAGS_AT:]
            flags = struct.pack(">H", _FLAGS["application_headers"])
            headers = _ENVELOPE_KEY + struct.pack(">I", len(envelope)) + envelope
            content = content[:_FLAGS_AT] + flags + struct.pack(">I", len(headers)) + headers
        return on_frame((kind, channel, content))

    return on_any_frame


def envelope_of(message: Message) -> bytes:
    """Return the envelope of a message that ``undecoded_frame_handler`` received."""
    return bytes(message.properties["application_headers"][_ENVELOPE])


def decode(envelope: bytes, max_values: int | None = None) -> Decoded:
    """Return what an envelope has. Headers with more values than ``max_values`` count as unreadable."""
    unreadable: dict[str, str] = {}
    names = []
    at = 0
    for name in ("exchange", "routing_key"):
        value = envelope[at + 1 : at + 1 + envelope[at]]
        at += 1 + len(value)
        try:
            names.append(value.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            unreadable[name] = base64.b64encode(value).decode()
            names.append(value.decode("utf-8", "replace").replace("\ufffd", "?"))
    properties = _decoded(envelope[at:], max_values)
    if properties is None:
        properties = _decoded_each(envelope, at, max_values, unreadable)
    if unreadable:
        properties["application_headers"] = {**properties.get("application_headers", {}), HEADER: unreadable}
    return Decoded(names[0], names[1], properties)


def find_integer_header(envelope: bytes, name: str) -> int:
    """Return the largest integer that is encoded under this name, without decoding the envelope; 0: there is none."""
    key = bytes([len(name)]) + name.encode()
    found = [0]
    for match in islice(finditer(key, envelope), 100):
        # py-amqp decodes one entry of a table that is said to have one byte.
        entry = struct.pack(">I", 1) + envelope[match.start() : match.end() + 9]
        with suppress(Exception):  # a text may have the name in it
            [table], _ = loads("F", entry, 0)
            found += [value for value in table.values() if type(value) is int]
    return max(found)


def _without_names(content: bytes) -> tuple[bytes, bytes]:
    """Return a delivery without its exchange and routing key, and these as they are encoded."""
    start = 4
    if content.startswith(_DELIVERIES[0]):
        start += 1 + content[start]  # the consumer's tag
    start += 8 + 1  # the delivery's tag, and whether it was redelivered
    end = start
    for _ in range(2):
        end += 1 + content[end]
    return content[:start] + b"\0\0" + content[end:], content[start:end]


def _decoded(properties: bytes, max_values: int | None) -> dict[str, Any] | None:
    """Return decoded properties, or None if one is unreadable."""
    try:
        if not _is_decodable(properties, max_values):
            return None
        decoded, _ = decode_properties_basic(properties, 0)
    except Exception:  # decoding raises various errors, even OSError
        return None
    return dict(decoded)


def _decoded_each(envelope: bytes, at: int, max_values: int | None, unreadable: dict[str, str]) -> dict[str, Any]:
    """Return the readable ones of the properties that start there. Add the others to ``unreadable``."""
    (flags,) = struct.unpack_from(">H", envelope, at)
    at += 2
    properties: dict[str, Any] = {}
    for name, kind in Message.PROPERTIES:
        if not flags & _FLAGS[name]:
            continue
        value = envelope[at : at + _size(kind, envelope, at)]
        at += len(value)
        decoded = _decoded(struct.pack(">H", _FLAGS[name]) + value, max_values)
        if decoded is not None:
            properties |= decoded
        elif kind == "F":
            unreadable["headers"] = base64.b64encode(value[4:]).decode()
        else:
            unreadable[name] = base64.b64encode(value[1:]).decode()
    return properties


def _is_decodable(properties: bytes, max_values: int | None) -> bool:
    """Return whether the headers in encoded properties are not nested too deep, and have at most so many values."""
    (flags,) = struct.unpack_from(">H", properties)
    at = 2
    for name in ("content_type", "content_encoding"):
        at += 1 + properties[at] if flags & _FLAGS[name] else 0
    if not flags & _FLAGS["application_headers"]:
        return True
    values = 0
    ends = [(at + _size("F", properties, at), True)]  # of the tables and lists that are open, and which are tables
    at += 4
    while ends:
        end, is_table = ends[-1]
        if at >= end:
            ends.pop()
            continue
        if is_table:
            at += 1 + properties[at]
        kind = properties[at]
        at += 1
        values += 1
        if kind in b"FA":
            ends.append((at + _size("F", properties, at), kind == ord("F")))
            at += 4
        else:
            at += _size("F", properties, at) if kind in b"Sx" else _VALUE_SIZES[kind]
        if len(ends) > MAX_DEPTH or (max_values is not None and values > max_values):
            return False
    return True


def _size(kind: str, content: bytes, at: int) -> int:
    """Return the size of an encoded property of this type, which starts there."""
    if kind == "s":
        return 1 + content[at]
    if kind == "F":
        return 4 + int.from_bytes(content[at : at + 4])
    return {"o": 1, "L": 8}[kind]
