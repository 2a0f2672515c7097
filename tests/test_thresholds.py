"""The rule for one queue, and where its thresholds come from."""

from hypothesis import given
from hypothesis import strategies as st

from queues.thresholds import (
    DELETING,
    OK,
    WARNED,
    Action,
    BrokerState,
    MemoryPressure,
    Static,
    Thresholds,
    brake_limit,
    judge,
    long_length,
    resolve,
)

LIMITS = Thresholds(warn=5, max=10)
states = st.sampled_from([OK, WARNED, DELETING])
lengths = st.integers(0, 20)
pairs = st.tuples(st.integers(1, 1000), st.integers(1, 1000)).map(lambda pair: Thresholds(min(pair), max(pair) + 1))


def test_at_its_warn_length_a_queue_is_warned_about():
    assert judge(OK, 5, LIMITS, spared=False) == (WARNED, Action.WARN)


def test_below_its_warn_length_a_warned_queue_is_back_to_normal():
    assert judge(WARNED, 4, LIMITS, spared=False) == (OK, Action.RECOVER)


def test_at_its_maximum_a_queue_stays():
    assert judge(WARNED, 10, LIMITS, spared=False) == (WARNED, Action.NOTHING)


def test_past_its_maximum_a_queue_is_to_be_deleted_even_when_nobody_was_warned():
    assert judge(OK, 11, LIMITS, spared=False) == (DELETING, Action.DELETE)


@given(states, lengths)
def test_what_is_spared_is_never_deleted(state, length):
    assert judge(state, length, LIMITS, spared=True).action is not Action.DELETE


@given(states, st.booleans())
def test_an_unknown_length_changes_nothing(state, spared):
    assert judge(state, None, LIMITS, spared=spared) == (state, Action.NOTHING)


@given(states, lengths, st.booleans())
def test_judging_the_same_length_twice_does_nothing_the_second_time_unless_it_deletes(state, length, spared):
    first = judge(state, length, LIMITS, spared=spared)
    second = judge(first.state, length, LIMITS, spared=spared)
    assert second.state == first.state
    assert second.action in ((Action.DELETE,) if first.action is Action.DELETE else (Action.NOTHING,))


@given(pairs, st.integers(0, 3000), st.floats(0, 2), st.integers(0, 3000))
def test_memory_pressure_never_lowers_the_maximum_below_the_warn_length_nor_raises_it(pair, length, memory, long):
    warn, most = MemoryPressure(pair)(length, BrokerState(memory, long))
    assert warn == pair.warn
    assert pair.warn <= most <= pair.max


def test_memory_pressure_leaves_short_queues_their_maximum():
    assert MemoryPressure(LIMITS)(3, BrokerState(memory=1.0, long=4)) == LIMITS


def test_at_the_watermark_the_longest_queues_may_have_their_warn_length_and_no_more():
    assert MemoryPressure(LIMITS)(9, BrokerState(memory=1.0, long=4)) == Thresholds(5, 5)


@given(pairs, st.floats(0.8, 1), st.floats(0.8, 1))
def test_the_fuller_the_memory_the_lower_the_maximum(pair, one, other):
    low, high = sorted([one, other])
    policy = MemoryPressure(pair)
    assert policy(5000, BrokerState(high, 0)).max <= policy(5000, BrokerState(low, 0)).max


def test_the_static_policy_gives_everybody_the_same():
    assert Static(LIMITS)(10_000, BrokerState(memory=2.0)) == LIMITS


def test_a_queues_own_thresholds_come_before_its_users_and_those_before_the_policys():
    assert resolve((1, None), (None, 7), LIMITS) == Thresholds(1, 7)
    assert resolve((None, None), (2, 7), LIMITS) == Thresholds(2, 7)
    assert resolve((None, None), (None, None), LIMITS) == LIMITS


def test_nobody_is_warned_later_than_at_the_maximum():
    # An owner lowers the maximum of an account below what an operator set for one of its queues.
    assert resolve((9, None), (2, 6), LIMITS) == Thresholds(6, 6)
    assert resolve((None, 3), (None, None), LIMITS) == Thresholds(3, 3)


def test_an_own_threshold_of_zero_is_one():
    assert resolve((0, None), (2, None), LIMITS).warn == 0


@given(st.lists(st.integers(0, 100), min_size=1))
def test_at_least_one_queue_and_about_a_tenth_are_among_the_longest(figures):
    at_least = long_length(figures)
    among = sum(figure >= at_least for figure in figures)
    assert among >= 1
    assert sum(figure > at_least for figure in figures) <= len(figures) // 10


def test_the_brake_is_its_number_or_a_quarter_of_all_whichever_is_larger():
    assert brake_limit(50, 100) == 50
    assert brake_limit(50, 400) == 100
