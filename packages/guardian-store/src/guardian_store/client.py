"""A client of the message store's HTTP API, for programs in Python. It needs httpx, and nothing of Django.

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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote
from uuid import UUID

import httpx

from guardian_store import ids

PAGE_SIZE = 100
"""Messages, or queues, that are asked for at once."""

TIMEOUT_SECONDS = 30.0
"""Seconds that an answer may take."""


class ClientError(Exception):
    """What was asked for was not done. ``errors`` has the reasons by field, as the store gave them.

    ``status`` is that of the answer; None where there was none.
    """

    def __init__(self, status: int | None, errors: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in errors.items()) or f"status {status}")
        self.status = status
        self.errors = dict(errors)


class Invalid(ClientError):
    """The store can't use what it was sent (400), or that is too large (413)."""


class Denied(ClientError):
    """The key or the token is none (401), or doesn't allow this (403)."""


class NotFound(ClientError):
    """There is no such application or queue (404)."""


class Unavailable(ClientError):
    """The store doesn't answer, or can't reach what it stores in (503). What was asked for may still have been done."""


_ERRORS: dict[int, type[ClientError]] = {
    400: Invalid, 401: Denied, 403: Denied, 404: NotFound, 413: Invalid, 502: Unavailable, 503: Unavailable, 504: Unavailable,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue. ``created``, and ``count``, of its messages, are None where the answer doesn't have them."""

    name: str
    partitions: int
    type: str
    consistency: str
    principals: tuple[str, ...]
    created: datetime | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message of a batch. It lives for ``ttl`` seconds (None: three days); without a partition one is drawn."""

    body: str | bytes
    ttl: int | None = None
    partition: int | None = None
    content_type: str = "text/plain"


@dataclass(frozen=True, slots=True)
class Posted:
    """What became of a message that was posted: its id and time (in seconds since 1970), and where it lies."""

    id: str
    timestamp: Decimal
    partition: int


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it is read. ``timestamp`` is in seconds since 1970."""

    id: str
    timestamp: Decimal
    partition: int
    content_type: str
    body: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """The body as text, which is UTF-8.

        Raises:
            UnicodeDecodeError: it isn't.
        """
        return self.body.decode()

    def json(self) -> Any:
        """Return what the body says in JSON.

        Raises:
            ValueError: it isn't JSON.
        """
        return json.loads(self.body)


class Client:
    """An application's queues, as seen by the application or by somebody who may read some of them.

    ``address`` is that of Guardian. ``key`` is one of the application's; ``token`` is an owner's. Public queues are
    read with neither. What takes longer than ``timeout`` seconds counts as no answer. ``transport`` is httpx's, for
    those who need another.

    Every method may raise ``Denied``, ``NotFound``, ``Invalid`` and ``Unavailable``; all of them are ``ClientError``. Nothing
    is tried again here. It may be used by several threads.
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
            raise ValueError("A key or a token, not both")
        authorization = {"Authorization": f"Application {key}" if key else f"Token {token}"} if key or token else {}
        self._base = f"{address.rstrip('/')}/v1/{quote(application, safe='')}"
        self._http = httpx.Client(headers=authorization, timeout=timeout, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Return the client, which is closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    # Queues

    def queues(self, *, count: bool = False, start: str = "", page: int = PAGE_SIZE) -> Iterator[Queue]:
        """Give the queues by name, from ``start`` on, so many (two at least) at a request; with ``count`` how full."""
        if page < 2:
            raise ValueError("A page begins with the queue that the one before ended with, so it has two at least")
        asked = {"details": "true", "include_count": "true" if count else "false", "limit": str(page)}
        last = None
        while True:
            found = self._request("GET", params={**asked, "offset": start} if start else asked)["queues"]
            for entry in found:
                if entry["queue_name"] != last:  # which the page before ended with
                    yield _queue(entry)
            if len(found) < page:
                return
            start = last = found[-1]["queue_name"]

    def create_queue(
        self,
        name: str | None = None,
        *,
        partitions: int = 1,
        type: str = "user",  # noqa: A002 - what the API calls it
        consistency: str = "strong",
        principals: Sequence[str] = (),
    ) -> Queue:
        """Make a queue; without a name it gets one. One that is there is changed to be so."""
        fields = {
            "partitions": str(partitions), "type": type, "consistency": consistency, "principles": ",".join(principals),
        }  # fmt: skip
        if name is not None:
            fields["queue_name"] = name
        return _queue(self._request("POST", data=fields))

    def update_queue(
        self,
        name: str,
        *,
        partitions: int | None = None,
        type: str | None = None,  # noqa: A002 - what the API calls it
        consistency: str | None = None,
        principals: Sequence[str] | None = None,
    ) -> Queue:
        """Change what is given. Partitions only grow in number."""
        given = {
            "partitions": partitions, "type": type, "consistency": consistency,
            "principles": None if principals is None else ",".join(principals),
        }  # fmt: skip
        changes = {field: str(value) for field, value in given.items() if value is not None}
        return _queue(self._request("PUT", name, data=changes))

    def delete_queue(self, name: str) -> None:
        """Remove a queue, with all that is in it."""
        self._request("DELETE", name)

    # Messages. A place is a partition and the id of a message in it.

    def post(
        self,
        queue: str,
        body: str | bytes,
        *,
        ttl: int | None = None,
        partition: int | None = None,
        content_type: str = "text/plain",
    ) -> Posted:
        """Post a message, which lives for ``ttl`` seconds (None: three days); without a partition one is drawn."""
        headers = _headers(content_type, ttl, partition)
        (posted,) = self._request("POST", queue, content=_bytes(body), headers=headers)["messages"]
        return _posted(posted)

    def post_many(self, queue: str, messages: Iterable[NewMessage]) -> list[Posted]:
        """Post messages, all or none, and return what became of them in the same order."""
        entries = [_entry(message) for message in messages]
        return [_posted(entry) for entry in self._request("POST", queue, json={"messages": entries})["messages"]]

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
        """Give the messages of a partition by their time, or against it, so many at a request, until there is no more.

        ``since`` is the time, in seconds since 1970, or the id of the first one; ``after`` is the id of the one before
        it. Whoever calls again with the id of the last one that they had gets what came since.
        """
        asked = {
            "partitions": str(partition), "limit": str(page), "order": "descending" if descending else "ascending",
        }  # fmt: skip
        start = since
        if after is not None:
            start = _next_id(after, descending)
            if start is None:
                return
        while True:
            if start is not None:
                asked["since"] = f"{start:f}" if isinstance(start, Decimal) else start
            answer = self._request("GET", queue, params=asked)
            found = [_message(entry) for entry in answer["messages"]]
            yield from found
            if not found or (len(found) < page and not answer.get("truncated")):
                return
            start = _next_id(found[-1].id, descending)
            if start is None:
                return

    def get(self, queue: str, places: Iterable[tuple[int, str]]) -> list[Message]:
        """Return the messages at these places that are there, in the order asked, each once."""
        found: list[Message] = []
        left = _references(places)
        while left:
            answer = self._request("GET", queue, ",".join(left[:MAX_IDS_PER_REQUEST]))
            some = [_message(entry) for entry in answer["messages"]]
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
        """Put this into the place of a message, which lives on for ``ttl`` seconds; where there is none, it is made."""
        headers = _headers(content_type, ttl)
        self._request("PUT", queue, f"{partition}:{message_id}", content=_bytes(body), headers=headers)

    def delete(self, queue: str, places: Iterable[tuple[int, str]]) -> None:
        """Delete the messages at these places; one that isn't there is no error. Many are more than one request."""
        named = _references(places)
        for first in range(0, len(named), MAX_IDS_PER_REQUEST):
            self._request("DELETE", queue, ",".join(named[first : first + MAX_IDS_PER_REQUEST]))

    # How far a consumer, known by a name of its own choice, has processed each partition.

    def positions(self, queue: str, consumer: str) -> dict[int, str]:
        """Return the id of the last message that the consumer has processed, by partition."""
        found = self._request("GET", queue, "positions", consumer)["positions"]
        return {int(partition): message_id for partition, message_id in found.items()}

    def set_positions(self, queue: str, consumer: str, positions: Mapping[int, str]) -> None:
        """Set the positions of these partitions, and leave those of the others."""
        told = {str(partition): message_id for partition, message_id in positions.items()}
        self._request("PUT", queue, "positions", consumer, json=told)

    def delete_positions(self, queue: str, consumer: str) -> None:
        """Forget how far the consumer is."""
        self._request("DELETE", queue, "positions", consumer)

    def _request(self, method: str, *names: str, **request: Any) -> dict[str, Any]:
        """Return what the store answers to a request about the thing with these names."""
        address = "/".join([self._base, *(quote(name, safe=",:") for name in names)])
        try:
            answer = self._http.request(method, address, **request)
        except httpx.RequestError as error:
            raise Unavailable(None, {type(error).__name__: str(error) or "no answer"}) from error
        try:
            told = answer.json()
        except ValueError:
            told = None
        if answer.is_success and isinstance(told, dict):
            return told
        errors = told.get("error_msg") if isinstance(told, dict) else None
        if not isinstance(errors, dict):
            errors = {"answer": f"status {answer.status_code}, and nothing that the message store would say"}
        raise _ERRORS.get(answer.status_code, ClientError)(answer.status_code, errors)


MAX_IDS_PER_REQUEST = 50
"""Messages that are named in one address, which no server takes at any length."""


def _references(places: Iterable[tuple[int, str]]) -> list[str]:
    return list(dict.fromkeys(f"{partition}:{message_id.lower()}" for partition, message_id in places))


_MIN_RFC_REST, _MAX_RFC_REST = 1 << 63, (1 << 63) + (1 << 62) - 1
"""Of the other half of a UUID's 128 bits, whose first two say that it is one (RFC 9562, section 4.1)."""


def _next_id(message_id: str, descending: bool) -> str | None:
    """Return the next id that a message could have, or the one before where it is read against the order; None: none.

    An application may have given a message the first one of all.
    """
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


def _message(entry: dict[str, Any]) -> Message:
    return Message(
        id=entry["message_id"],
        timestamp=Decimal(entry["timestamp"]),
        partition=entry["partition"],
        content_type=entry["content_type"],
        body=b64decode(entry["body"]) if entry.get("encoding") == "base64" else entry["body"].encode(),
    )
