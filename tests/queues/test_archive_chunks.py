import struct
import zlib
from datetime import UTC, datetime
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from queues.archives import reading
from queues.archives.chunks import pack, unpack
from queues.archives.reading import as_json
from rabbit.fetching import Fetched
from tests.support.archives import encoded

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary().map(lambda value: b"\xff" + value)  # AMQP sends bytes of UTF-8 as a text, too
    | st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-1000, max_value=1000)
    | st.integers(0, 2**32).map(lambda at: datetime.fromtimestamp(at, UTC).replace(tzinfo=None))
)
tables = st.dictionaries(
    st.text(st.characters(codec="utf-8")), st.recursive(scalars, lambda inner: st.lists(inner), max_leaves=5)
)
properties = st.dictionaries(st.sampled_from(["content_type", "message_id", "type"]), st.text(max_size=20))
names = st.text(st.characters(codec="utf-8"), max_size=60)
fetched = st.builds(Fetched, st.binary(), properties, tables, names, names, st.booleans(), st.just(0))


@given(st.lists(fetched, max_size=2))
def test_messages_survive_a_round_trip(messages):
    assert [one.decode() for one in unpack([pack(map(encoded, messages))])] == messages


def test_a_chunk_of_an_earlier_version_is_readable():
    metadata = b'[["table", [["type", "t"]]], ["table", [["raw", ["bytes", "/w=="]], ["n", 1]]], "e", "k", true]'
    parts = b"".join(struct.pack(">I", len(part)) + part for part in (metadata, b"body", metadata, b""))
    first, second = (one.decode() for one in unpack([zlib.compress(parts)]))
    assert first == Fetched(b"body", {"type": "t"}, {"raw": b"\xff", "n": 1}, "e", "k", True)
    assert second == first._replace(body=b"")


@given(fetched)
def test_any_message_is_shown_as_json(message):
    import orjson

    shown = as_json(1, message)
    assert orjson.loads(orjson.dumps(shown))["position"] == 1


def test_a_body_is_shown_as_json_text_or_base64():
    def body(content):
        shown = as_json(1, Fetched(content, {}, {}, "", "", False))
        return shown["encoding"], shown["body"]

    assert body(b'{"a": 1}') == ("json", {"a": 1})
    assert body(b'{"a": NaN}') == ("text", '{"a": NaN}')
    assert body(b"<b>hello</b>") == ("text", "<b>hello</b>")
    assert body(b"\xff\x00") == ("base64", "/wA=")
    assert body(b"[" * reading.MAX_TEXT_BYTES)[0] == "text"
    assert body(b"1" * (reading.MAX_TEXT_BYTES + 1))[0] == "base64"
    assert body(b"") == ("text", "")
    for odd in (b"[1e999]", b'{"a": "\\ud800"}'):
        assert body(odd) == ("text", odd.decode())


def test_headers_are_shown_readably():
    at = datetime(2026, 1, 5, 12, tzinfo=UTC).replace(tzinfo=None)
    headers = {"at": at, "price": Decimal("1.25"), "raw": b"\xff", "inf": float("inf")}
    shown = as_json(7, Fetched(b"", {}, headers, "", "", False))["headers"]
    assert shown == {"at": "2026-01-05T12:00:00Z", "price": "1.25", "raw": "/w==", "inf": "inf"}
