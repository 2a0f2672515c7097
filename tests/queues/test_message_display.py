import json
import time

import pytest

from queues.archives import message_display
from queues.archives.message_display import (
    MAX_CHARACTERS,
    MAX_HEADERS,
    MAX_HEX_BYTES,
    UNFOLDED_CHARACTERS,
    body_shown,
    line,
)
from rabbit.fetching import Fetched


def message(body=b"", properties=None, headers=None, exchange="", routing_key="k", redelivered=False):
    return Fetched(body, properties or {}, headers or {}, exchange, routing_key, redelivered)


@pytest.mark.parametrize(
    ("body", "format_", "shown"),
    [
        (b"", "", ""),
        (b'{"a":[1,"\xc3\xa9"]}', "JSON", '{\n  "a": [\n    1,\n    "é"\n  ]\n}'),
        (b'{"a":', "text", '{"a":'),
        (b"[NaN]", "text", "[NaN]"),
        (b'["\xe2\x80\xae"]', "JSON", '[\n  "\\u202e"\n]'),
        (b"<script>alert(1)</script>", "text", "<script>alert(1)</script>"),
        (b"a\r\nb\tc", "text", "a\nb\tc"),
        ("\u202eleft\u200f \x00\x1b[31m\x7f\x85".encode(), "text", "\\u202eleft\\u200f \\x00\\x1b[31m\\x7f\\x85"),
        (b"\x89PNG\r\n", "hex", "89 50 4e 47 0d 0a"),
        ("Grüße, שלום 🎉".encode(), "text", "Grüße, שלום 🎉"),
    ],
)
def test_a_body_is_shown_as_json_text_or_hex(body, format_, shown):
    found = body_shown(body)
    assert (found.format, found.start, found.rest, found.is_cut) == (format_, shown, "", False)
    assert found.size == len(body)


@pytest.mark.parametrize("most", range(5, 15))
def test_json_is_cut_at_any_character(most):
    whole = body_shown(b"[1,2]").start
    found = body_shown(b"[1,2]", most)
    assert (found.start, found.is_cut) == (whole[:most], len(whole) > most)


def test_a_long_body_is_merged_at_the_end_of_a_line():
    text = "\n".join("x" * 70 for _ in range(100))
    found = body_shown(text.encode())
    assert len(found.start) <= UNFOLDED_CHARACTERS
    assert f"{found.start}\n{found.rest}" == text
    short = body_shown(b"z\n" * 100)
    assert short.start == "\n".join("z" * 40)
    one_line = body_shown(b"y" * 5_000)
    assert (len(one_line.start), len(one_line.rest)) == (UNFOLDED_CHARACTERS, 5_000 - UNFOLDED_CHARACTERS)


def test_a_binary_body_of_100_megabytes_is_cut():
    found = body_shown(b"\xff" * 100_000_000)
    assert len((found.start + found.rest).split()) == MAX_HEX_BYTES
    assert found.is_cut


@pytest.mark.parametrize("character", ["x", "🎉"])
def test_a_body_of_100_megabytes_is_cut_in_no_time(character):
    body = character.encode() * (100_000_000 // len(character.encode()))
    began = time.thread_time()
    found = body_shown(body)
    assert time.thread_time() - began < 0.5
    assert found.start + found.rest == character * MAX_CHARACTERS
    assert (found.is_cut, found.size) == (True, len(body))


def test_a_character_cut_in_the_middle_does_not_make_a_text_binary():
    assert body_shown(("x" + "é" * 200_000).encode()).format == "text"


@pytest.mark.parametrize("depth", [100, 600, 5_000])
def test_deeply_nested_json_stays_bounded(depth):
    body = b"[" * depth + b",".join([b"1"] * 20_000) + b"]" * depth
    began = time.monotonic()
    found = body_shown(body)
    assert time.monotonic() - began < 1
    assert len(found.start) + len(found.rest) <= MAX_CHARACTERS


def test_properties_and_headers_are_rows():
    properties = {"content_type": "text/plain\u202e", "delivery_mode": 2, "priority": 0}
    headers = {"n": 1, "table": {"a": [1, None]}, "flag": True, "\x01": "x" * 2_000}
    found = message_display.shown(7, message(b"x", properties, headers, "exchange/alice/e", "a.b", redelivered=True))
    assert found.position == 7
    assert dict(found.properties) == {
        "exchange": "exchange/alice/e", "routing_key": "a.b", "redelivered": "yes", "content_type": "text/plain\\u202e",
        "delivery_mode": "2 (persistent)", "priority": "0",
    }  # fmt: skip
    assert dict(found.headers) == {
        "n": "1", "table": '{"a": [1, null]}', "flag": "true", "\\x01": "x" * 1_000 + "…",
    }  # fmt: skip


def test_many_headers_are_counted():
    found = message_display.shown(1, message(headers={str(number): number for number in range(MAX_HEADERS + 5)}))
    assert (len(found.headers), found.more_headers) == (MAX_HEADERS, 5)
    assert found.properties[0].value == "(default)"


def test_a_line_has_the_beginning_of_the_body():
    assert line(1, message(b"a\n\n  b\x00")).preview == "a b\\x00"
    assert line(1, message(b"\xff\x00")).preview == "ff 00"
    assert line(1, message(json.dumps({"a": "x" * 500}).encode())).preview.startswith('{"a": "xxx')
    assert len(line(1, message(b"z" * 10_000)).preview) == message_display.PREVIEW_CHARACTERS
