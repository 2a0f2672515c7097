"""A client of the message store's HTTP API. It needs httpx, but not Django.

::

    with Client("https://guardian.example.org", "notifications", key=KEY) as client:
        client.create_queue("alice")
        client.post("alice", "hello")
        for message in client.messages("alice"):
            print(message.timestamp, message.text)
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit
from uuid import UUID

import httpx

from guardian_store import ids
from guardian_store.partition_sharing import DEFAULT_DEPLOYMENT

PAGE_SIZE = 100
"""Messages or queues per request."""

TIMEOUT_SECONDS = 30.0


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
    """A queue. ``created`` and ``count`` (of messages) are None if the response lacks them."""

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


class Client:
    """A client for the queues of an application.

    ``address`` is Guardian's URL. Authenticate with an application's ``key`` or an owner's ``token`` of the scope
    ``all``; public queues need neither. ``timeout`` is in seconds. ``transport`` replaces httpx's default transport.

    Every method may raise ``Denied``, ``NotFound``, ``Invalid`` and ``Unavailable``, all subclasses of ``ClientError``.
    The client does not retry. It is thread-safe.
    """

    def __init__(
        self,
        address: str,
        application: str,
        *,
        key: str = "",
        token: str = "",
        timeout: float = TIMEOUT_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if key and token:
            raise ValueError("Pass a key or a token, not both")
        authorization = {"Authorization": f"Application {key}" if key else f"Token {token}"} if key or token else {}
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{address!r} is not an address such as https://guardian.example.org")
        self._base = f"{address.rstrip('/')}/v1/{quote(application, safe='')}"
        self._http = httpx.Client(headers=authorization, timeout=timeout, transport=transport)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Queues

    def queues(self, *, count: bool = False, start: str = "", page: int = PAGE_SIZE) -> Iterator[Queue]:
        """Iterate over the queues sorted by name, from the name ``start`` on, fetching ``page`` queues per request.

        ``count`` adds the number of messages of each queue.
        """
        if page < 2:
            raise ValueError("page must be at least 2, since each page repeats the last queue of the previous one")
        asked = {"details": "true", "include_count": "true" if count else "false", "limit": str(page)}
        last = None
        while True:
            found = self.request("GET", params={**asked, "offset": start} if start else asked)["queues"]
            for entry in found:
                if entry["queue_name"] != last:
                    yield _queue(entry)
            if len(found) < page:
                return
            start = last = found[-1]["queue_name"]

    def queue(self, name: str) -> Queue:
        """Return a queue without its principals. Everybody who may read the queue may call this."""
        return _queue({"principles": (), **self.request("GET", name, "info")})

    def create_queue(
        self,
        name: str | None = None,
        *,
        partitions: int = 1,
        type: str = "user",  # noqa: A002 - what the API calls it
        consistency: str = "strong",
        principals: Sequence[str] = (),
    ) -> Queue:
        """Create a queue, by default with a random name, or update the existing one."""
        fields = {
            "partitions": str(partitions), "type": type, "consistency": consistency, "principles": ",".join(principals),
        }  # fmt: skip
        if name is not None:
            fields["queue_name"] = name
        return _queue(self.request("POST", data=fields))

    def update_queue(
        self,
        name: str,
        *,
        partitions: int | None = None,
        type: str | None = None,  # noqa: A002 - what the API calls it
        consistency: str | None = None,
        principals: Sequence[str] | None = None,
    ) -> Queue:
        """Change the given settings. The number of partitions can't shrink."""
        given = {
            "partitions": partitions, "type": type, "consistency": consistency,
            "principles": None if principals is None else ",".join(principals),
        }  # fmt: skip
        changes = {field: str(value) for field, value in given.items() if value is not None}
        return _queue(self.request("PUT", name, data=changes))

    def delete_queue(self, name: str) -> None:
        """Delete a queue and its messages."""
        self.request("DELETE", name)

    # Messages. A place is a partition and a message id.

    def post(
        self,
        queue: str,
        body: str | bytes,
        *,
        ttl: int | None = None,
        partition: int | None = None,
        content_type: str = "text/plain",
    ) -> Posted:
        """Post a message. ``ttl`` is in seconds, by default three days. The default partition is random."""
        headers = _headers(content_type, ttl, partition)
        (posted,) = self.request("POST", queue, content=_bytes(body), headers=headers)["messages"]
        return _posted(posted)

    def post_many(self, queue: str, messages: Iterable[NewMessage]) -> list[Posted]:
        """Post all of the messages or none. Return the results in the same order."""
        entries = [_entry(message) for message in messages]
        return [_posted(entry) for entry in self.request("POST", queue, json={"messages": entries})["messages"]]

    def messages(
        self,
        queue: str,
        *,
        partition: int = 1,
        since: str | Decimal | None = None,
        after: str | None = None,
        descending: bool = False,
        page: int = PAGE_SIZE,
    ) -> Iterator[Message]:
        """Iterate over the messages of a partition in the order of time, fetching ``page`` messages per request.

        Begin at ``since``, a time in seconds since 1970 or a message id, or behind the message id ``after``. To get
        only new messages, pass the id of the last received one as ``after``.
        """
        params = {
            "partitions": str(partition), "limit": str(page), "order": "descending" if descending else "ascending",
        }  # fmt: skip
        start = since
        if after is not None:
            start = _next_id(after, descending)
            if start is None:
                return
        while True:
            if start is not None:
                params["since"] = f"{start:f}" if isinstance(start, Decimal) else start
            found, more = self._page(queue, params, page)
            yield from found
            if not more:
                return
            start = _next_id(found[-1].id, descending)
            if start is None:
                return

    def read(self, queue: str, *, partition: int = 1, after: str | None = None, limit: int = PAGE_SIZE) -> Page:
        """Return up to ``limit`` messages of a partition after the message id ``after``, in one request."""
        params = {"partitions": str(partition), "limit": str(limit)}
        if after is not None:
            start = _next_id(after, descending=False)
            if start is None:
                return Page([], more=False)
            params["since"] = start
        return self._page(queue, params, limit)

    def _page(self, queue: str, params: Mapping[str, str], limit: int) -> Page:
        answer = self.request("GET", queue, params=params)
        found = [_message(queue, entry) for entry in answer["messages"]]
        return Page(found, bool(found) and (len(found) == limit or bool(answer.get("truncated"))))

    def get(self, queue: str, places: Iterable[tuple[int, str]]) -> list[Message]:
        """Return the existing messages at these places, in this order, without duplicates."""
        found: list[Message] = []
        left = _references(places)
        while left:
            answer = self.request("GET", queue, ",".join(left[:MAX_IDS_PER_REQUEST]))
            some = [_message(queue, entry) for entry in answer["messages"]]
            found += some
            asked = MAX_IDS_PER_REQUEST
            if answer.get("truncated"):
                asked = left.index(f"{some[-1].partition}:{some[-1].id}") + 1
            left = left[asked:]
        return found

    def overwrite(
        self,
        queue: str,
        partition: int,
        message_id: str,
        body: str | bytes,
        *,
        ttl: int | None = None,
        content_type: str = "text/plain",
    ) -> None:
        """Create or replace a message. ``ttl`` is in seconds, by default three days."""
        headers = _headers(content_type, ttl)
        self.request("PUT", queue, f"{partition}:{message_id}", content=_bytes(body), headers=headers)

    def delete(self, queue: str, places: Iterable[tuple[int, str]]) -> None:
        """Delete the messages at these places, ignoring those that don't exist. It may take several requests."""
        references = _references(places)
        for first in range(0, len(references), MAX_IDS_PER_REQUEST):
            self.request("DELETE", queue, ",".join(references[first : first + MAX_IDS_PER_REQUEST]))

    # Positions: the last message of each partition that a consumer has processed. Consumers choose their names.

    def positions(self, queue: str, consumer: str) -> dict[int, str]:
        """Return the id of the consumer's last processed message by partition."""
        found = self.request("GET", queue, "positions", consumer)["positions"]
        return {int(partition): message_id for partition, message_id in found.items()}

    def set_positions(self, queue: str, consumer: str, positions: Mapping[int, str]) -> None:
        """Set the positions of these partitions only."""
        by_partition = {str(partition): message_id for partition, message_id in positions.items()}
        self.request("PUT", queue, "positions", consumer, json=by_partition)

    def delete_positions(self, queue: str, consumer: str) -> None:
        """Delete a consumer's positions."""
        self.request("DELETE", queue, "positions", consumer)

    def request(self, method: str, *names: str, **options: Any) -> dict[str, Any]:
        """Send a request to the application's URL with these further path segments, and return the JSON response.

        ``options`` are those of ``httpx.Client.request``.
        """
        for name in names:
            # The request would go to another queue, or to the positions or messages of one.
            if name in ("", ".", "..") or "/" in name:
                raise Invalid(None, {"name": f"{name!r} can't be a name: it is not usable in a URL"})
        address = "/".join([self._base, *(quote(name, safe=",:") for name in names)])
        try:
            answer = self._http.request(method, address, **options)
        except httpx.RequestError as error:
            raise Unavailable(None, {type(error).__name__: str(error) or "no answer"}) from error
        try:
            content = answer.json()
        except ValueError:
            content = None
        if answer.is_success and isinstance(content, dict) and content.get("status") == "ok":
            return content
        errors = content.get("error_msg") if isinstance(content, dict) else None
        kind = Unavailable if answer.is_server_error else _ERRORS.get(answer.status_code, ClientError)
        if not isinstance(errors, dict):
            errors = {"answer": f"status {answer.status_code} with a body that is not from the message store"}
            if answer.is_success or answer.status_code == 404:
                kind = Unavailable  # a proxy answered for the store, or cut its answer
        raise kind(answer.status_code, errors)


