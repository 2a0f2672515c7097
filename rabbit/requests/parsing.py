"""Parse and validate answers of the management API."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from rabbit.errors import AnotherVhost, MalformedResponse, Refused
from rabbit.http import Answer
from rabbit.requests.sending import CHECK_URL, JSONObject

REWRITTEN = (
    "a proxy before the broker decodes %2F in addresses; set it up to pass the address on unchanged (nginx: proxy_pass "
    "without a path, merge_slashes off)"
)


def require_one_line(name: str) -> None:
    """Refuse line breaks: the broker strips them from a name, and invents a name if nothing is left."""
    if "\r" in name or "\n" in name:
        reason = "a name can't contain a line break"
        raise Refused(f"{name!a} was not declared: {reason}; choose another name", status=0, reason=reason)


def parse_json(answer: Answer) -> Any:
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError as error:
        raise MalformedResponse(f"{answer.request}: the answer isn't JSON ({error}); {CHECK_URL}") from error


def parse_object(answer: Answer, **shape: type) -> JSONObject:
    """Return the object in an answer, whose keys in ``shape`` have these types."""
    return validated(answer, parse_json(answer), shape)


def parse_rows(answer: Answer, of_vhost: str | None = None, /, **shape: type) -> list[JSONObject]:
    """Return the objects of a list, all of this vhost, whose keys in ``shape`` have these types."""
    rows = parse_json(answer)
    if not isinstance(rows, list):
        raise MalformedResponse(f"{answer.request}: the answer isn't a list; {CHECK_URL}")
    found = [validated(answer, row, shape) for row in rows]
    if of_vhost is not None:
        for row in found:
            require_vhost(answer, row, of_vhost)
    return found


def require_vhost(answer: Answer, row: JSONObject, vhost: str) -> None:
    """Check that a row is of the requested vhost, unless it lacks this column."""
    if (found := row.get("vhost", vhost)) != vhost:
        raise AnotherVhost(f"{answer.request}: the answer is about the vhost '{found}'; {REWRITTEN}")


def validated(answer: Answer, row: Any, shape: Mapping[str, type]) -> JSONObject:
    """Return the row, if it is an object and its keys in ``shape`` have these types."""
    if not isinstance(row, dict):
        raise MalformedResponse(f"{answer.request}: the answer has an entry that isn't an object; {CHECK_URL}")
    for key, kind in shape.items():
        if not isinstance(row.get(key), kind):
            raise MalformedResponse(f"{answer.request}: the answer has no '{key}' of type {kind.__name__}; {CHECK_URL}")
    return row


def as_number(value: Any) -> int | None:
    """Return an integer, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def one_line(reason: str) -> str:
    """Return the text as one line of ASCII, as a header can have it."""
    return " ".join(reason.split())[:200].encode("ascii", "replace").decode()


def as_text(value: Any) -> str:
    """Return a string, or "" for anything else."""
    return value if isinstance(value, str) else ""


def rate_in(stats: Any, counter: str) -> float | None:
    """Return the rate of a counter in ``message_stats``, a second; None: it is not counted."""
    details = stats.get(f"{counter}_details") if isinstance(stats, dict) else None
    value = details.get("rate") if isinstance(details, dict) else None
    return float(value) if isinstance(value, int | float) else None


def as_time(milliseconds: Any) -> datetime | None:
    """Return a time from milliseconds since 1970, or None."""
    known = as_number(milliseconds)
    return None if known is None else datetime.fromtimestamp(known / 1000, UTC)
