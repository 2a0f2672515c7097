"""Turns of owners at the deleter, and when waiting costs an archive."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.rules.rows import StoredQueue
from queues.rules.turns import Waiting, has_waited_too_long, next_in_turn, seconds_to_archive
from rabbit.snapshot import ListedQueue

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
ALICE, BOB, NOBODY = 1, 2, None


def queue(name, seconds_ago=0, length=11):
    listed = ListedQueue("/", name, "classic", True, False, False, "rabbit@one", length, 0)
    return StoredQueue(None, *listed, decided_at=NOW - timedelta(seconds=seconds_ago))


def order(waiting, deleters=1):
    """Return the names in the order in which one deleter takes them."""
    waiting, last_turns, names = list(waiting), {}, []
    while one := next_in_turn(waiting, {}, last_turns, deleters):
        waiting.remove(one)
        names.append(one.queue.name)
        last_turns[one.group] = len(names)
    return names


def test_owners_take_turns_and_the_oldest_decision_of_each_is_first():
    waiting = [Waiting(queue(f"a{n}", 100 - n), ALICE) for n in range(3)]
    waiting += [Waiting(queue("b1", 5), BOB), Waiting(queue("b0", 9), BOB), Waiting(queue("n0", 1), NOBODY)]
    assert order(waiting) == ["a0", "b0", "n0", "a1", "b1", "a2"]


@pytest.mark.parametrize(
    ("running", "others_wait", "begins"),
    [({ALICE: 1}, True, "a"), ({ALICE: 2}, True, "b"), ({ALICE: 2}, False, "a"), ({ALICE: 3}, False, None)],
)
def test_one_owner_has_half_of_the_deleters_while_others_wait_and_never_the_last_one(running, others_wait, begins):
    waiting = [Waiting(queue("a", 50), ALICE)] + [Waiting(queue("b", 1), BOB)] * others_wait
    one = next_in_turn(waiting, running, {BOB: 1}, 4)
    assert (one.queue.name if one else None) == begins


@given(st.lists(st.tuples(st.sampled_from([ALICE, BOB, NOBODY]), st.integers(0, 1000)), max_size=30))
def test_every_deletion_gets_its_turn(given):
    waiting = [Waiting(queue(str(number), age), group) for number, (group, age) in enumerate(given)]
    assert sorted(order(waiting)) == sorted(one.queue.name for one in waiting)


@pytest.mark.parametrize(
    ("waiting", "groups", "seconds"), [(1, 1, 20), (6, 2, 20), (60, 1, 2), (1, 40, 6), (18, 4, 10 / 3)]
)
def test_while_many_wait_each_gets_less_time(waiting, groups, seconds):
    assert seconds_to_archive(waiting, groups, deleters=4, most=20, patience=60) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("length", "waited", "ran", "is_alarm_raised", "expected"),
    [
        (21, 60, 60, False, True),
        (20, 3600, 3600, False, False),
        (11, 60, 60, True, True),
        (21, 59, 3600, True, False),
        (21, 3600, 59, True, False),
    ],
    ids=["twice its limit", "waiting alone", "an alarm", "not for long", "no deleter ran"],
)
def test_waiting_costs_an_archive_only_if_it_endangers_the_broker(length, waited, ran, is_alarm_raised, expected):
    assert expected == has_waited_too_long(
        queue("a", waited, length),
        10,
        NOW,
        deleter_since=NOW - timedelta(seconds=ran),
        patience=timedelta(seconds=60),
        is_alarm_raised=is_alarm_raised,
    )
