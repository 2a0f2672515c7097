"""Message ids and their order.

A message id is a UUID of version 1. Its time is measured in *ticks* of 100 ns since 1970; the UUID itself counts them
since 15 October 1582. Messages are ordered by their places: first by time, then by the rest of the UUID.
"""

import os
import re
import struct
import time
import uuid
from decimal import Decimal
from typing import NamedTuple

TICKS_PER_SECOND = 10_000_000
UUID_EPOCH_OFFSET = 0x01B21DD213814000
"""Ticks from 15 October 1582, the epoch of UUIDs, to 1970 (RFC 9562, section 5.1)."""

MIN_TICKS, MAX_TICKS = -UUID_EPOCH_OFFSET, (1 << 60) - 1 - UUID_EPOCH_OFFSET
"""The first and last time that a UUID can have."""

MAX_REST = (1 << 64) - 1

_new, _UNKNOWN = object.__new__, uuid.SafeUUID.unknown
_set_int, _set_is_safe = uuid.UUID.__dict__["int"].__set__, uuid.UUID.__dict__["is_safe"].__set__
_VARIANT, _MULTICAST = 0b11 << 62, 1 << 40


_HEX = re.compile(r"[0-9a-fA-F]{32}")


class Place(NamedTuple):
    """The sort key of a message: its ticks since 1970 and the lower 64 bits of its id."""

    ticks: int
    rest: int

    @property
    def next(self) -> "Place":
        return Place(self.ticks, self.rest + 1) if self.rest < MAX_REST else Place(self.ticks + 1, 0)

    @property
    def previous(self) -> "Place":
        return Place(self.ticks, self.rest - 1) if self.rest else Place(self.ticks - 1, MAX_REST)


def place(message_id: uuid.UUID) -> Place:
    return Place(message_id.time - UUID_EPOCH_OFFSET, message_id.int & MAX_REST)


def message_id(at: Place) -> uuid.UUID:
    return id_of(*at)


def id_of(ticks: int, rest: int) -> uuid.UUID:
    """Return the message id of a place.

    Skip the constructor, as unpickling does: it would take most of the time of a large read.
    """
    time = ticks + UUID_EPOCH_OFFSET
    high = (time & 0xFFFFFFFF) << 32 | (time >> 32 & 0xFFFF) << 16 | 0x1000 | time >> 48
    result = _new(uuid.UUID)
    _set_int(result, high << 64 | rest)
    _set_is_safe(result, _UNKNOWN)
    return result


def timestamp(message_id: uuid.UUID) -> str:
    """Return the exact time of an id in seconds since 1970, with 7 decimals."""
    return f"{Decimal(message_id.time - UUID_EPOCH_OFFSET).scaleb(-7):f}"


def now() -> int:
    """Return the ticks since 1970 by this machine's clock, which may be set back."""
    return time.time_ns() // 100


def random_rests(number: int) -> list[int]:
    """Return the lower halves for new ids: a random clock sequence and node.

    Each has 61 random bits from the system, so that ids are unique whatever their time, also in forked processes. The
    multicast bit marks the node as random, not a network address (RFC 9562, section 6.10).
    """
    drawn = struct.unpack(f">{number}Q", os.urandom(8 * number))
    return [rest & ~_VARIANT | 1 << 63 | _MULTICAST for rest in drawn]


def parse(text: str) -> uuid.UUID:
    """Parse a message id: the 32 hex digits of a UUID1. Raises ValueError if it isn't one."""
    if not _HEX.fullmatch(text):
        raise ValueError(f"{text[:50]!r} is not a message id")
    found = uuid.UUID(hex=text)
    if found.version != 1:
        raise ValueError(f"{text!r} is not a message id")
    return found
