"""Message ids: UUID version 1, their time in ticks, and their order."""

import multiprocessing
import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guardian_store import _ids as ids
from guardian_store._ids import Place

ticks = st.integers(ids.MIN_TICKS, ids.MAX_TICKS)
uuid1s = st.builds(lambda at, rest: ids.message_id(Place(at, rest)), ticks, st.integers(1 << 63, (3 << 62) - 1))


@given(uuid1s)
def test_an_id_converts_to_a_place_and_back(message_id):
    assert message_id.version == 1
    assert ids.message_id(ids.place(message_id)) == message_id
    assert ids.parse(message_id.hex) == message_id


@given(uuid1s)
def test_a_place_is_between_its_neighbours(message_id):
    at = ids.place(message_id)
    number, after, before = (one.ticks * (1 << 64) + one.rest for one in (at, at.next, at.previous))
    assert (before, after) == (number - 1, number + 1)


def test_places_of_different_ticks_are_neighbours():
    last, first = Place(7, ids.MAX_REST), Place(8, 0)
    assert (last.next, first.previous) == (first, last)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0, "0.0000000"),
        (1, "0.0000001"),
        (-1, "-0.0000001"),
        (17_000_000_001_234_567, "1700000000.1234567"),
        (ids.MAX_TICKS, "103072857660.6846975"),
        (ids.MIN_TICKS, "-12219292800.0000000"),
    ],
)
def test_a_timestamp_has_seven_decimals(at, text):
    assert ids.timestamp(ids.message_id(Place(at, 1 << 63))) == text


def test_ticks_agree_with_uuid1_and_the_clock():
    made = uuid.uuid1()
    assert abs(ids.place(made).ticks - ids.now()) < 10 * ids.TICKS_PER_SECOND
    assert abs(ids.now() / ids.TICKS_PER_SECOND - datetime.now(UTC).timestamp()) < 10


VALID = "0659396ee99911f1ba9b02fc00000001"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fred",
        str(uuid.UUID(VALID)),
        f"{{{VALID[:30]}}}",
        "ca3455390715482893e99cb2a8c1f43b",  # a uuid4
        VALID + "0",
        VALID[:-1],
        VALID[:-1] + "g",
        VALID[:-1] + "\N{ARABIC-INDIC DIGIT ONE}",
        VALID[:-1] + "\n",
        "0" * 32,
        "d224d19ae5fa11f1" + "0" * 16,
    ],
)
def test_only_a_uuid1_is_a_message_id(text):
    assert ids.parse(VALID) == ids.parse(VALID.upper())
    with pytest.raises(ValueError, match="is not a message id"):
        ids.parse(text)


def test_the_rest_of_an_id_is_random():
    drawn = ids.random_rests(1000)
    assert len(set(drawn)) == 1000
    for rest in drawn:
        made = ids.message_id(Place(0, rest))
        assert (made.variant, made.version) == (uuid.RFC_4122, 1)
        assert made.node >> 40 & 1, "without the multicast bit it could be a network card's address"


def test_a_forked_process_draws_other_rests():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        drawn = [rest for some in pool.map(ids.random_rests, [100, 100], chunksize=1) for rest in some]
        pool.close()
        pool.join()  # terminate() sends a signal, and an earlier test may have left a handler
    assert len({*drawn, *ids.random_rests(100)}) == 300
