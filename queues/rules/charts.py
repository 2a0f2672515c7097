"""The drawings of a queue's length: a bar towards the deletion limit, and a step chart over time.

Pure: the results are SVG coordinates in a square of 1000 by 1000, or percentages of its width and height.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise
from typing import NamedTuple

from queues.rules.thresholds import Thresholds
from rabbit.entities import RateSample

SHEET_SIZE = 1000
MAX_POINTS = 300
SPARKLINE_POINTS = 40
MIN_WIDTH = 10
"""A line that begins later than this before the right edge begins here: a shorter one can't be seen."""

MAX_TICKS = 5
EDGE = 5
"""Labels of times closer than this to an edge of the chart, in percent, would overlap its corner."""

MIN_MARK_DISTANCE = 3
"""Marks of events closer than this, in percent, would overlap."""

Sample = tuple[datetime, int]


class Span(NamedTuple):
    """The time that a chart covers, the distance of its labels, and their format.

    ``rate_step`` is the distance of RabbitMQ's samples, in seconds. It keeps none for as long as a span without one.
    """

    name: str
    duration: timedelta
    words: str
    step: timedelta
    label: str
    rate_step: int = 0


SPANS = {
    span.name: span
    for span in (
        Span("hour", timedelta(hours=1), "the last hour", timedelta(minutes=15), "%H:%M", 60),
        Span("8-hours", timedelta(hours=8), "the last 8 hours", timedelta(hours=2), "%H:%M", 600),
        Span("day", timedelta(days=1), "the last day", timedelta(hours=6), "%H:%M", 1800),
        Span("week", timedelta(days=7), "the last week", timedelta(days=1), "%a"),
    )
}


class Bar(NamedTuple):
    """A bar towards the deletion limit: its filled part and the mark of the warning threshold, in percent."""

    full: float
    warn: float


class Tick(NamedTuple):
    at: float
    label: str


class Chart(NamedTuple):
    """The length over time.

    ``line`` and ``area`` are SVG paths. ``warn_at`` and ``max_at`` are percent from the top, or None if there is no
    such threshold or it is beyond the scale. ``lowest``, ``highest`` and ``last`` are lengths in messages within the
    window. ``points`` are [seconds since the start of the window, messages], as in JSON.
    """

    line: str
    area: str
    warn_at: float | None
    max_at: float | None
    lowest: int
    highest: int
    last: int
    ticks: list[Tick]
    points: list[list[float]]


class RateLine(NamedTuple):
    """One of the rates over time: its name, an SVG path, and its last value in messages a second."""

    name: str
    line: str
    last: float


class RateChart(NamedTuple):
    """The rates over time, on one scale up to ``top`` messages a second.

    ``points`` are [seconds since the start of the window, each line's rate], as in JSON. ``is_part``: no rate is known
    before ``since``, in the window.
    """

    lines: list[RateLine]
    top: float
    since: datetime
    is_part: bool
    points: list[list[float]]


class Mark(NamedTuple):
    """A mark at ``at`` percent of the width, for events that are too close to have a mark each."""

    at: float
    events: list[tuple[datetime, str]]


def bar(length: int, thresholds: Thresholds) -> Bar:
    """Return the bar of a queue of this length. It is full at the deletion limit and above."""
    limit = max(thresholds.max, 1)
    return Bar(round(min(length / limit, 1) * 100, 2), round(min(thresholds.warn / limit, 1) * 100, 2))


