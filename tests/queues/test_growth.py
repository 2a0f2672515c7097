"""How fast a queue grows, and when it reaches its deletion limit."""

from datetime import UTC, datetime, timedelta

import pytest

from queues.rules.growth import Growth, growth

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
