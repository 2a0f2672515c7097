"""The client for asyncio: the operations of ``Client``, awaited."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from inspect import unwrap
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from guardian_store._client import TIMEOUT_SECONDS, Client
from guardian_store._protocol import Call, answer_of, authorization, base_of, no_answer

P = ParamSpec("P")
T = TypeVar("T")


def awaited(
    blocking: Callable[Concatenate[Client, P], T],
) -> "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]":
    """Make a coroutine of a method of ``Client``."""
    operation = unwrap(blocking)

    @wraps(blocking)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        steps: Any = operation(self, *args, **kwargs)
        answer = None
        while True:
            try:
                call = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = await self._send(call)

    return method


def paged(
    blocking: Callable[Concatenate[Client, P], Iterator[T]],
) -> "Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]":
    """Make an asynchronous iterator of a method of ``Client`` that iterates over pages."""
    operation = unwrap(blocking)

    @wraps(blocking)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        pages: Any = operation(self, *args, **kwargs)
        for call in pages:
            for entry in pages.send(await self._send(call)):
                yield entry

    return method


class AsyncClient:
    """The client for asyncio, with the methods of ``Client``.

    Await them, except ``queues`` and ``messages``: iterate over these with ``async for``. The tasks of one event loop
    may share a client.

    ::

        async with AsyncClient("https://guardian.example.org", "notifications", key=KEY) as client:
            await client.post("alice", "hello")
            async for message in client.messages("alice"):
                print(message.timestamp, message.text)
    """

    def __init__(
        self,
        address: str,
        application: str,
        *,
        key: str = "",
        token: str = "",
        timeout: float = TIMEOUT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base = base_of(address, application)
        self._http = httpx.AsyncClient(headers=authorization(key, token), timeout=timeout, transport=transport)

    async def close(self) -> None:
        """Close the connections. The client's end as a context manager does it too."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    queues = paged(Client.queues)
    queue = awaited(Client.queue)
    create_queue = awaited(Client.create_queue)
    update_queue = awaited(Client.update_queue)
    delete_queue = awaited(Client.delete_queue)

    post = awaited(Client.post)
    post_many = awaited(Client.post_many)
    messages = paged(Client.messages)
    read = awaited(Client.read)
    get = awaited(Client.get)
    overwrite = awaited(Client.overwrite)
    delete = awaited(Client.delete)

    positions = awaited(Client.positions)
    set_positions = awaited(Client.set_positions)
    delete_positions = awaited(Client.delete_positions)

    async def request(self, method: str, *names: str, **options: Any) -> dict[str, Any]:
        """Send a request to the application's URL with these further path segments, and return the JSON response.

        ``options`` are those of ``httpx.AsyncClient.request``.
        """
        return await self._send(Call(method, *names, **options))

    async def _send(self, call: Call) -> dict[str, Any]:
        try:
            response = await self._http.request(call.method, self._base + call.path, **call.options)
        except httpx.RequestError as error:
            raise no_answer(error) from error
        return answer_of(response)
