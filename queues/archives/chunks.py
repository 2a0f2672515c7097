"""How an archive's messages are stored: compressed chunks of many messages each.

A message is its metadata as JSON, which keeps the types of AMQP's headers, and its body. Both follow their length in
bytes.
"""

import base64
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from rabbit.fetching import Fetched

LEVEL = 1
"""The least compression: it must not take longer than fetching."""

_LENGTH = struct.Struct(">I")


def pack(messages: Sequence[Fetched]) -> bytes:
    """Return messages as a compressed chunk."""
    compressor = zlib.compressobj(LEVEL)
    parts = []
    for message in messages:
        metadata = json.dumps(
            [
                _tagged(dict(message.properties)),
                _tagged(dict(message.headers)),
                message.exchange,
                message.routing_key,
                message.redelivered,
            ]
        ).encode()
        for part in (metadata, message.body):
            parts.append(compressor.compress(_LENGTH.pack(len(part))))
            parts.append(compressor.compress(part))
    parts.append(compressor.flush())
    return b"".join(parts)


def unpack(chunk: bytes) -> Iterator[Fetched]:
    """Yield the messages of a chunk, in their order."""
    data = memoryview(zlib.decompress(chunk))
    offset = 0
    while offset < len(data):
        metadata, offset = _read(data, offset)
        body, offset = _read(data, offset)
        properties, headers, exchange, routing_key, redelivered = json.loads(metadata)
        yield Fetched(body, _untagged(properties), _untagged(headers), exchange, routing_key, redelivered)


def _read(data: memoryview, offset: int) -> tuple[bytes, int]:
    (length,) = _LENGTH.unpack_from(data, offset)
    start = offset + _LENGTH.size
    return bytes(data[start : start + length]), start + length


def _tagged(value: Any) -> Any:
    """Return a value for JSON. What JSON has no type for becomes a list of a type and a value."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", repr(value)]
    if isinstance(value, Decimal):
        return ["decimal", str(value)]
    if isinstance(value, datetime):
        return ["timestamp", int(value.replace(tzinfo=UTC).timestamp())]
    if isinstance(value, dict):
        return ["table", [[_tagged(key), _tagged(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return ["array", [_tagged(item) for item in value]]
    return ["bytes", base64.b64encode(bytes(value)).decode()]


def _untagged(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "float":
            return float(content)
        case "decimal":
            return Decimal(content)
        case "timestamp":
            return datetime.fromtimestamp(content, UTC).replace(tzinfo=None)
        case "table":
            return {_untagged(key): _untagged(item) for key, item in content}
        case "array":
            return [_untagged(item) for item in content]
        case _:
            return base64.b64decode(content)
