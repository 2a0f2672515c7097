"""What the drawings of a length are made of: the bar towards the maximum, and the length over time as steps.

Pure: figures go in, and places on a sheet of 1000 by 1000 come out, or percentages of its width and height.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import NamedTuple

from queues.thresholds import Thresholds

SHEET_SIZE = 1000
MAX_POINTS = 300
BUCKETS = MAX_POINTS // 2
HEADROOM = 1.1
"""How much of the sheet's height is above the highest thing in it."""

Sample = tuple[datetime, int]


class Span(NamedTuple):
    """How far back a chart goes, and how long before its end its beginning and its middle are, in words."""

    name: str
    duration: timedelta
    words: str
    began: str
    middle: str


SPANS = {
    span.name: span
    for span in (
        Span("hour", timedelta(hours=1), "the last hour", "1 hour", "30 minutes"),
        Span("day", timedelta(days=1), "the last day", "24 hours", "12 hours"),
        Span("week", timedelta(days=7), "the last week", "7 days", "3½ days"),
    )
}


class Bar(NamedTuple):
    """A bar towards the maximum: how full it is, and where the warn mark stands, both in percent of its width."""

    full: float
    warn: float


class Chart(NamedTuple):
    """The length over time.

    ``line`` and ``area`` are SVG paths on the sheet. ``warn_at`` and ``max_at`` are percent from the top; None: there
    is no such threshold. ``lowest``, ``highest`` and ``last`` are messages in the window.
    """

    line: str
    area: str
    warn_at: float
    max_at: float | None
    lowest: int
    highest: int
    last: int


def bar(length: int, thresholds: Thresholds) -> Bar:
    """Return the bar of a queue with so many messages. A longer one than its maximum is full."""
    most = max(thresholds.max, 1)
    return Bar(round(min(length / most, 1) * 100, 2), round(min(thresholds.warn / most, 1) * 100, 2))


def chart(
    samples: Sequence[Sample], began: datetime, ended: datetime, thresholds: Thresholds, *, has_maximum: bool
) -> Chart | None:
    """Return the chart of this window; None where nothing is known of it.

    ``samples`` are (time, messages), oldest first, each written when the length changed: it held until the next. The
    last one before the window tells the length at its beginning. ``has_maximum``: it is deleted past it.
    """
    steps = within(samples, began, ended)
    if not steps:
        return None
    lengths = [length for _, length in steps]
    top = max(*lengths, thresholds.warn, thresholds.max if has_maximum else 0, 1) * HEADROOM
    seconds = (ended - began).total_seconds()

    def across(at: datetime) -> str:
        return _number((at - began).total_seconds() / seconds * SHEET_SIZE)

    def down(length: float) -> str:
        return _number((1 - length / top) * SHEET_SIZE)

    first, *others = thinned(steps, began, ended)
    steps_drawn = "".join(f"H{across(at)}V{down(length)}" for at, length in others)
    line = f"M{across(first[0])} {down(first[1])}{steps_drawn}H{SHEET_SIZE}"
    return Chart(
        line=line,
        area=f"{line}V{SHEET_SIZE}H{across(first[0])}Z",
        warn_at=float(down(thresholds.warn)) / SHEET_SIZE * 100,
        max_at=float(down(thresholds.max)) / SHEET_SIZE * 100 if has_maximum else None,
        lowest=min(lengths),
        highest=max(lengths),
        last=lengths[-1],
    )


def within(samples: Sequence[Sample], began: datetime, ended: datetime) -> list[Sample]:
    """Return the samples of this window, with the length that held at its beginning, if that is known, as its first."""
    earlier = [length for at, length in samples if at <= began]
    inside = [(at, length) for at, length in samples if began < at <= ended]
    return ([(began, earlier[-1])] if earlier else []) + inside


def thinned(steps: Sequence[Sample], began: datetime, ended: datetime) -> list[Sample]:
    """Return ``MAX_POINTS`` of these at most, and one: of each stretch of time the highest and the last."""
    if len(steps) <= MAX_POINTS:
        return list(steps)
    stretch = (ended - began) / BUCKETS
    kept = [steps[0]]
    for _, group in groupby(steps[1:], key=lambda step: min(int((step[0] - began) / stretch), BUCKETS - 1)):
        some = list(group)
        highest = max(some, key=lambda step: step[1])
        kept.append(highest)
        if some[-1] is not highest:
            kept.append(some[-1])
    return kept


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