MAX_IDS_PER_REQUEST = 50
"""Servers limit the length of URLs."""


def _references(places: Iterable[tuple[int, str]]) -> list[str]:
    return list(dict.fromkeys(f"{partition}:{message_id.lower()}" for partition, message_id in places))


_MIN_RFC_REST, _MAX_RFC_REST = 1 << 63, (1 << 63) + (1 << 62) - 1
"""The lower 64 bits of a UUID begin with the variant bits 10 (RFC 9562, section 4.1)."""


def _next_id(message_id: str, descending: bool) -> str | None:
    """Return the next possible message id in the direction of reading, or None beyond the first or last possible id."""
    ticks, rest = ids.place(UUID(message_id))
    if descending:
        place = ids.Place(ticks, rest - 1) if rest > _MIN_RFC_REST else ids.Place(ticks - 1, _MAX_RFC_REST)
    else:
        place = ids.Place(ticks, rest + 1) if rest < _MAX_RFC_REST else ids.Place(ticks + 1, _MIN_RFC_REST)
    return ids.message_id(place).hex if ids.MIN_TICKS <= place.ticks <= ids.MAX_TICKS else None


def _entry(message: NewMessage) -> dict[str, Any]:
    if isinstance(message.body, str):
        body = {"body": message.body}
    else:
        body = {"body": b64encode(message.body).decode(), "encoding": "base64"}
    given = {"ttl": message.ttl, "partition": message.partition, "content_type": message.content_type}
    return {**body, **{name: value for name, value in given.items() if value is not None}}


def _bytes(body: str | bytes) -> bytes:
    return body.encode() if isinstance(body, str) else body


def _headers(content_type: str, ttl: int | None, partition: int | None = None) -> dict[str, str]:
    given = {"Content-Type": content_type, "X-TTL": ttl, "X-Partition": partition}
    return {name: str(value) for name, value in given.items() if value is not None}


def _queue(entry: dict[str, Any]) -> Queue:
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


def _posted(entry: dict[str, Any]) -> Posted:
    return Posted(entry["key"], Decimal(entry["timestamp"]), entry["partition"])


def _message(queue: str, entry: dict[str, Any]) -> Message:
    return Message(
        id=entry["message_id"],
        queue=queue,
        partition=entry["partition"],
        body=b64decode(entry["body"]) if entry.get("encoding") == "base64" else entry["body"].encode(),
        content_type=entry["content_type"],
    )
