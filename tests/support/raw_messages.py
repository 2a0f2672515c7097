"""Messages with headers that pika would not encode, or only slowly."""

import struct

import pika


def table(entries: bytes) -> bytes:
    """Return an encoded table of these encoded entries."""
    return struct.pack(">I", len(entries)) + entries


class Raw(pika.BasicProperties):
    """The properties of a persistent message with these encoded headers and content type."""

    def __init__(self, encoded: bytes, content_type: bytes = b"text/plain") -> None:
        super().__init__(message_id="odd")
        self.encoded = encoded
        self.kind = content_type

    def encode(self) -> list[bytes]:
        """Return the encoded properties."""
        kind = bytes([len(self.kind)]) + self.kind
        return [struct.pack(">H", 0x8000 | 0x2000 | 0x1000 | 0x0080), kind, self.encoded, b"\x02", b"\x03odd"]


MANY_HEADERS = table(b"".join(b"\x05h%04xV" % number for number in range(16_000)))
"""16,000 headers. Decoding them takes 40 ms and 1.3 MB."""
