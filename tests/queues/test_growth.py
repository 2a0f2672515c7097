from datetime import UTC, datetime, timedelta

import pytest

from queues.rules.growth import Growth, growth, recent_growth

START = datetime(2026, 1, 1, tzinfo=UTC)


def samples(*points):
    return [(START + timedelta(seconds=seconds), length) for seconds, length in points]


@pytest.mark.parametrize("points", [[], [(0, 5)], [(0, 5), (0.1, 500)]], ids=["none", "one", "too close"])
def test_too_few_samples_give_no_growth(points):
    assert growth(samples(*points), 100) is None


def test_a_growing_queue_reaches_its_limit_at_its_rate():
    assert growth(samples((0, 10), (10, 30)), 100) == Growth(2.0, 35.0)


def test_a_shrinking_or_constant_queue_never_reaches_its_limit():
    assert growth(samples((0, 30), (10, 10)), 100) == Growth(-2.0, None)
    assert growth(samples((0, 30), (10, 30)), 100) == Growth(0.0, None)


def test_a_queue_over_its_limit_has_no_time_to_the_limit():
    assert growth(samples((0, 10), (10, 300)), 100) == Growth(29.0, None)


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        (((0, 0), (5, 1000), (100, 1000)), 0),
        (((0, 0), (60, 1000), (100, 800)), (800 - 1000) / 30),
        (((0, 0), (60, 500), (100, 1000)), 10),
    ],
    ids=["a burst that is over", "a burst that drains", "a trend"],
)
def test_what_ended_half_a_minute_ago_is_no_trend(points, rate):
    assert growth(samples(*points), 8_000).per_second == pytest.approx(rate)


@pytest.mark.parametrize("points", [(), ((-500, 7),)], ids=["samples are pruned", "the last sample is old"])
def test_an_idle_queue_is_steady(points):
    now = START + timedelta(hours=1)
    first_seen = START - timedelta(days=1)
    assert recent_growth(samples(*points), 7, now, first_seen, 100) == Growth(0.0, None)


def test_lengths_from_before_a_queue_was_declared_again_do_not_count():
    now = START + timedelta(seconds=60)
    assert recent_growth(samples((-5, 90), (50, 10)), 30, now, START, 100).per_second == 2.0
