"""How an archive's messages are stored: compressed chunks of many messages each.

A message is its metadata and its body. Both follow their length in bytes. The metadata is a byte (whether the message
was redelivered) and its envelope as the broker encoded it. Archives of earlier versions have JSON instead.
"""

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from rabbit.fetching import Fetched, Undecoded

LEVEL = 1
"""The least compression: it must not take longer than fetching."""

CHUNK_BYTES = 256 * 1024
"""A chunk ends with the message that reaches this size. To read a message, those before it in its chunk are read."""

PIECE_BYTES = 3 * 64 * 1024
"""Of a long body, as much is read at a time. It is a multiple of three, as the pieces are encoded in base64."""

_LENGTH = struct.Struct(">I")


class Stored(NamedTuple):
    """A message of a chunk, not yet decoded. ``cut`` is how many bytes ``body`` lacks at its end."""

    metadata: bytes
    body: bytes
    cut: int

    def decode(self, max_values: int | None = None) -> Fetched:
        """Return it decoded. Headers with more values than ``max_values`` count as unreadable."""
        if self.metadata[0] > 1:
            properties, headers, exchange, routing_key, redelivered = json.loads(self.metadata)
            of_amqp = _untagged(properties), _untagged(headers)
            return Fetched(self.body, *of_amqp, exchange, routing_key, redelivered, self.cut)
        return Undecoded(self.metadata[1:], self.body, self.metadata[0] == 1, self.cut).decode(max_values)


def split(messages: Sequence[Undecoded]) -> Iterator[list[Undecoded]]:
    """Yield the messages of each chunk."""
    part, size = [], 0
    for message in messages:
        part.append(message)
        size += message.size
        if size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def pack(messages: Iterable[Undecoded]) -> bytes:
    """Return messages as a compressed chunk."""
    compressor = zlib.compressobj(LEVEL)
    parts = []
    for message in messages:
        for part in (bytes([message.redelivered]) + message.envelope, message.body):
            parts.append(compressor.compress(_LENGTH.pack(len(part))))
            parts.append(compressor.compress(part))
    parts.append(compressor.flush())
    return b"".join(parts)


def unpack(pieces: Iterable[bytes], max_body: int | None = None) -> Iterator[Stored]:
    """Yield the messages of a chunk that is read in pieces, in their order. Bodies are cut at ``max_body`` bytes."""
    stream = _open(pieces)
    while (length := _read_length(stream)) is not None:
        metadata = stream.read(length)
        length = _read_length(stream) or 0
        body = stream.read(length if max_body is None else min(length, max_body))
        yield Stored(metadata, body, length - len(body))
        _skip(stream, length - len(body))


def unpack_body(pieces: Iterable[bytes], index: int) -> Iterator[bytes]:
    """Yield the body of one message of a chunk in pieces of ``PIECE_BYTES``. The first message has the index 0."""
    stream = _open(pieces)
    for _ in range(2 * index + 1):
        _skip(stream, _read_length(stream) or 0)
    length = _read_length(stream) or 0
    while length > 0:
        yield stream.read(min(length, PIECE_BYTES))
        length -= PIECE_BYTES


class _Inflated(io.RawIOBase):
    """A stream of compressed pieces, decompressed."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._decompressor = zlib.decompressobj()
        self._compressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = self._decompressor.decompress(self._compressed, len(buffer))
            self._compressed = self._decompressor.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not self._compressed:
                self._compressed = next(self._pieces, b"")
            if not self._compressed:
                return 0


def _open(pieces: Iterable[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_Inflated(pieces), 64 * 1024)


def _read_length(stream: io.BufferedReader) -> int | None:
    """Return the length of what follows, or None at the end."""
    data = stream.read(_LENGTH.size)
    return int(_LENGTH.unpack(data)[0]) if data else None


def _skip(stream: io.BufferedReader, length: int) -> None:
    while length > 0:
        stream.read(min(length, PIECE_BYTES))
        length -= PIECE_BYTES


def _untagged(value: Any) -> Any:
    """Return a value of JSON in which a list of a type and a value stands for what JSON has no type for."""
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
