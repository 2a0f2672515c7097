"""The blocking client of the message store's HTTP API."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from guardian_store._protocol import (
    MAX_IDS_PER_REQUEST,
    Call,
    Message,
    NewMessage,
    Operation,
    Page,
    Pages,
    Posted,
    Queue,
    answer_of,
    authorization,
    base_of,
    bytes_of,
    entry_of,
    headers_of,
    message_of,
    must_be_batched,
    next_id,
    no_answer,
    positions_of,
    posted_of,
    queue_of,
    read_page,
    references,
)

PAGE_SIZE = 100
"""Messages or queues per request."""

TIMEOUT_SECONDS = 30.0

P = ParamSpec("P")
T = TypeVar("T")


def blocking(operation: "Callable[Concatenate[Client, P], Operation[T]]") -> "Callable[Concatenate[Client, P], T]":
    """Make a method that sends the requests of an operation."""

    @wraps(operation)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        steps, answer = operation(self, *args, **kwargs), None
        while True:
            try:
                call = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = self._send(call)

    return method


def paged(operation: "Callable[Concatenate[Client, P], Pages[T]]") -> "Callable[Concatenate[Client, P], Iterator[T]]":
    """Make a method that iterates over the entries of pages, and requests a page when it is needed."""

    @wraps(operation)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        pages: Any = operation(self, *args, **kwargs)
        for call in pages:
            yield from pages.send(self._send(call))

    return method


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
        self._base = base_of(address, application)
        self._http = httpx.Client(headers=authorization(key, token), timeout=timeout, transport=transport)

    def close(self) -> None:
        """Close the connections. The client's end as a context manager does it too."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Queues

    @paged
    def queues(self, *, count: bool = False, start: str = "", page: int = PAGE_SIZE) -> Pages[Queue]:
        """Iterate over the queues sorted by name, from the name ``start`` on, fetching ``page`` queues per request.

        ``count`` adds the number of messages of each queue.
        """
        if page < 2:
            raise ValueError("page must be at least 2, since each page repeats the last queue of the previous one")
        asked = {"details": "true", "include_count": "true" if count else "false", "limit": str(page)}
        last = None
        while True:
            found = (yield Call("GET", params={**asked, "offset": start} if start else asked))["queues"]
            yield [queue_of(entry) for entry in found if entry["queue_name"] != last]
            if len(found) < page:
                return
            start = last = found[-1]["queue_name"]

    @blocking
    def queue(self, name: str) -> Operation[Queue]:
        """Return a queue without its principals. Everybody who may read the queue may call this."""
        return queue_of({"principles": (), **(yield Call("GET", name, "info"))})

    @blocking
    def create_queue(
        self,
        name: str | None = None,
        *,
        partitions: int = 1,
        type: str = "user",  # noqa: A002 - what the API calls it
        consistency: str = "strong",
        principals: Sequence[str] = (),
    ) -> Operation[Queue]:
        """Create a queue, by default with a random name, or update the existing one. See ``Queue`` for the values."""
        fields = {
            "partitions": str(partitions), "type": type, "consistency": consistency, "principles": ",".join(principals),
        }  # fmt: skip
        if name is not None:
            fields["queue_name"] = name
        return queue_of((yield Call("POST", data=fields)))

    @blocking
    def update_queue(
        self,
        name: str,
        *,
        partitions: int | None = None,
        type: str | None = None,  # noqa: A002 - what the API calls it
        consistency: str | None = None,
        principals: Sequence[str] | None = None,
    ) -> Operation[Queue]:
        """Change the given settings. The number of partitions can't shrink."""
        given = {
            "partitions": partitions, "type": type, "consistency": consistency,
            "principles": None if principals is None else ",".join(principals),
        }  # fmt: skip
        changes = {field: str(value) for field, value in given.items() if value is not None}
        return queue_of((yield Call("PUT", name, data=changes)))

    @blocking
    def delete_queue(self, name: str) -> Operation[None]:
        """Delete a queue and its messages."""
        yield Call("DELETE", name)

    # Messages

    @blocking
    def post(
        self,
        queue: str,
        body: str | bytes,
        *,
        ttl: int | None = None,
        partition: int | None = None,
        content_type: str = "text/plain",
    ) -> Operation[Posted]:
        """Post a message. ``ttl`` is in seconds, by default three days. The default partition is random."""
        if must_be_batched(content_type):
            call = Call("POST", queue, json={"messages": [entry_of(NewMessage(body, ttl, partition, content_type))]})
        else:
            call = Call("POST", queue, content=bytes_of(body), headers=headers_of(content_type, ttl, partition))
        (posted,) = (yield call)["messages"]
        return posted_of(posted)

    @blocking
    def post_many(self, queue: str, messages: Iterable[NewMessage]) -> Operation[list[Posted]]:
        """Post all of the messages or none. Return the results in the same order."""
        entries = [entry_of(message) for message in messages]
        return [posted_of(entry) for entry in (yield Call("POST", queue, json={"messages": entries}))["messages"]]

    @paged
    def messages(
        self,
        queue: str,
        *,
        partition: int = 1,
        since: str | Decimal | None = None,
        after: str | None = None,
        descending: bool = False,
        page: int = PAGE_SIZE,
    ) -> Pages[Message]:
        """Iterate over the messages of a partition in the order of time, fetching ``page`` messages per request.

        Begin at ``since``, a time in seconds since 1970 or a message id, or behind the message id ``after``. To get
        only new messages, pass the id of the last received one as ``after``.
        """
        params = {
            "partitions": str(partition), "limit": str(page), "order": "descending" if descending else "ascending",
        }  # fmt: skip
        start = since
        if after is not None:
            start = next_id(after, descending)
            if start is None:
                return
        while True:
            if start is not None:
                params["since"] = f"{start:f}" if isinstance(start, Decimal) else start
            found, more = yield from read_page(queue, params, page)
            yield found
            if not more:
                return
            start = next_id(found[-1].id, descending)
            if start is None:
                return

    @blocking
    def read(
        self, queue: str, *, partition: int = 1, after: str | None = None, limit: int = PAGE_SIZE
    ) -> Operation[Page]:
        """Return up to ``limit`` messages of a partition after the message id ``after``, in one request."""
        params = {"partitions": str(partition), "limit": str(limit)}
        if after is not None:
            start = next_id(after, descending=False)
            if start is None:
                return Page([], more=False)
            params["since"] = start
        return (yield from read_page(queue, params, limit))

    @blocking
    def get(self, queue: str, places: Iterable[tuple[int, str]]) -> Operation[list[Message]]:
        """Return the existing messages at these places, in this order, without duplicates.

        A place is a partition and a message id.
        """
        found: list[Message] = []
        left = references(places)
        while left:
            answer = yield Call("GET", queue, ",".join(left[:MAX_IDS_PER_REQUEST]))
            some = [message_of(queue, entry) for entry in answer["messages"]]
            found += some
            asked = MAX_IDS_PER_REQUEST
            if answer.get("truncated"):
                asked = left.index(f"{some[-1].partition}:{some[-1].id}") + 1
            left = left[asked:]
        return found

    @blocking
    def overwrite(
        self,
        queue: str,
        partition: int,
        message_id: str,
        body: str | bytes,
        *,
        ttl: int | None = None,
        content_type: str = "text/plain",
    ) -> Operation[None]:
        """Create or replace a message. ``ttl`` is in seconds, by default three days."""
        headers = headers_of(content_type, ttl)
        yield Call("PUT", queue, f"{partition}:{message_id}", content=bytes_of(body), headers=headers)

    @blocking
    def delete(self, queue: str, places: Iterable[tuple[int, str]]) -> Operation[None]:
        """Delete the messages at these places, ignoring those that don't exist. It may take several requests.

        A place is a partition and a message id.
        """
        left = references(places)
        for first in range(0, len(left), MAX_IDS_PER_REQUEST):
            yield Call("DELETE", queue, ",".join(left[first : first + MAX_IDS_PER_REQUEST]))

    # Positions

    @blocking
    def positions(self, queue: str, consumer: str) -> Operation[dict[int, str]]:
        """Return the id of the consumer's last processed message by partition. Any name can be a consumer."""
        return positions_of((yield Call("GET", queue, "positions", consumer)))

    @blocking
    def set_positions(self, queue: str, consumer: str, positions: Mapping[int, str]) -> Operation[None]:
        """Set the positions of these partitions only."""
        by_partition = {str(partition): message_id for partition, message_id in positions.items()}
        yield Call("PUT", queue, "positions", consumer, json=by_partition)

    @blocking
    def delete_positions(self, queue: str, consumer: str) -> Operation[None]:
        """Delete a consumer's positions."""
        yield Call("DELETE", queue, "positions", consumer)

    def request(self, method: str, *names: str, **options: Any) -> dict[str, Any]:
        """Send a request to the application's URL with these further path segments, and return the JSON response.

        ``options`` are those of ``httpx.Client.request``.
        """
        return self._send(Call(method, *names, **options))

    def _send(self, call: Call) -> dict[str, Any]:
        try:
            response = self._http.request(call.method, self._base + call.path, **call.options)
        except httpx.RequestError as error:
            raise no_answer(error) from error
        return answer_of(response)
