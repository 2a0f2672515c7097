from hypothesis import given
from hypothesis import strategies as st

from queues.rules.shares import Kept, room, share, to_delete

ALICE, BOB, NOBODY = 1, 2, None


def test_an_owner_past_the_share_loses_their_own_oldest_archives():
    archives = [Kept(1, BOB, 10), *(Kept(number, ALICE, 10) for number in range(2, 6))]
    assert to_delete(archives, 100) == [2, 3]


def test_a_new_archive_has_the_room_that_the_promised_ones_of_its_group_leave():
    promised = [Kept(1, ALICE, 3), Kept(2, ALICE, 4), Kept(3, BOB, 9), Kept(4, NOBODY, 5), Kept(5, ALICE, 1)]
    assert [room(promised, 100, new) for new in (5, 3, 4)] == [13, 20, 20]


def test_archives_without_owner_have_one_share():
    assert to_delete([Kept(1, NOBODY, 15), Kept(2, NOBODY, 15), Kept(3, ALICE, 1)], 100) == [1]


def test_when_all_are_too_many_the_oldest_of_the_largest_group_goes():
    archives = [Kept(group * 10 + number, group, 10) for group in range(1, 7) for number in range(1 + (group == 3))]
    assert to_delete(archives, 60) == [30]


@given(
    st.lists(st.tuples(st.sampled_from([ALICE, BOB, NOBODY, 4, 5, 6, 7, 8]), st.integers(1, 20)), max_size=40),
    st.integers(0, 39),
)
def test_nothing_is_past_the_bounds_afterwards_and_the_new_archive_stays(given, new):
    archives = [Kept(number, group, size) for number, (group, size) in enumerate(given)]
    deleted = to_delete(archives, 100, new)
    left = [one for one in archives if one.pk not in deleted]
    assert new not in deleted
    assert sum(one.bytes for one in left) <= 100
    for group in {one.group for one in left}:
        assert sum(one.bytes for one in left if one.group == group) <= share(100)
