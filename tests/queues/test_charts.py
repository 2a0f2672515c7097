"""The geometry of the length bar and of the chart of lengths over time."""

import re
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from queues.rules import charts
from queues.rules.thresholds import Thresholds
from rabbit.entities import RateSample

BEGAN = datetime(2026, 3, 1, 12, tzinfo=UTC)
ENDED = BEGAN + timedelta(hours=1)
LIMITS = Thresholds(5, 10)


def samples(*figures):
    """Return samples at these minutes of the window, of these lengths."""
    return [(BEGAN + timedelta(minutes=minute), length) for minute, length in figures]


def chart(figures, limits=LIMITS, *, has_maximum=True, to_limit=False):
    return charts.chart(figures, BEGAN, ENDED, limits, has_maximum=has_maximum, to_limit=to_limit)


def places(path):
    """Return the x and the y coordinates of a path."""
    x = [float(number) for number in re.findall(r"[MH]([\d.-]+)", path)]
    y = [float(number) for number in re.findall(r"(?:V|M[\d.]+ )([\d.-]+)", path)]
    return x, y


def test_the_last_length_before_the_window_starts_the_line():
    drawn = chart(samples((-90, 7), (-30, 4), (30, 8)))
    assert drawn.line.startswith("M0 ")
    assert (drawn.lowest, drawn.highest, drawn.last) == (4, 8, 8)


def test_a_length_holds_until_the_next_one():
    drawn = chart(samples((0, 0), (30, 11)))
    assert drawn.line == "M0 1000H500V266.7H1000"  # 11 on a scale up to 15, all the way to the end
    assert drawn.area == "M0 1000H500V266.7H1000V1000H0Z"


def test_the_line_of_a_new_queue_starts_when_it_was_first_seen_and_can_be_seen():
    drawn = chart(samples((30, 3)))
    assert drawn.line.startswith("M500 ")
    assert drawn.lowest == 3
    assert chart(samples((60, 3))).line.startswith("M990 ")


def test_without_a_sample_there_is_no_chart():
    assert chart([]) is None
    assert chart(samples((61, 3))) is None


@pytest.mark.parametrize(
    ("options", "max_at", "warn_at"),
    [({}, None, None), ({"to_limit": True}, 0, 50), ({"to_limit": True, "has_maximum": False}, None, 0)],
    ids=["fits the lengths", "up to the limit", "without a limit"],
)
def test_thresholds_are_drawn_if_the_scale_reaches_them(options, max_at, warn_at):
    drawn = chart(samples((0, 3)), **options)
    assert (drawn.max_at, drawn.warn_at) == (max_at, warn_at)


@pytest.mark.parametrize(
    ("highest", "step"), [(0, 1), (1, 1), (5, 1), (6, 2), (11, 5), (26, 10), (8_000, 2_000), (2**63, 2 * 10**18)]
)
def test_gridlines_are_at_round_values(highest, step):
    assert charts.tick_step(highest) == step


def test_gridlines_have_labels():
    assert [tick.label for tick in chart(samples((0, 3))).ticks] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("span", "labels"),
    [
        ("hour", ["13:45", "14:00", "14:15", "14:30"]),
        ("day", ["18:00", "00:00", "06:00", "12:00"]),
        ("week", ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]),
    ],
)
def test_times_are_labelled_at_round_hours_of_the_readers_zone(span, labels):
    ended = datetime(2026, 3, 1, 13, 38, tzinfo=UTC).astimezone(ZoneInfo("Europe/Berlin"))
    shown = charts.SPANS[span]
    ticks = charts.time_ticks(shown, ended - shown.duration, ended)
    assert [tick.label for tick in ticks] == labels


def test_times_stay_round_over_a_change_of_daylight_saving():
    ended = datetime(2026, 3, 29, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    day = charts.SPANS["day"]
    began = (ended.astimezone(UTC) - day.duration).astimezone(ended.tzinfo)
    assert [tick.label for tick in charts.time_ticks(day, began, ended)] == ["18:00", "00:00", "06:00"]


def test_a_sparkline_fills_its_height_unless_little_changed_and_is_empty_without_samples():
    assert charts.sparkline(samples((0, 0), (30, 4)), BEGAN, ENDED) == "M0 1000H500V0H1000"
    assert charts.sparkline(samples((0, 90), (30, 100)), BEGAN, ENDED) == "M0 600H500V400H1000"
    assert charts.sparkline(samples((0, 0)), BEGAN, ENDED) == "M0 500H1000"
    assert charts.sparkline([], BEGAN, ENDED) == ""


def test_rates_share_a_scale_and_hold_since_the_sample_before():
    rates = [
        RateSample(BEGAN + timedelta(minutes=minute), *figures)
        for minute, *figures in ((-15, 9, 9, 9), (15, 8, 4, 0), (30, 2, 4, 1))
    ]
    drawn = charts.rate_chart(rates, BEGAN, ENDED)
    assert {one.name: (one.line, one.last) for one in drawn.lines} == {
        "published": ("M0 0H250V750H1000", 2),
        "acknowledged": ("M0 500H250V500H1000", 4),
        "redelivered": ("M0 1000H250V875H1000", 1),
    }
    assert (drawn.top, drawn.points, drawn.is_part) == (8, [[0, 8, 4, 0], [900, 2, 4, 1]], False)
    assert charts.rate_chart(rates[1:], BEGAN, ENDED).is_part
    assert charts.rate_chart(rates[:1], BEGAN, ENDED) is None


def test_events_close_to_each_other_share_a_mark():
    events = [(BEGAN + timedelta(minutes=minute), str(minute)) for minute in (6, 7, 30)]
    assert charts.marks(events, BEGAN, ENDED) == [charts.Mark(10, events[:2]), charts.Mark(50, events[2:])]


many = st.lists(
    st.tuples(st.floats(-3600, 3600, allow_nan=False), st.integers(0, 2**63 - 1)), min_size=1, max_size=1500
).map(lambda figures: sorted((BEGAN + timedelta(seconds=seconds), length) for seconds, length in figures))


@given(many, st.integers(1, 10_000), st.integers(1, 10_000), st.booleans())
def test_any_samples_stay_within_the_chart(figures, warn, more, has_maximum):
    drawn = chart(figures, Thresholds(warn, warn + more), has_maximum=has_maximum, to_limit=True)
    x, y = places(drawn.line)
    assert x == sorted(x)
    assert all(0 <= place <= 1000 for place in x + y)
    assert x[-1] == 1000
    assert 0 <= drawn.warn_at <= 100
    assert drawn.lowest <= drawn.last <= drawn.highest


@given(many)
def test_thinning_keeps_the_maximum_the_first_and_the_last(figures):
    steps = charts.within(figures, BEGAN, ENDED)
    if steps:
        thinned = charts.thinned(steps, BEGAN, ENDED, charts.MAX_POINTS)
        assert len(thinned) <= charts.MAX_POINTS + 1
        assert max(length for _, length in thinned) == max(length for _, length in steps)
        assert (thinned[0], thinned[-1]) == (steps[0], steps[-1])
        assert [at for at, _ in thinned] == sorted(at for at, _ in thinned)


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
@example(2_000, 4_000, 8_000)
def test_a_bar_shows_the_share_of_the_deletion_limit_and_is_never_more_than_full(length, warn, most):
    bar = charts.bar(length, Thresholds(warn, most))
    assert bar == pytest.approx((min(100, 100 * length / most), min(100, 100 * warn / most)), abs=0.01)
