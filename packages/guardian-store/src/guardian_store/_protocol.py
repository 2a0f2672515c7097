"""What the clients send and receive: messages, queues, errors, and how a request is written and an answer read.

Nothing here sends a request. An *operation* is a generator that yields requests and receives their answers, so that
``Client`` and ``AsyncClient`` run the same ones.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit
from uuid import UUID

import httpx

from guardian_store import _ids as ids
from guardian_store._partition_sharing import DEFAULT_DEPLOYMENT

JSON = "application/json"

MAX_IDS_PER_REQUEST = 50
"""Servers limit the length of URLs."""


class ClientError(Exception):
    """Base class of the client's errors. ``errors`` has the store's error texts by field.

    ``status`` is the status of the response, or None without a response.
    """

    def __init__(self, status: int | None, errors: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in errors.items()) or f"status {status}")
        self.status = status
        self.errors = dict(errors)


class Invalid(ClientError):
    """The request is invalid (400) or too large (413)."""


class Denied(ClientError):
    """The key or token is invalid (401) or lacks permission (403)."""


class NotFound(ClientError):
    """The application or queue does not exist (404)."""


class RetryLater(Exception):
    """A worker's job or failure handler raises this to handle the message again, after a wait."""


class Unavailable(ClientError, RetryLater):
    """The server can't answer now (408, 429, 5xx, no readable response). The request may still have succeeded."""


_ERRORS: dict[int, type[ClientError]] = {
    400: Invalid,
    401: Denied,
    403: Denied,
    404: NotFound,
    408: Unavailable,
    413: Invalid,
    429: Unavailable,
}


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue of an application.

    The principals, ``app:NAME`` or ``bid:EMAIL``, may read and delete messages; without any, the application may.
    Everybody may read if the type is ``public``, not ``user``. ``consistency`` is ``weak``, ``strong`` or
    ``very_strong``. ``created`` and ``count`` (of messages) are None if the response lacks them.
    """

    name: str
    partitions: int
    type: str
    consistency: str
    principals: tuple[str, ...]
    created: datetime | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message of a batch. ``ttl`` is in seconds, by default three days. The default partition is random."""

    body: str | bytes
    ttl: int | None = None
    partition: int | None = None
    content_type: str = "text/plain"


@dataclass(frozen=True, slots=True)
class Posted:
    """The id, time (in seconds since 1970) and partition of a posted message."""

    id: str
    timestamp: Decimal
    partition: int


class Message(NamedTuple):
    """A message of a queue. ``deployment`` is the name that a worker has for the store with the message."""

    id: str
    queue: str
    partition: int
    body: bytes
    content_type: str
    deployment: str = DEFAULT_DEPLOYMENT

    def __repr__(self) -> str:
        return f"<Message {self.id} in partition {self.partition} of {self.queue!r}>"

    @property
    def timestamp(self) -> Decimal:
        """The exact time of posting in seconds since 1970."""
        return Decimal(ids.timestamp(UUID(self.id)))

    @property
    def text(self) -> str:
        """The body decoded as UTF-8. Raises UnicodeDecodeError if it isn't."""
        return self.body.decode()

    def json(self) -> Any:
        """Return the body parsed as JSON. Raises ValueError if it isn't."""
        return json.loads(self.body)


class Page(NamedTuple):
    """Some messages of a partition, and whether there may be more after them."""

    messages: list[Message]
    more: bool


class Call:
    """A request to the application's URL with further path segments, and httpx's options."""

    def __init__(self, method: str, *names: str, **options: Any) -> None:
        for name in names:
            # The request would go to another queue, or to the positions or messages of one.
            if name in ("", ".", "..") or "/" in name:
                raise Invalid(None, {"name": f"{name!r} can't be a name: it is not usable in a URL"})
        self.method = method
        self.path = "".join(f"/{quote(name, safe=',:')}" for name in names)
        self.options = options


T = TypeVar("T")

Operation = Generator[Call, Any, T]
"""Yields requests, receives their answers, and returns a result."""

Pages = Generator[Call | list[T], Any, None]
"""Yields a request, receives its answer, and yields the entries of this page; and so on."""


def base_of(address: str, application: str) -> str:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # port raises, too
        raise ValueError(f"{address!r} is not an address such as https://guardian.example.org")
    return f"{address.rstrip('/')}/v1/{quote(application, safe='')}"


def authorization(key: str, token: str) -> dict[str, str]:
    if key and token:
        raise ValueError("Pass a key or a token, not both")
    if not (key + token).isascii() or not (key + token).isprintable():
        raise ValueError("A key or token has only printable ASCII characters")
    return {"Authorization": f"Application {key}" if key else f"Token {token}"} if key or token else {}


