"""The growth rate of a queue, and the time until it reaches its deletion limit."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

WINDOW_SECONDS = 120
"""The rate is measured over this time: a burst that is over soon counts no more."""


class Growth(NamedTuple):
    """Messages a second, negative if the queue shrinks, and seconds to the limit, or None if it won't be reached."""

    per_second: float
    seconds_to_max: float | None


def since(now: datetime, first_seen: datetime) -> datetime:
    """Return the time from which samples count: those from before a queue was deleted and declared again don't."""
    return max(now - timedelta(seconds=WINDOW_SECONDS), first_seen)


def growth(samples: Sequence[tuple[datetime, int]], max_length: int) -> Growth | None:
    """Return the growth between the first and the last of these samples (time, messages), oldest first.

    It is None if there are less than two samples, or less than half a second lies between them.
    """
    if len(samples) < 2:
        return None
    (began, first), (ended, last) = samples[0], samples[-1]
    seconds = (ended - began).total_seconds()
    if seconds < 0.5:
        return None
    rate = (last - first) / seconds
    return Growth(rate, (max_length - last) / rate if rate > 0 and last <= max_length else None)
