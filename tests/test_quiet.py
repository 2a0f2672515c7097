"""The quiet period: few messages, and the last of them true."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from queues.quiet import MessageKind, QuietPeriod, next_message
from queues.thresholds import OK, WARNED

START = datetime(2026, 1, 1, tzinfo=UTC)
PERIOD = 900


def play(states, seconds_between=60, quiet_seconds=PERIOD):
    """Go through these states, one each so many seconds, and return what was said and what is remembered."""
    quiet, state, said, now = QuietPeriod(), OK, [], START
    for following in states:
        now += timedelta(seconds=seconds_between)
        quiet, message = next_message(
            quiet, following, changed=following != state, now=now, quiet_seconds=quiet_seconds
        )
        state = following
        if message is not MessageKind.NONE:
            said.append((message, state))
    return said, quiet, state, now


def test_the_first_warning_goes_out_at_once():
    assert play([WARNED])[0] == [(MessageKind.WARNING, WARNED)]


def test_the_first_recovery_in_the_period_goes_out_at_once():
    assert play([WARNED, OK])[0] == [(MessageKind.WARNING, WARNED), (MessageKind.RECOVERY, OK)]


def test_further_changes_in_the_period_are_not_told_one_by_one():
    assert len(play([WARNED, OK, WARNED, OK, WARNED])[0]) == 2


def test_at_its_end_one_message_says_where_a_queue_stands_that_was_last_told_otherwise():
    said, quiet, *_ = play([WARNED, OK] + [WARNED] * 15)
    assert said[-1] == (MessageKind.SUMMARY, WARNED)
    assert len(said) == 3
    assert quiet.notified_state == WARNED


def test_the_summary_counts_the_changes_that_were_not_told():
    _, quiet, *_ = play([WARNED, OK, WARNED, OK, WARNED])
    assert quiet.folded == 3


def test_at_its_end_nothing_is_said_where_the_last_message_is_true():
    assert len(play([WARNED, OK, WARNED] + [OK] * 20)[0]) == 2


def test_a_recovery_after_the_period_is_told():
    said, *_ = play([WARNED] * 20 + [OK])
    assert said == [(MessageKind.WARNING, WARNED), (MessageKind.RECOVERY, OK)]


def test_without_a_quiet_period_every_change_is_told():
    said, *_ = play([WARNED, OK, WARNED, OK], quiet_seconds=0)
    assert [message for message, _ in said] == [
        MessageKind.WARNING,
        MessageKind.RECOVERY,
        MessageKind.WARNING,
        MessageKind.RECOVERY,
    ]


histories = st.lists(st.sampled_from([OK, WARNED]), max_size=60)


@given(histories, st.integers(1, 2000), st.sampled_from([0, 60, PERIOD]))
def test_the_last_message_tells_the_truth_once_the_period_is_over(history, seconds_between, quiet_seconds):
    said, quiet, state, now = play(history, seconds_between, quiet_seconds)
    later = now + timedelta(seconds=PERIOD + 1)
    quiet, message = next_message(quiet, state, changed=False, now=later, quiet_seconds=quiet_seconds)
    if message is not MessageKind.NONE:
        said.append((message, state))
    assert (said[-1][1] if said else OK) == state
    assert quiet.notified_state == state


@given(histories, st.integers(1, 2000))
def test_nobody_gets_more_than_three_messages_a_period_about_one_queue(history, seconds_between):
    quiet, state, moments, now = QuietPeriod(), OK, [], START
    for following in history:
        now += timedelta(seconds=seconds_between)
        quiet, message = next_message(quiet, following, changed=following != state, now=now, quiet_seconds=PERIOD)
        state = following
        if message is not MessageKind.NONE:
            moments.append(now)
    for moment in moments:
        inside = [other for other in moments if moment <= other < moment + timedelta(seconds=PERIOD)]
        assert len(inside) <= 3
