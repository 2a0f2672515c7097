"""The condition of a queue: its level and its word."""

import pytest

from queues.rules.states import Level, condition
from queues.rules.thresholds import Thresholds
from tests.support.toolbox import queue_row

LIMITS = Thresholds(2_000, 8_000)


def judged(seconds_to_max=None, *, was_deleted=False, **fields):
    queue = queue_row("queue/alice/builds", **{"ready": 10, "unacknowledged": 0, "consumers": 1, **fields})
    return condition(queue, LIMITS, seconds_to_max, was_deleted=was_deleted)


@pytest.mark.parametrize(
    ("fields", "level", "word"),
    [
        ({}, "normal", "healthy"),
        ({"ready": 0, "consumers": 0}, "normal", "healthy"),
        ({"ready": None}, "unknown", "length unknown"),
        ({"ready": None, "type": "stream"}, "normal", "no length"),
        ({"consumers": 0}, "warning", "no consumers"),
        ({"stalled_notified_at": "2026-01-01"}, "warning", "stalled"),
        ({"ready": 3_000, "state": "warned"}, "warning", "over threshold"),
        ({"ready": 9_000, "state": "warned", "unbounded": True}, "warning", "over threshold"),
        ({"ready": 9_000, "state": "warned"}, "critical", "over deletion limit"),
        ({"ready": 9_000, "state": "deleting"}, "critical", "about to be deleted"),
        ({"ready": 9_000, "state": "deleting", "block_reason": "brake"}, "critical", "deletion blocked"),
        ({"ready": 9_000, "state": "warned", "block_reason": "brake", "unbounded": True}, "warning", "over threshold"),
        ({"ready": 0, "state": "warned", "consumers": 1}, "normal", "healthy"),
        ({"state": "gone"}, "normal", "gone"),
        ({"state": "gone", "was_deleted": True}, "critical", "deleted"),
    ],
)
def test_a_queue_has_one_level_and_one_word(fields, level, word):
    assert judged(**fields) == (Level(level), word)


@pytest.mark.parametrize(
    ("seconds", "fields", "level", "word"),
    [
        (1_799, {}, "critical", "deleted in 30 min"),
        (1_800, {}, "normal", "healthy"),
        (1_800, {"ready": 3_000, "state": "warned"}, "warning", "deleted in 30 min"),
        (90_000, {"ready": 3_000, "state": "warned"}, "warning", "over threshold"),
        (60, {"unbounded": True}, "normal", "healthy"),
    ],
)
def test_what_is_lost_within_half_an_hour_is_critical(seconds, fields, level, word):
    assert judged(seconds, **fields) == (Level(level), word)
