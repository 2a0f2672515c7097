"""Decode message bodies by their content types."""

from collections.abc import Callable, Mapping
from typing import Any

import yapw.util

from guardian_consumers._outcomes import Unreadable

Decoder = Callable[[bytes], Any]

JSON = "application/json"


def _json(body: bytes) -> Any:
    return yapw.util.default_decode(body, JSON)


def _text(body: bytes) -> str:
    return body.decode("utf-8")


DECODERS: Mapping[str, Decoder] = {
    JSON: _json,
    "text/plain": _text,
    "application/octet-stream": bytes,
    "": bytes,
}
"""Decoders by content type without parameters. The empty key is for messages without a content type, as in yapw.

Other content types are unreadable without a decoder, whereas yapw passes their bytes to the callback. Nothing here
unpickles.
"""


def decode(body: bytes, content_type: str | None, encoding: str | None, decoders: Mapping[str, Decoder]) -> Any:
    """Return the decoded body. Raises Unreadable with the reason."""
    kind = _as_text(content_type)
    decoder = decoders.get(kind)
    if decoder is None:
        kind = _without_parameters(kind)
        decoder = decoders.get(JSON if kind.endswith("+json") else kind)
    if decoder is None:
        raise Unreadable(f"the content type is {content_type!r}; this consumer reads {_list(decoders)}")
    if encoding and _as_text(encoding).lower() not in ("utf-8", "utf8", "identity"):
        # Celery and kombu write the charset here.
        raise Unreadable(f"the content encoding is {encoding!r}, which this consumer does not read")
    try:
        return decoder(body)
    except Exception as error:
        raise Unreadable(f"the body is not valid {kind or 'bytes'}: {error}") from error


def _as_text(value: str | bytes | None) -> str:
    """Return a property as text. pika returns bytes if it isn't UTF-8."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value or ""


def _without_parameters(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _list(decoders: Mapping[str, Decoder]) -> str:
    return ", ".join(kind or "none" for kind in decoders)
