"""The quiet period: few notifications, and the last one is true."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.rules.quiet import MessageKind, QuietPeriod, next_message
from queues.rules.thresholds import OK, WARNED

START = datetime(2026, 1, 1, tzinfo=UTC)
PERIOD = 900


def play(states, seconds_between=60, quiet_seconds=PERIOD):
    """Pass through these states at this interval; return the messages and the final quiet period, state and time."""
    quiet, state, messages, now = QuietPeriod(), OK, [], START
    for next_state in states:
        now += timedelta(seconds=seconds_between)
        quiet, message = next_message(
            quiet, next_state, changed=next_state != state, now=now, quiet_seconds=quiet_seconds
        )
        state = next_state
        if message is not MessageKind.NONE:
            messages.append((message, state))
    return messages, quiet, state, now


FIRST_TWO = [(MessageKind.WARNING, WARNED), (MessageKind.RECOVERY, OK)]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([WARNED], FIRST_TWO[:1]),
        ([WARNED, OK], FIRST_TWO),
        ([WARNED, OK, WARNED, OK, WARNED], FIRST_TWO),
        ([WARNED, OK, WARNED] + [OK] * 20, FIRST_TWO),
        ([WARNED, OK] + [WARNED] * 15, [*FIRST_TWO, (MessageKind.SUMMARY, WARNED)]),
        ([WARNED] * 20 + [OK], FIRST_TWO),
    ],
    ids=["warning", "recovery", "folded changes", "no summary", "summary", "recovery after the period"],
)
def test_changes_of_state_lead_to_few_messages(states, expected):
    assert play(states)[0] == expected


def test_the_summary_counts_merged_changes():
    _, quiet, *_ = play([WARNED, OK, WARNED, OK, WARNED])
    assert quiet.merged == 3


def test_without_a_quiet_period_every_change_is_notified():
    assert play([WARNED, OK, WARNED, OK], quiet_seconds=0)[0] == FIRST_TWO * 2


histories = st.lists(st.sampled_from([OK, WARNED]), max_size=60)


@given(histories, st.integers(1, 2000), st.sampled_from([0, 60, PERIOD]))
def test_the_last_message_is_true_after_the_period(history, seconds_between, quiet_seconds):
    messages, quiet, state, now = play(history, seconds_between, quiet_seconds)
    later = now + timedelta(seconds=PERIOD + 1)
    quiet, message = next_message(quiet, state, changed=False, now=later, quiet_seconds=quiet_seconds)
    if message is not MessageKind.NONE:
        messages.append((message, state))
    assert (messages[-1][1] if messages else OK) == state
    assert quiet.notified_state == state


@given(histories, st.integers(1, 2000))
def test_a_queue_causes_at_most_three_messages_per_period(history, seconds_between):
    quiet, state, moments, now = QuietPeriod(), OK, [], START
    for next_state in history:
        now += timedelta(seconds=seconds_between)
        quiet, message = next_message(quiet, next_state, changed=next_state != state, now=now, quiet_seconds=PERIOD)
        state = next_state
        if message is not MessageKind.NONE:
            moments.append(now)
    for moment in moments:
        inside = [other for other in moments if moment <= other < moment + timedelta(seconds=PERIOD)]
        assert len(inside) <= 3
