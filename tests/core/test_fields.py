"""Names and texts from the broker are stored with NUL, which PostgreSQL refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.fields import ESCAPE, STORED_NUL, decode, encode
from core.models import Removal
from queues.models import Watch

SPECIAL = st.text(st.sampled_from(["\0", STORED_NUL, ESCAPE, "a"]))


@given(SPECIAL | st.text())
def test_a_stored_name_has_no_nul_and_is_loaded_unchanged(name):
    assert "\0" not in encode(name)
    assert decode(encode(name)) == name


@given(SPECIAL, SPECIAL)
def test_two_names_are_stored_as_two(one, other):
    assert (encode(one) == encode(other)) is (one == other)


@given(SPECIAL | st.text())
def test_a_stored_name_has_no_more_characters_than_the_name_has_bytes(name):
    assert len(encode(name)) <= len(name.encode("utf-8", "surrogatepass"))


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["a\0b", STORED_NUL, ESCAPE + STORED_NUL, "\0" * 255])
def test_a_row_is_found_by_its_name(name):
    Removal.objects.create(kind="queue", vhost=name, name=name)
    Removal.objects.create(kind="queue", vhost="other", name="other")
    assert Removal.objects.get(name=name).vhost == name
    assert Removal.objects.filter(name__in=[name]).values_list("vhost", "name").get() == (name, name)


@pytest.mark.django_db
def test_texts_in_json_are_stored_with_nul():
    facts = {"a\0": ["\0", {"b": STORED_NUL}, 1, None, True]}
    Watch.objects.create(released=[["/", "\0"]], unguarded=facts)
    Watch.objects.update(misnamed_exchanges=["x\0"])
    watch = Watch.objects.get()
    assert (watch.released, watch.unguarded, watch.misnamed_exchanges) == ([["/", "\0"]], facts, ["x\0"])