def no_answer(error: httpx.RequestError) -> Unavailable:
    return Unavailable(None, {type(error).__name__: str(error) or "no answer"})


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON of a response. Raise a ``ClientError`` unless the store reports success."""
    try:
        content = response.json()
    except ValueError:
        content = None
    if response.is_success and isinstance(content, dict) and content.get("status") == "ok":
        return content
    errors = content.get("error_msg") if isinstance(content, dict) else None
    kind = Unavailable if response.is_server_error else _ERRORS.get(response.status_code, ClientError)
    if not isinstance(errors, dict):
        errors = {"answer": f"status {response.status_code} with a body that is not from the message store"}
        if response.has_redirect_location:
            errors["moved to"] = response.headers["Location"]
        if response.is_success or response.status_code == 404:
            kind = Unavailable  # a proxy answered for the store, or cut its answer
    raise kind(response.status_code, errors)


def read_page(queue: str, params: Mapping[str, str], limit: int) -> Operation[Page]:
    answer = yield Call("GET", queue, params=params)
    found = [message_of(queue, entry) for entry in answer["messages"]]
    return Page(found, bool(found) and (len(found) == limit or bool(answer.get("truncated"))))


def references(places: Iterable[tuple[int, str]]) -> list[str]:
    return list(dict.fromkeys(f"{partition}:{message_id.lower()}" for partition, message_id in places))


_MIN_RFC_REST, _MAX_RFC_REST = 1 << 63, (1 << 63) + (1 << 62) - 1
"""The lower 64 bits of a UUID begin with the variant bits 10 (RFC 9562, section 4.1)."""


def next_id(message_id: str, descending: bool) -> str | None:
    """Return the next possible message id in the direction of reading, or None beyond the first or last possible id."""
    ticks, rest = ids.place(UUID(message_id))
    if descending:
        place = ids.Place(ticks, rest - 1) if rest > _MIN_RFC_REST else ids.Place(ticks - 1, _MAX_RFC_REST)
    else:
        place = ids.Place(ticks, rest + 1) if rest < _MAX_RFC_REST else ids.Place(ticks + 1, _MIN_RFC_REST)
    return ids.message_id(place).hex if ids.MIN_TICKS <= place.ticks <= ids.MAX_TICKS else None


def must_be_batched(content_type: str) -> bool:
    """Return whether a message can't be the body of a request: the store reads JSON as a batch.

    A header can't have spaces at its ends either.
    """
    return content_type.partition(";")[0].strip().lower() == JSON or content_type != content_type.strip()


def entry_of(message: NewMessage) -> dict[str, Any]:
    text = message.body if isinstance(message.body, str) else _shorter_text(message.body)
    body = (
        {"body": b64encode(bytes_of(message.body)).decode(), "encoding": "base64"} if text is None else {"body": text}
    )
    given = {"ttl": message.ttl, "partition": message.partition, "content_type": message.content_type}
    return {**body, **{name: value for name, value in given.items() if value is not None}}


def _shorter_text(body: bytes) -> str | None:
    """Return a body as text, or None if it is not text or needs less room in JSON as base64."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if len(json.dumps(text, ensure_ascii=False).encode()) <= len(body) * 4 / 3 else None


def bytes_of(body: str | bytes) -> bytes:
    return body.encode() if isinstance(body, str) else body


def headers_of(content_type: str, ttl: int | None, partition: int | None = None) -> dict[str, str]:
    given = {"Content-Type": content_type, "X-TTL": ttl, "X-Partition": partition}
    return {name: str(value) for name, value in given.items() if value is not None}


def queue_of(entry: dict[str, Any]) -> Queue:
    created = entry.get("created")
    return Queue(
        name=entry["queue_name"],
        partitions=entry["partitions"],
        type=entry["type"],
        consistency=entry["consistency"],
        principals=tuple(entry["principles"]),
        created=None if created is None else datetime.fromtimestamp(created, UTC),
        count=entry.get("count"),
    )


def posted_of(entry: dict[str, Any]) -> Posted:
    return Posted(entry["key"], Decimal(entry["timestamp"]), entry["partition"])


def positions_of(answer: dict[str, Any]) -> dict[int, str]:
    return {int(partition): message_id for partition, message_id in answer["positions"].items()}


def message_of(queue: str, entry: dict[str, Any]) -> Message:
    return Message(
        id=entry["message_id"],
        queue=queue,
        partition=entry["partition"],
        body=b64decode(entry["body"]) if entry.get("encoding") == "base64" else entry["body"].encode(),
        content_type=entry["content_type"],
    )
