"""Load on Guardian and its broker: recorded HTTP requests, and queues that grow and shrink."""

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

ANSWER_SECONDS = 60.0
"""How long a client waits for an answer, including the start of a new web process."""

LOST = (AMQPError, AMQPConnectorException, OSError)
"""What pika raises if a connection is lost or can't be opened."""


class Request(NamedTuple):
    """A request to a web process. Times are monotonic.

    ``problem`` is empty if the answer was expected. ``status`` is 0 without an answer.
    """

    process: str
    began: float
    ended: float
    problem: str
    what: str
    status: int


class Failed(Exception):
    """A request got no answer or an unexpected one."""


class Client:
    """Sends requests to one web process, each over a new connection, and records them in ``requests``."""

    def __init__(self, process: str, address: str, headers: Mapping[str, str], requests: list[Request]) -> None:
        """Create a client. ``headers`` are sent with every request."""
        self._process = process
        self._host = urlsplit(address).netloc
        self._headers = dict(headers)
        self._requests = requests

    def ask(
        self, method: str, path: str, body: Any = None, *, what: str, expected: Collection[int] = (200, 201, 202, 204)
    ) -> bytes:
        """Return the body of the answer. Raises Failed for an unexpected status."""
        began = time.monotonic()
        status, content, problem = 0, b"", ""
        connection = http.client.HTTPConnection(self._host, timeout=ANSWER_SECONDS)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json", **self._headers})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
            if status not in expected:
                problem = f"{method} {path}: {status} {content[:200]!r}"
        except (OSError, http.client.HTTPException) as error:
            problem = f"{method} {path}: {error!r}"
        finally:
            connection.close()
        self._requests.append(Request(self._process, began, time.monotonic(), problem, what, status))
        if problem:
            raise Failed(problem)
        return content


class LoadThread(threading.Thread):
    """A thread that works until ``ended`` is set. ``error`` is an exception that stopped it earlier."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.error: Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self.work()
        except Exception as error:
            self.error = error

    def work(self) -> None:
        """Work until ``ended`` is set."""
        raise NotImplementedError


class BrokerLoad(LoadThread):
    """A thread that works on an AMQP connection to ``/``, and opens another whenever it is lost."""

    def __init__(self, name: str, amqp_urls: Sequence[str]) -> None:
        """Create the load on a broker with these addresses, which are tried in turn."""
        super().__init__(name)
        self.done: Counter[str] = Counter()
        options = "heartbeat=4&socket_timeout=5&stack_timeout=6"
        self._parameters = [pika.URLParameters(f"{amqp_url}/%2F?{options}") for amqp_url in amqp_urls]

    def work(self) -> None:
        while not self.ended.is_set():
            try:
                with contextlib.closing(pika.BlockingConnection(self._parameters)) as connection:
                    self._work_on(connection)
            except LOST:
                self.done["connections lost"] += 1
                self.ended.wait(0.5)

    def _work_on(self, connection: Any) -> None:
        raise NotImplementedError


class QueueLoad(BrokerLoad):
    """Queues that grow and shrink past both thresholds and are declared again after a deletion."""

    MAX_QUEUES = 100

    def __init__(
        self,
        amqp_urls: Sequence[str],
        name_of: Callable[[int], str],
        *,
        warn: int,
        most: int,
        pause: float,
        chance: random.Random,
    ) -> None:
        """Create the load on a broker with these addresses, which are tried in turn.

        ``name_of`` returns a queue's name by its number; ``pause``: seconds between two actions.
        """
        super().__init__("queue load", amqp_urls)
        self.overflows: Counter[str] = Counter()
        """How often publishing exceeded a queue's deletion limit, by the queue's name."""
        self._name_of = name_of
        self._warn = warn
        self._most = most
        self._pause = pause
        self._chance = chance
        self._names: list[str] = []
        self._lengths: Counter[str] = Counter()
        self._unconfirmed: Counter[str] = Counter()

    def _work_on(self, connection: Any) -> None:
        channel = connection.channel()
        channel.confirm_delivery()
        actions = {
            self._declare: 4,
            self._grow: 8,
            self._overflow: 2,
            self._shrink: 4,
            self._purge: 2,
            self._delete_queue: 1,
        }
        while not self.ended.is_set():
            action = self._chance.choices(list(actions), list(actions.values()))[0]
            if not self._names or (action == self._declare and len(self._names) < self.MAX_QUEUES):
                self._declare(channel)
            elif action != self._declare:
                action(channel)
            connection.process_data_events(self._pause)

    def _declare(self, channel: Any) -> None:
        name = self._name_of(self.done["queues declared"])
        self.done["queues declared"] += 1
        self._names.append(name)
        self._publish(channel, name, self._chance.randint(0, 5))

    def _grow(self, channel: Any) -> None:
        self._publish(channel, self._chance.choice(self._names), self._chance.randint(1, self._warn + 2))

    def _overflow(self, channel: Any) -> None:
        self._publish(channel, self._chance.choice(self._names), self._most + 1)

    def _publish(self, channel: Any, name: str, messages: int) -> None:
        self._lengths[name] = channel.queue_declare(name, durable=True).method.message_count + self._unconfirmed[name]
        is_over = False
        for _ in range(messages):
            self._lengths[name] += 1
            if self._lengths[name] > self._most and not is_over:
                is_over = True
                self.overflows[name] += 1
            self._unconfirmed[name] += 1  # it may arrive even if the connection is lost
            channel.basic_publish("", name, b"a message")
            self._unconfirmed[name] -= 1
            self.done["messages published"] += 1

    def _shrink(self, channel: Any) -> None:
        name = self._chance.choice(self._names)
        channel.queue_declare(name, durable=True)
        for _ in range(self._chance.randint(1, self._most)):
            if channel.basic_get(name, auto_ack=True)[0] is None:
                break
            self.done["messages consumed"] += 1

    def _purge(self, channel: Any) -> None:
        name = self._chance.choice(self._names)
        channel.queue_declare(name, durable=True)
        channel.queue_purge(name)

    def _delete_queue(self, channel: Any) -> None:
        name = self._names.pop(self._chance.randrange(len(self._names)))
        channel.queue_delete(name)
