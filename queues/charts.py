"""The drawings of a queue's length: a bar towards the deletion limit, and a step chart over time.

Pure: the results are SVG coordinates in a square of 1000 by 1000, or percentages of its width and height.
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
"""The height of the chart, relative to its highest value."""

Sample = tuple[datetime, int]


class Span(NamedTuple):
    """The time that a chart covers, and the labels of its start and its middle."""

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
    """A bar towards the deletion limit: its filled part and the mark of the warning threshold, in percent."""

    full: float
    warn: float


class Chart(NamedTuple):
    """The length over time.

    ``line`` and ``area`` are SVG paths. ``warn_at`` and ``max_at`` are percent from the top; None: no such threshold.
    ``lowest``, ``highest`` and ``last`` are lengths in messages within the window.
    """

    line: str
    area: str
    warn_at: float
    max_at: float | None
    lowest: int
    highest: int
    last: int


def bar(length: int, thresholds: Thresholds) -> Bar:
    """Return the bar of a queue of this length. It is full at the deletion limit and above."""
    limit = max(thresholds.max, 1)
    return Bar(round(min(length / limit, 1) * 100, 2), round(min(thresholds.warn / limit, 1) * 100, 2))


def chart(
    samples: Sequence[Sample], began: datetime, ended: datetime, thresholds: Thresholds, *, has_maximum: bool
) -> Chart | None:
    """Return the chart of this window; None: no length is known in it.

    ``samples`` are (time, messages), oldest first. Each length lasts until the next sample, so the last sample before
    the window gives the length at its start. ``has_maximum``: the deletion limit applies to the queue.
    """
    steps = within(samples, began, ended)
    if not steps:
        return None
    lengths = [length for _, length in steps]
    top = max(*lengths, thresholds.warn, thresholds.max if has_maximum else 0, 1) * HEADROOM
    seconds = (ended - began).total_seconds()

    def x(at: datetime) -> str:
        return _number((at - began).total_seconds() / seconds * SHEET_SIZE)

    def y(length: float) -> str:
        return _number((1 - length / top) * SHEET_SIZE)

    first, *others = thinned(steps, began, ended)
    steps_drawn = "".join(f"H{x(at)}V{y(length)}" for at, length in others)
    line = f"M{x(first[0])} {y(first[1])}{steps_drawn}H{SHEET_SIZE}"
    return Chart(
        line=line,
        area=f"{line}V{SHEET_SIZE}H{x(first[0])}Z",
        warn_at=float(y(thresholds.warn)) / SHEET_SIZE * 100,
        max_at=float(y(thresholds.max)) / SHEET_SIZE * 100 if has_maximum else None,
        lowest=min(lengths),
        highest=max(lengths),
        last=lengths[-1],
    )


def within(samples: Sequence[Sample], began: datetime, ended: datetime) -> list[Sample]:
    """Return the samples of this window. The first is the length at its start, if known."""
    earlier = [length for at, length in samples if at <= began]
    inside = [(at, length) for at, length in samples if began < at <= ended]
    return ([(began, earlier[-1])] if earlier else []) + inside


def thinned(steps: Sequence[Sample], began: datetime, ended: datetime) -> list[Sample]:
    """Return at most ``MAX_POINTS`` + 1 samples: the first, then the highest and the last of each interval."""
    if len(steps) <= MAX_POINTS:
        return list(steps)
    interval = (ended - began) / BUCKETS
    kept = [steps[0]]
    for _, group in groupby(steps[1:], key=lambda step: min(int((step[0] - began) / interval), BUCKETS - 1)):
        bucket = list(group)
        highest = max(bucket, key=lambda step: step[1])
        kept.append(highest)
        if bucket[-1] is not highest:
            kept.append(bucket[-1])
    return kept


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
