"""The time buckets of a deep queue: which one a message is in, and which one takes the next message.

The messages of a queue's partition are divided into buckets, each a partition of the database. Buckets have eight
widths, from 24 days (level 0) to 1 second (level 7); a bucket of one level contains eight of the next. The id of a
message determines its bucket: its time, and its last three bits, which are the level. So a message is found by its id
alone, whatever happened since, and a client may choose any id.

A new message goes to the widest bucket of its time that is not full. So a quiet queue has one bucket in 24 days, and a
busy one has a bucket each second, with about ``MESSAGES`` in each. A push marks its bucket as full with a probability
of its messages divided by ``MESSAGES``. This needs no counter, and no agreement between processes, and gives the same
average: 1 in 3,000 buckets gets eight times as many messages.

An index lists the buckets with messages. Each entry expires with the last message that its bucket may have.
"""

import random
from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

from guardian_store._ids import TICKS_PER_SECOND, Place

MESSAGES = 8192
BYTES = 8 * 1024 * 1024
"""What a bucket has on average before it is full."""

LEVEL_BITS = 7
FINEST = 7
WIDTHS: tuple[int, ...] = tuple(8 ** (FINEST - level) * TICKS_PER_SECOND for level in range(FINEST + 1))

LEVELS = range(FINEST + 1)

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
LIFETIMES = (
    *(factor * _MINUTE for factor in (1, 5, 15, 30)),
    *(factor * _HOUR for factor in (1, 2, 3, 6, 12)),
    *(factor * _DAY for factor in (1, 2, 3, 4, 5, 7, 10, 14, 21, 30, 60, 90, 180, 365)),
    2**25,
)
"""Seconds to which the ttl of a message is rounded up in the index. More values would make the index longer."""


class Bucket(NamedTuple):
    """A bucket: its first ticks and its level."""

    start: int
    level: int

    @property
    def end(self) -> int:
        return self.start + WIDTHS[self.level]


def covering(ticks: int) -> list[Bucket]:
    """Return the buckets that a message of this time may be in, the widest first."""
    return [Bucket(ticks // width * width, level) for level, width in enumerate(WIDTHS)]


def bucket_of(place: Place) -> Bucket:
    level = place.rest & LEVEL_BITS
    return Bucket(place.ticks // WIDTHS[level] * WIDTHS[level], level)


def with_level(rest: int, level: int) -> int:
    """Return the rest of an id, changed so that its message is in a bucket of this level."""
    return rest & ~LEVEL_BITS | level


def choose(ticks: int, full: Collection[Bucket]) -> Bucket:
    """Return the widest bucket of this time that is not full. The finest one never is."""
    buckets = covering(ticks)
    return next((bucket for bucket in buckets if bucket not in full), buckets[FINEST])


def fills(bucket: Bucket, messages: int, size: int) -> bool:
    """Return whether a push of this many messages and bytes marks its bucket as full."""
    share = max(messages / MESSAGES, size / BYTES)
    return bucket.level != FINEST and random.random() < share  # noqa: S311 - not for security


def lifetime(ttl: int) -> int:
    """Return the ttl that the index has for a message with this ttl, in seconds."""
    return LIFETIMES[min(bisect_left(LIFETIMES, ttl), len(LIFETIMES) - 1)]
