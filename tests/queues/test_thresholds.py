"""The rule for one queue's state, and the sources of its thresholds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.rules.brake import brake_limit
from queues.rules.thresholds import (
    DELETING,
    OK,
    WARNED,
    Action,
    BrokerState,
    MemoryPressure,
    QueueLoad,
    Thresholds,
    judge,
    relief_bytes,
    resolve,
)
from rabbit.memory import NodeMemory

LIMITS = Thresholds(warn=5, max=10)
states = st.sampled_from([OK, WARNED, DELETING])
lengths = st.integers(0, 20)
pairs = st.tuples(st.integers(1, 1000), st.integers(1, 1000)).map(lambda pair: Thresholds(min(pair), max(pair) + 1))


@pytest.mark.parametrize(
    ("state", "length", "judgement"),
    [
        (OK, 5, (WARNED, Action.WARN)),
        (WARNED, 4, (OK, Action.RECOVER)),
        (WARNED, 0, (OK, Action.RECOVER)),
        (WARNED, 10, (WARNED, Action.NOTHING)),
        (OK, 11, (DELETING, Action.DELETE)),
    ],
)
def test_a_queue_is_warned_about_at_its_threshold_and_deleted_past_its_limit(state, length, judgement):
    assert judge(state, length, LIMITS, spared=False) == judgement


@given(states, lengths)
def test_a_spared_queue_is_never_deleted(state, length):
    assert judge(state, length, LIMITS, spared=True).action is not Action.DELETE


@given(states, st.booleans())
def test_an_unknown_length_changes_nothing(state, spared):
    assert judge(state, None, LIMITS, spared=spared) == (state, Action.NOTHING)


@given(states, lengths, st.booleans())
def test_judging_the_same_length_twice_repeats_only_deletions(state, length, spared):
    first = judge(state, length, LIMITS, spared=spared)
    second = judge(first.state, length, LIMITS, spared=spared)
    assert second.state == first.state
    assert second.action in ((Action.DELETE,) if first.action is Action.DELETE else (Action.NOTHING,))


@given(pairs, st.integers(0, 3000), st.floats(0, 2), st.integers(0, 3000))
def test_memory_pressure_keeps_the_limit_between_warning_and_maximum(pair, held, memory, relief):
    warn, most = MemoryPressure(pair)(QueueLoad(7, held), BrokerState(memory, relief))
    assert warn == pair.warn
    assert pair.warn <= most <= pair.max


def test_memory_pressure_does_not_lower_the_limit_of_queues_that_hold_little():
    assert MemoryPressure(LIMITS)(QueueLoad(9, 3), BrokerState(memory=1.0, relief=4)) == LIMITS
    assert MemoryPressure(LIMITS)(QueueLoad(9, 2**40), BrokerState(memory=1.0)) == LIMITS


def test_at_the_watermark_queues_that_hold_much_are_limited_to_the_warning_threshold():
    assert MemoryPressure(LIMITS)(QueueLoad(9, 4), BrokerState(memory=1.0, relief=4)) == Thresholds(5, 5)


@given(pairs, st.floats(0.8, 1), st.floats(0.8, 1))
def test_fuller_memory_never_raises_the_limit(pair, one, other):
    low, high = sorted([one, other])
    policy = MemoryPressure(pair)
    queue = QueueLoad(5000, 1)
    assert policy(queue, BrokerState(high, 0)).max <= policy(queue, BrokerState(low, 0)).max


def test_thresholds_come_from_the_queue_then_the_user_then_the_policy():
    assert resolve((1, None), (None, 7), LIMITS) == Thresholds(1, 7)
    assert resolve((None, None), (2, 7), LIMITS) == Thresholds(2, 7)
    assert resolve((None, None), (None, None), LIMITS) == LIMITS


def test_the_warning_threshold_is_at_most_the_deletion_limit():
    # An owner lowers the maximum of a Pulse user below what an operator set for one of its queues.
    assert resolve((9, None), (2, 6), LIMITS) == Thresholds(6, 6)
    assert resolve((None, 3), (None, None), LIMITS) == Thresholds(3, 3)


def test_a_threshold_of_zero_counts_as_set():
    assert resolve((0, None), (2, None), LIMITS).warn == 0


def test_only_the_largest_queues_relieve_a_node_as_far_as_needed():
    held = [300, 200, 40, 40, 9]
    assert relief_bytes(NodeMemory(1000, 1000), held) == 300  # 200 too many
    assert relief_bytes(NodeMemory(1120, 1000), held) == 200
    assert relief_bytes(NodeMemory(2000, 1000), held) == 40
    assert relief_bytes(NodeMemory(800, 1000), held) == math.inf
    assert relief_bytes(NodeMemory(1000, 1000), []) == math.inf


@given(st.lists(st.integers(0, 10_000)), st.integers(0, 20_000))
def test_the_queues_that_relieve_a_node_are_no_more_than_needed_and_none_holds_little(held, used):
    node = NodeMemory(used, 10_000)
    chosen = [size for size in held if size >= relief_bytes(node, held)]
    assert all(size >= 0.01 * node.watermark for size in chosen)
    smallest = min(chosen, default=0)
    assert sum(size for size in chosen if size > smallest) < max(used - 0.8 * node.watermark, 1)


def test_the_brake_is_its_number_or_a_quarter_of_all_queues():
    assert brake_limit(50, 100) == 50
    assert brake_limit(50, 400) == 100
