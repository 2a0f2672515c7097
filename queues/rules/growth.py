"""The growth rate of a queue, and the time until it reaches its deletion limit."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

Sample = tuple[datetime, int]

WINDOW_SECONDS = 120
"""The rate is measured over this time."""
RECENT_SECONDS = 30
"""A queue that did not grow, or shrink, in this time does not any more: a burst that is over is no trend."""


class Growth(NamedTuple):
    """Messages a second, negative if the queue shrinks, and seconds to the limit, or None if it won't be reached."""

    per_second: float
    seconds_to_max: float | None


def since(now: datetime, first_seen: datetime) -> datetime:
    """Return the time from which samples count: those from before a queue was deleted and declared again don't."""
    return max(now - timedelta(seconds=WINDOW_SECONDS), first_seen)


def recent_growth(
    samples: Sequence[Sample], length: int, now: datetime, first_seen: datetime, max_length: int
) -> Growth | None:
    """Return the growth of a queue that has this length now. ``samples`` are the changes of its length, oldest first.

    A length holds until the next sample, so a queue without a recent one has not grown.
    """
    began = since(now, first_seen)
    before = [held for at, held in samples if first_seen <= at <= began][-1:]
    if not before and not samples and first_seen < began:
        before = [length]  # samples are pruned, and this length is older
    recent = [sample for sample in samples if sample[0] > began]
    return growth([*((began, held) for held in before), *recent, (now, length)], max_length)


def growth(samples: Sequence[Sample], max_length: int) -> Growth | None:
    """Return the growth between the first and the last of these samples (time, messages), oldest first.

    It is None if there are less than two samples, or less than half a second lies between them.
    """
    if len(samples) < 2:
        return None
    (began, first), (ended, last) = samples[0], samples[-1]
    recently = ended - timedelta(seconds=RECENT_SECONDS)
    held = [length for at, length in samples if at <= recently]
    if held and (last - held[-1]) * (last - first) <= 0:
        began, first = recently, held[-1]
    seconds = (ended - began).total_seconds()
    if seconds < 0.5:
        return None
    rate = (last - first) / seconds
    return Growth(rate, (max_length - last) / rate if rate > 0 and last <= max_length else None)
