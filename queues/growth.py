"""How fast a queue grows, and when it reaches its maximum at that pace."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

WINDOW_SECONDS = 600
"""How far back the pace is measured."""


class Growth(NamedTuple):
    """Messages a second (negative: it shrinks), and the seconds to its maximum (None: not at this pace, or past it)."""

    per_second: float
    seconds_to_max: float | None


def growth(samples: Sequence[tuple[datetime, int]], max_length: int) -> Growth | None:
    """Return the pace between the first and the last of these samples (time, messages; oldest first).

    None where they are too few, or too close in time, to tell.
    """
    if len(samples) < 2:
        return None
    (began, first), (ended, last) = samples[0], samples[-1]
    seconds = (ended - began).total_seconds()
    if seconds < 0.5:
        return None
    pace = (last - first) / seconds
    return Growth(pace, (max_length - last) / pace if pace > 0 and last <= max_length else None)
