from hypothesis import given
from hypothesis import strategies as st

from rabbit.arguments import Difference, differences

plain = st.text(st.characters(codec="utf-8", exclude_characters="'\0\r\n"), min_size=1, max_size=20)
values = st.one_of(st.booleans(), st.integers(-(2**31), 2**31), plain)
arguments = st.dictionaries(st.sampled_from(["x-a", "x-b", "x-message-ttl", "x-expires"]), values)


@given(arguments, arguments)
def test_differences_are_symmetric(wanted, found):
    back = [Difference(one.argument, one.wanted, one.found) for one in differences(found, wanted)]
    assert differences(wanted, found) == back


@given(arguments, arguments)
def test_correcting_every_difference_leaves_none(wanted, found):
    corrected = dict(found)
    for one in differences(wanted, found):
        corrected[one.argument] = one.wanted
    assert differences(wanted, corrected) == []


def test_a_difference_has_the_value_found_and_the_value_wanted():
    assert differences({"x-expires": 5, "x-new": "a"}, {"x-expires": 6, "x-old": True}) == [
        Difference("x-expires", found=6, wanted=5),
        Difference("x-new", found=None, wanted="a"),
        Difference("x-old", found=True, wanted=None),
    ]


def test_a_missing_queue_type_equals_classic():
    assert differences({"x-queue-type": "classic"}, {}) == differences({}, {"x-queue-type": "classic"}) == []
    assert differences({"x-queue-type": "classic"}, {"x-queue-type": "quorum"}) == [
        Difference("x-queue-type", found="quorum", wanted=None)
    ]


def test_a_number_equals_neither_a_boolean_nor_a_string():
    assert len(differences({"a": 1, "b": 1, "c": 1}, {"a": True, "b": "1", "c": 1.0})) == 3
