"""Show messages on a page: properties as rows, and the body as pretty-printed JSON, text or hex.

A body is never interpreted. It is cut, and invisible characters become escapes; the templates escape the rest.
"""

import codecs
import json
from typing import Any, NamedTuple

from queues.archives import reading
from rabbit.fetching import Fetched
from rabbit.names import readable, readable_text

MAX_CHARACTERS = 50_000

UNFOLDED_CHARACTERS = 2_000
UNFOLDED_LINES = 40
"""The part of a body that is shown at once. The rest is collapsed."""

MAX_HEX_BYTES = 2_048

PREVIEW_CHARACTERS = 90
MAX_PREVIEW_BYTES = 4 * PREVIEW_CHARACTERS + 4
"""The part of a body that ``line`` needs."""

MAX_VALUE_CHARACTERS = 1_000
MAX_HEADERS = 100

DELIVERY_MODES = {1: "1 (transient)", 2: "2 (persistent)"}


class Body(NamedTuple):
    """The part of a body that a page shows. ``rest`` is collapsed. ``is_cut``: there is more.

    ``format`` is JSON, text or hex, or empty without a body. ``size`` is in bytes.
    """

    format: str
    size: int
    start: str
    rest: str
    is_cut: bool


class Property(NamedTuple):
    name: str
    value: str


class MessageShown(NamedTuple):
    """A message on a page. ``more_headers`` are not shown."""

    position: int
    properties: list[Property]
    headers: list[Property]
    more_headers: int
    body: Body


class MessageLine(NamedTuple):
    position: int
    exchange: str
    routing_key: str
    content_type: str
    size: int
    preview: str


def shown(position: int, message: Fetched, most: int = MAX_CHARACTERS) -> MessageShown:
    """Return a message for a page, with at most ``most`` characters of its body."""
    plain = reading.as_json(position, message._replace(body=b"", cut=0))
    properties = dict(plain["properties"])
    if properties.get("delivery_mode") in DELIVERY_MODES:
        properties["delivery_mode"] = DELIVERY_MODES[properties["delivery_mode"]]
    rows = {
        "exchange": plain["exchange"] or "(default)",
        "routing_key": plain["routing_key"],
        "redelivered": "yes" if plain["redelivered"] else "no",
        **properties,
    }
    headers = list(plain["headers"].items())
    return MessageShown(
        position,
        [_property(name, value) for name, value in rows.items()],
        [_property(name, value) for name, value in headers[:MAX_HEADERS]],
        max(0, len(headers) - MAX_HEADERS),
        body_shown(message.body, most, message.cut),
    )


def line(position: int, message: Fetched) -> MessageLine:
    """Return a message for a list, with the beginning of its body in one line."""
    text, _ = _text_of(message.body, PREVIEW_CHARACTERS, message.cut)
    if text is None:
        text = message.body[: PREVIEW_CHARACTERS // 3].hex(" ")
    preview = readable(" ".join(text.split()))
    return MessageLine(
        position,
        readable(message.exchange),
        readable(message.routing_key),
        readable(str(message.properties.get("content_type", ""))),
        len(message.body) + message.cut,
        preview,
    )


def body_shown(body: bytes, most: int = MAX_CHARACTERS, cut: int = 0) -> Body:
    """Return a body for a page. It has ``cut`` more bytes at its end."""
    size = len(body) + cut
    text, is_cut = _text_of(body, most, cut)
    if text is None:
        digits = body[:MAX_HEX_BYTES].hex(" ")
        return Body("hex", size, *_split(digits), is_cut=size > MAX_HEX_BYTES)
    pretty = None if is_cut else _pretty(body, most)
    if pretty is not None:
        return Body("JSON", size, *_split(readable_text(pretty[:most])), is_cut=len(pretty) > most)
    return Body("text" if body else "", size, *_split(readable_text(text)), is_cut)


def _text_of(body: bytes, most: int, cut: int) -> tuple[str | None, bool]:
    """Return the first characters of a body in UTF-8, and whether there are more; None: it has other bytes."""
    head = body[: 4 * most + 4]  # no character is longer than four bytes
    is_whole = len(head) == len(body) + cut
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=is_whole)
    except UnicodeDecodeError:
        return None, False
    return text[:most], not is_whole or len(text) > most


def _pretty(body: bytes, most: int) -> str | None:
    """Return a body as indented JSON, cut when it is longer than ``most`` characters, or None if it is no JSON."""
    value, encoding = reading.read_body(body)
    if encoding != "json":
        return None
    parts, length = [], 0
    try:
        for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
            parts.append(part)
            length += len(part)
            if length > most:  # deep nesting multiplies the length
                break
    except RecursionError:
        return None
    return "".join(parts)


def _split(text: str) -> tuple[str, str]:
    """Return the part of a text that is shown at once, of whole lines if possible, and the collapsed rest."""
    lines = text[: UNFOLDED_CHARACTERS + 1].split("\n", UNFOLDED_LINES)
    if len(text) <= UNFOLDED_CHARACTERS and len(lines) <= UNFOLDED_LINES:
        return text, ""
    start = "\n".join(lines[:-1])
    if len(start) < UNFOLDED_CHARACTERS // 2 and len(lines) <= UNFOLDED_LINES:  # the last line is long
        return text[:UNFOLDED_CHARACTERS], text[UNFOLDED_CHARACTERS:]
    return start, text[len(start) + 1 :]


def _property(name: str, value: Any) -> Property:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = readable(text[:MAX_VALUE_CHARACTERS])
    return Property(readable(name), cut if len(text) <= MAX_VALUE_CHARACTERS else f"{cut}…")
