"""Message ids: UUID1s, their time in steps of 100 ns, and their order (pure).

A message id is a UUID of version 1. Its time is counted in *ticks*: steps of 100 ns since 1970 (the UUID itself counts
them since 15 October 1582). Messages are in the order of their places: the time first, then the rest of the UUID.
"""

import os
import re
import struct
import time
import uuid
from decimal import Decimal
from typing import NamedTuple

TICKS_PER_SECOND = 10_000_000
"""Ticks in a second."""

UUID_EPOCH_OFFSET = 0x01B21DD213814000
"""Ticks from 15 October 1582, where a UUID begins to count, to 1970 (RFC 9562, section 5.1)."""

MIN_TICKS, MAX_TICKS = -UUID_EPOCH_OFFSET, (1 << 60) - 1 - UUID_EPOCH_OFFSET
"""The ticks of the first and of the last time that a UUID can have."""

MAX_REST = (1 << 64) - 1

_new, _UNKNOWN = object.__new__, uuid.SafeUUID.unknown
_set_int, _set_is_safe = uuid.UUID.__dict__["int"].__set__, uuid.UUID.__dict__["is_safe"].__set__
_VARIANT, _MULTICAST = 0b11 << 62, 1 << 40


_HEX = re.compile(r"[0-9a-fA-F]{32}")


class Place(NamedTuple):
    """Where a message stands: its ticks since 1970, then the other half of its id, as a number of 64 bits."""

    ticks: int
    rest: int


def place(message_id: uuid.UUID) -> Place:
    """Return where a message with this id stands."""
    return Place(message_id.time - UUID_EPOCH_OFFSET, message_id.int & MAX_REST)


def message_id(at: Place) -> uuid.UUID:
    """Return the id of the message that stands there."""
    return id_of(*at)


def id_of(ticks: int, rest: int) -> uuid.UUID:
    """Return the id of the message that stands at this place.

    Made as one that was pickled is: the constructor, which takes six kinds of arguments, takes most of the time of a
    read of many messages otherwise.
    """
    time = ticks + UUID_EPOCH_OFFSET
    high = (time & 0xFFFFFFFF) << 32 | (time >> 32 & 0xFFFF) << 16 | 0x1000 | time >> 48
    made = _new(uuid.UUID)
    _set_int(made, high << 64 | rest)
    _set_is_safe(made, _UNKNOWN)
    return made


def place_after(message_id: uuid.UUID) -> Place:
    """Return the first place after that of this message."""
    ticks, rest = place(message_id)
    return Place(ticks, rest + 1) if rest < MAX_REST else Place(ticks + 1, 0)


def timestamp(message_id: uuid.UUID) -> str:
    """Return the time of an id in seconds since 1970, exactly, with 7 decimals."""
    return f"{Decimal(message_id.time - UUID_EPOCH_OFFSET).scaleb(-7):f}"


def now() -> int:
    """Return the time in ticks since 1970, by the clock of this machine, which may be set back."""
    return time.time_ns() // 100


def random_rests(number: int) -> list[int]:
    """Return so many other halves for new ids: the clock sequence and the node, at random.

    61 random bits for each, from the system, so that no two ids are the same whatever time they have, and a process
    that was forked draws others than its parent. The multicast bit says that the node is no network card's address
    (RFC 9562, section 6.10).
    """
    drawn = struct.unpack(f">{number}Q", os.urandom(8 * number))
    return [rest & ~_VARIANT | 1 << 63 | _MULTICAST for rest in drawn]


def parse(text: str) -> uuid.UUID:
    """Return the id that is written so: 32 hex digits of a UUID1.

    Raises:
        ValueError: it is not one.
    """
    if not _HEX.fullmatch(text):
        raise ValueError(f"{text[:50]!r} is not a message id")
    found = uuid.UUID(hex=text)
    if found.version != 1:
        raise ValueError(f"{text!r} is not a message id")
    return found
