"""Single messages over HTTP, alternating with empty requests, by busy clients. Runs in ``tools.benchmarks.child``."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, NamedTuple

from message_store import queues
from message_store.applications import create_application, create_key
from message_store.queues import MessageInput
from tools.benchmarks.serving import served

MESSAGES = 1000
BODY = b"x" * 200
WARM_UPS = 100

EMPTY = "/v1/"
"""This path answers 404 after all middleware."""


class Asked(NamedTuple):
    """A request and its expected status."""

    method: str
    path: str
    body: bytes | None
    status: int


def measure(vhost: str, clients: Sequence[int], requests: int, rounds: int) -> dict[str, Any]:
    """Return rounds of requests (``done``) and of ``empty`` ones by kind and number of clients, such as ``posts 8``.

    A round has the milliseconds of each request, and the seconds of all.
    """
    _, key = create_key(create_application("shop"))
    queue = queues.create("shop", "orders")
    ids = [one.id.hex for one in queues.post_all(queue, [MessageInput(BODY)] * MESSAGES)]
    places = itertools.cycle(ids[:: MESSAGES // 100])
    wanted: dict[str, Callable[[], Asked]] = {
        "posts": lambda: Asked("POST", "/v1/shop/orders", BODY, 201),
        "reads": lambda: Asked("GET", f"/v1/shop/orders?limit=1&since={next(places)}", None, 200),
    }
    measured: dict[str, Any] = {}
    with served() as port:

        def ask(number: int, at_once: int, each: Callable[[], Asked]) -> dict[str, Any]:
            return _together(port, f"Application {key}", at_once, [each() for _ in range(number)])

        for what, make in wanted.items():
            nothing = partial(make()._replace, path=EMPTY, status=404)
            ask(WARM_UPS, 1, make)
            for at_once in clients:
                found: dict[str, list[dict[str, Any]]] = {"done": [], "empty": []}
                for _ in range(rounds):
                    found["empty"].append(ask(requests, at_once, nothing))
                    found["done"].append(ask(requests, at_once, make))
                measured[f"{what} {at_once}"] = found
    return measured


def _together(port: int, authorization: str, clients: int, wanted: Sequence[Asked]) -> dict[str, Any]:
    """Send the requests from concurrent clients, each with a persistent connection."""
    headers = {"Authorization": authorization, "Content-Type": "text/plain"}
    ready = Barrier(clients + 1)
    milliseconds: list[float] = []
    wrong: list[BaseException] = []

    def ask(part: Sequence[Asked]) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        took = []
        try:
            connection.connect()
            ready.wait()
            for one in part:
                began = time.perf_counter()
                connection.request(one.method, one.path, one.body, headers)
                answer = connection.getresponse()
                text = answer.read()
                took.append((time.perf_counter() - began) * 1000)
                assert answer.status == one.status, f"{one.method} {one.path}: {answer.status} {text[:300]!r}"
        except BaseException as error:
            wrong.append(error)
            ready.abort()  # the others may still wait for this client
        finally:
            connection.close()
        milliseconds.extend(took)

    threads = [Thread(target=ask, args=(wanted[number::clients],)) for number in range(clients)]
    for thread in threads:
        thread.start()
    with suppress(BrokenBarrierError):
        ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if wrong:
        raise wrong[0]
    return {"milliseconds": milliseconds, "seconds": seconds}
