"""The time buckets of the store on Cassandra."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guardian_store._ids import MAX_REST, MAX_TICKS, MIN_TICKS, TICKS_PER_SECOND, Place
from message_store.cassandra import buckets
from message_store.cassandra.buckets import Bucket
from message_store.queues import MAX_TTL_SECONDS

TICKS = st.integers(MIN_TICKS, MAX_TICKS)


@given(ticks=TICKS, rest=st.integers(0, MAX_REST))
def test_every_id_has_one_bucket_which_covers_its_time(ticks, rest):
    bucket = buckets.bucket_of(Place(ticks, rest))
    assert bucket.start <= ticks < bucket.end
    assert [bucket] == [one for one in buckets.covering(ticks) if one.level == bucket.level]


@given(ticks=TICKS, rest=st.integers(0, MAX_REST), level=st.sampled_from(buckets.LEVELS))
def test_an_id_can_be_put_into_a_bucket_of_each_level(ticks, rest, level):
    assert buckets.bucket_of(Place(ticks, buckets.with_level(rest, level))) == buckets.covering(ticks)[level]
    assert buckets.with_level(rest, level) >> 3 == rest >> 3


@given(ticks=TICKS)
def test_a_bucket_lies_within_one_of_the_next_level(ticks):
    found = buckets.covering(ticks)
    assert all(wide.start <= narrow.start < narrow.end <= wide.end for wide, narrow in pairwise(found))
    assert found[-1].end - found[-1].start == TICKS_PER_SECOND


def test_a_message_goes_to_the_widest_bucket_that_is_not_full():
    found = buckets.covering(17 * 10**15)
    assert buckets.choose(17 * 10**15, []) == found[0]
    assert buckets.choose(17 * 10**15, [found[0], found[2]]) == found[1]
    assert buckets.choose(17 * 10**15, [found[0], found[1]]) == found[2]
    assert buckets.choose(17 * 10**15, found) == found[-1]


@pytest.mark.parametrize(("messages", "size"), [(1, 100), (20, 2000), (1, 5000)])
def test_a_bucket_is_full_after_its_messages_or_bytes_on_average(messages, size, monkeypatch):
    monkeypatch.setattr(buckets, "MESSAGES", 100)
    monkeypatch.setattr(buckets, "BYTES", 20_000)
    random.seed(1)
    full = sum(buckets.fills(Bucket(0, 3), messages, size) for _ in range(100_000))
    assert full == pytest.approx(100_000 * max(messages / 100, size / 20_000), rel=0.2)


def test_the_narrowest_bucket_is_never_full():
    assert not buckets.fills(Bucket(0, buckets.FINEST), 10**6, 10**9)


@given(ttl=st.integers(-100, MAX_TTL_SECONDS))
def test_the_index_keeps_a_bucket_at_least_as_long_as_its_messages(ttl):
    assert buckets.lifetime(ttl) >= ttl
    assert buckets.lifetime(3 * 86_400) == 3 * 86_400
