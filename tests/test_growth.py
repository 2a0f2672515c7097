"""How fast a queue grows, and when it reaches its maximum."""

from datetime import UTC, datetime, timedelta

import pytest

from queues.growth import Growth, growth

START = datetime(2026, 1, 1, tzinfo=UTC)


def samples(*points):
    return [(START + timedelta(seconds=seconds), length) for seconds, length in points]


@pytest.mark.parametrize("points", [[], [(0, 5)], [(0, 5), (0.1, 500)]], ids=["none", "one", "too close"])
def test_too_few_samples_tell_no_pace(points):
    assert growth(samples(*points), 100) is None


def test_a_growing_queue_reaches_its_maximum_at_its_pace():
    assert growth(samples((0, 10), (10, 30)), 100) == Growth(2.0, 35.0)


def test_a_queue_that_shrinks_or_stands_never_does():
    assert growth(samples((0, 30), (10, 10)), 100) == Growth(-2.0, None)
    assert growth(samples((0, 30), (10, 30)), 100) == Growth(0.0, None)


def test_a_queue_that_is_past_its_maximum_has_no_time_left_to_tell():
    assert growth(samples((0, 10), (10, 300)), 100) == Growth(29.0, None)