def chart(
    samples: Sequence[Sample],
    began: datetime,
    ended: datetime,
    thresholds: Thresholds,
    *,
    has_maximum: bool,
    to_limit: bool = False,
) -> Chart | None:
    """Return the chart of this window, or None if no length is known in it.

    ``samples`` are (time, messages), oldest first. Each length lasts until the next sample, so the last sample before
    the window gives the length at its start. ``has_maximum``: the deletion limit applies to the queue. ``to_limit``:
    the scale reaches the thresholds; otherwise it fits the lengths.
    """
    steps = within(samples, began, ended)
    if not steps:
        return None
    lengths = [length for _, length in steps]
    highest_shown = max(*lengths, thresholds.warn, thresholds.max if has_maximum else 0) if to_limit else max(lengths)
    step = tick_step(highest_shown)
    top = step * max(1, -(-highest_shown // step))
    drawn = thinned(steps, began, ended, MAX_POINTS)
    line = _line(drawn, began, ended, top)

    def at(length: int) -> float | None:
        return round((1 - length / top) * 100, 2) if length <= top else None

    return Chart(
        line=line,
        area=f"{line}V{SHEET_SIZE}H{line[1 : line.index(' ')]}Z",
        warn_at=at(thresholds.warn),
        max_at=at(thresholds.max) if has_maximum else None,
        lowest=min(lengths),
        highest=max(lengths),
        last=lengths[-1],
        ticks=[Tick(at(value) or 0, f"{value:,}") for value in range(0, top + 1, step)],
        points=[[round((moment - began).total_seconds(), 1), length] for moment, length in drawn],
    )


def sparkline(samples: Sequence[Sample], began: datetime, ended: datetime) -> str:
    """Return the known lengths of this window as an SVG path, or an empty text if none is known.

    It spans at least half of the highest length, so that little change is little, and in the middle.
    """
    steps = within(samples, began, ended)
    if not steps:
        return ""
    lowest, highest = (pick(length for _, length in steps) for pick in (min, max))
    span = max(highest - lowest, highest / 2, 1)
    bottom = (lowest + highest - span) / 2
    thin = thinned(steps, began, ended, SPARKLINE_POINTS)
    return _line([(at, length - bottom) for at, length in thin], began, ended, span)


def rate_chart(samples: Sequence[RateSample], began: datetime, ended: datetime) -> RateChart | None:
    """Return the rates of this window, or None if none is known in it. A sample's rate is that before its time."""
    steps = [
        (max(before.at, began), after) for before, after in pairwise(samples) if began < after.at and before.at < ended
    ]
    if not steps:
        return None
    top = max(0.1, *(max(sample[1:]) for _, sample in steps))
    return RateChart(
        [
            RateLine(
                name,
                _line([(at, getattr(one, name)) for at, one in steps], began, ended, top),
                getattr(steps[-1][1], name),
            )
            for name in RateSample._fields[1:]
        ],
        top,
        steps[0][0],
        steps[0][0] - began > (ended - began) / 10,
        [[round((at - began).total_seconds(), 1), *(round(rate, 1) for rate in one[1:])] for at, one in steps],
    )


def marks(events: Sequence[tuple[datetime, str]], began: datetime, ended: datetime) -> list[Mark]:
    """Return the marks of these events, oldest first, in this window."""
    found: list[Mark] = []
    for at, what in events:
        place = round((at - began) / (ended - began) * 100, 2)
        if found and place - found[-1].at < MIN_MARK_DISTANCE:
            found[-1].events.append((at, what))
        else:
            found.append(Mark(place, [(at, what)]))
    return found


def tick_step(highest: int) -> int:
    """Return the distance between gridlines: 1, 2 or 5 times a power of ten, for at most ``MAX_TICKS`` steps."""
    at_least = max(1, highest / MAX_TICKS)
    power = 10 ** math.floor(math.log10(at_least))
    return next(int(factor * power) for factor in (1, 2, 5, 10) if factor * power >= at_least)


def time_ticks(span: Span, began: datetime, ended: datetime) -> list[Tick]:
    """Return the labels of the axis of time, in the time zone of ``began``: round times away from the edges."""
    midnight = began.replace(hour=0, minute=0, second=0, microsecond=0)
    passed = math.ceil((began - midnight) / span.step)
    seconds = (ended - began).total_seconds()
    found = []
    # Adding to a local time keeps the wall clock round over a change of daylight saving.
    while (moment := midnight + passed * span.step).astimezone(UTC) <= ended.astimezone(UTC):
        place = (moment.astimezone(UTC) - began.astimezone(UTC)).total_seconds() / seconds * 100
        if EDGE <= place <= 100 - EDGE:
            found.append(Tick(round(place, 2), f"{moment:{span.label}}"))
        passed += 1
    return found


def _line(steps: Sequence[tuple[datetime, float]], began: datetime, ended: datetime, top: float) -> str:
    seconds = (ended - began).total_seconds()

    def x(at: datetime) -> float:
        return (at - began).total_seconds() / seconds * SHEET_SIZE

    def y(length: float) -> str:
        return _number((1 - length / top) * SHEET_SIZE)

    (at, length), *others = steps
    start = min(x(at), SHEET_SIZE - MIN_WIDTH)
    others_drawn = "".join(f"H{_number(x(later))}V{y(most)}" for later, most in others)
    return f"M{_number(start)} {y(length)}{others_drawn}H{SHEET_SIZE}"


def within(samples: Sequence[Sample], began: datetime, ended: datetime) -> list[Sample]:
    """Return the samples of this window. The first is the length at its start, if known."""
    earlier = [length for at, length in samples if at <= began]
    inside = [(at, length) for at, length in samples if began < at <= ended]
    return ([(began, earlier[-1])] if earlier else []) + inside


def thinned(steps: Sequence[Sample], began: datetime, ended: datetime, most: int) -> list[Sample]:
    """Return at most ``most`` + 1 samples: the first, then the highest and the last of each interval."""
    if len(steps) <= most:
        return list(steps)
    buckets = most // 2
    interval = (ended - began) / buckets
    kept = [steps[0]]
    for _, group in groupby(steps[1:], key=lambda step: min(int((step[0] - began) / interval), buckets - 1)):
        bucket = list(group)
        highest = max(bucket, key=lambda step: step[1])
        kept.append(highest)
        if bucket[-1] is not highest:
            kept.append(bucket[-1])
    return kept


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
