"""What keeps Guardian busy while things are done to it: people on its pages, agents that register, messages."""

import contextlib
import heapq
import http.client
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pika
import pika.exceptions

ANSWER_SECONDS = 60.0
"""How long a client waits for an answer, the start of a new web process included."""


class Request(NamedTuple):
    """One request to one web process, by the monotonic clock. ``problem`` is empty where it was answered as wanted.

    ``status`` is 0 where there was no answer; ``what`` says what was wanted.
    """

    process: str
    began: float
    ended: float
    problem: str
    what: str = ""
    status: int = 0


class Failed(Exception):
    """A request had no answer, or one that says that something is wrong."""


class Client:
    """Asks one web process, over a new connection each time, and notes what became of it."""

    def __init__(self, process: str, address: str, headers: Mapping[str, str]) -> None:
        """Choose; ``process`` is its name, ``headers`` go with every request."""
        self.requests: list[Request] = []
        self.waiting = False
        """Whether a request is under way."""
        self.process = process
        self._host = urlsplit(address).netloc
        self._headers = dict(headers)

    def ask(
        self, method: str, path: str, body: Any = None, *, what: str = "", fine: Collection[int] = (200, 201, 202, 204)
    ) -> tuple[int, bytes, dict[str, str]]:
        """Give the status, the body and the headers of an answer; raises Failed unless its status is a ``fine`` one."""
        began = time.monotonic()
        status, content, headers, problem = 0, b"", {}, ""
        connection = http.client.HTTPConnection(self._host, timeout=ANSWER_SECONDS)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json", **self._headers})
            self.waiting = True
            answer = connection.getresponse()
            status, content, headers = answer.status, answer.read(), dict(answer.getheaders())
            if status not in fine:
                problem = f"{method} {path}: {status} {content[:200]!r}"
        except (OSError, http.client.HTTPException) as error:
            problem = f"{method} {path}: {error!r}"
        finally:
            connection.close()
            self.waiting = False
        self.requests.append(Request(self.process, began, time.monotonic(), problem, what, status))
        if problem:
            raise Failed(problem)
        return status, content, headers


class Busy(threading.Thread):
    """Does one thing again and again, until it is ended; what went wrong in it is in ``error``."""

    def __init__(self, name: str) -> None:
        """Choose; nothing is done yet."""
        super().__init__(name=name, daemon=True)
        self.error: Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Go on until it is ended."""
        try:
            self.work()
        except Exception as error:
            self.error = error

    def work(self) -> None:
        """Do it, until ``ended`` is set."""
        raise NotImplementedError

    def end(self) -> None:
        """Let it finish what it is at, and wait for it."""
        self.ended.set()
        self.join(ANSWER_SECONDS)


class Viewer(Busy):
    """Somebody who is signed in and looks at one page after the other."""

    PATHS = ("/queues/", "/", "/subscriptions/", "/static/guardian.css")

    def __init__(self, client: Client) -> None:
        """Choose whom to ask."""
        super().__init__("viewer")
        self._client = client

    def work(self) -> None:
        """Look at pages; one that doesn't come is only noted."""
        for path in itertools.cycle(self.PATHS):
            with contextlib.suppress(Failed):  # the client has it, and the verdict is not here
                self._client.ask("GET", path)
            if self.ended.wait(0.05):
                return


class Registered(NamedTuple):
    """What Guardian answered to a registration."""

    vhost: str
    queue: str


class Registrar(Busy):
    """Agents that register one after the other with one web process, and with the other where that fails."""

    def __init__(self, name: str, clients: list[Client], offering: str, pause: float) -> None:
        """Choose; the first of the clients is asked first. ``pause``: seconds between two agents."""
        super().__init__(f"registrar {name}")
        self.registered: list[Registered] = []
        self._clients = clients
        self._offering = offering
        self._pause = pause

    def work(self) -> None:
        """Register; an agent that had no answer begins anew under another name, as one that restarts."""
        for number in itertools.count():
            for attempt, client in enumerate(self._clients):
                try:
                    self.registered.append(self._register(client, f"{self.name}-{number}-{attempt}"))
                    break
                except Failed:
                    continue
            if self.ended.wait(self._pause):
                return

    def _register(self, client: Client, name: str) -> Registered:
        _, content, _ = client.ask("POST", "/api/agent-identities/", {"offering": self._offering, "name": name})
        agent = json.loads(content)["uuid"]
        wanted = {"offering_uuid": self._offering, "object_type": "order"}
        _, content, _ = client.ask("POST", f"/api/agent-identities/{agent}/create_queue/", wanted)
        answer = json.loads(content)
        return Registered(answer["vhost"], answer["queue_name"])


class Messages(Busy):
    """Queues that grow: each past its warn length, and every second one some time later past its maximum."""

    def __init__(
        self, amqp_url: str, name_of: Callable[[int], str], *, warn: int, most: int, pause: float, chance: random.Random
    ) -> None:
        """Choose. ``name_of`` gives the name of a queue by its number; ``pause``: seconds between two new queues."""
        super().__init__("messages")
        self.long: list[str] = []
        self.too_long: list[str] = []
        self._url = amqp_url
        self._name_of = name_of
        self._warn = warn
        self._most = most
        self._pause = pause
        self._chance = chance

    def work(self) -> None:
        """Fill queues. What was begun is finished at the end: a queue stops in between its two lengths or past both."""
        connection = pika.BlockingConnection(pika.URLParameters(f"{self._url}/%2F"))
        channel = connection.channel()
        channel.confirm_delivery()
        later: list[tuple[float, str]] = []
        number = 0
        next_at = time.monotonic()
        while later or not self.ended.is_set():
            now = time.monotonic()
            if now >= next_at and not self.ended.is_set():
                name = self._name_of(number)
                channel.queue_declare(name, durable=True)
                self._publish(channel, name, self._warn + 5)
                if number % 2:
                    heapq.heappush(later, (now + self._chance.uniform(1, 4), name))
                else:
                    self.long.append(name)
                number += 1
                next_at = now + self._pause
            while later and later[0][0] <= now:
                _, name = heapq.heappop(later)
                self._publish(channel, name, self._most)
                self.too_long.append(name)
            connection.process_data_events(0.05)
        connection.close()

    def _publish(self, channel: Any, name: str, messages: int) -> None:
        for _ in range(messages):
            channel.basic_publish("", name, b"a message")


class Tides(Busy):
    """Queues that grow and shrink over their lengths, and come and go, as clients make them that connect again."""

    MOST_QUEUES = 100

    def __init__(
        self, amqp_url: str, name_of: Callable[[int], str], *, warn: int, most: int, pause: float, chance: random.Random
    ) -> None:
        """Choose. ``name_of`` gives the name of a queue by its number; ``pause``: seconds between two deeds."""
        super().__init__("tides")
        self.most_in: Counter[str] = Counter()
        """How many messages at most were ever in a queue at once, by its name."""
        self.done: Counter[str] = Counter()
        """How often what was done."""
        self._parameters = pika.URLParameters(f"{amqp_url}/%2F?heartbeat=4&socket_timeout=5")
        self._name_of = name_of
        self._warn = warn
        self._most = most
        self._pause = pause
        self._chance = chance
        self._names: list[str] = []
        self._in: Counter[str] = Counter()
        self._unconfirmed: Counter[str] = Counter()

    def work(self) -> None:
        """Go on, whatever becomes of the connection."""
        while not self.ended.is_set():
            try:
                with contextlib.closing(pika.BlockingConnection(self._parameters)) as connection:
                    self._go_on(connection)
            except (pika.exceptions.AMQPError, OSError):
                self.done["connections lost"] += 1
                self.ended.wait(0.5)

    def _go_on(self, connection: Any) -> None:
        channel = connection.channel()
        channel.confirm_delivery()
        deeds = {self._begin: 4, self._grow: 8, self._overflow: 2, self._shrink: 4, self._empty: 2, self._remove: 1}
        while not self.ended.is_set():
            deed = self._chance.choices(list(deeds), list(deeds.values()))[0]
            if not self._names or (deed == self._begin and len(self._names) < self.MOST_QUEUES):
                self._begin(channel)
            elif deed != self._begin:
                deed(channel)
            connection.process_data_events(self._pause)

    def _begin(self, channel: Any) -> None:
        name = self._name_of(self.done["queues made"])
        self.done["queues made"] += 1
        self._names.append(name)
        self._publish(channel, name, self._chance.randint(0, 5))

    def _grow(self, channel: Any) -> None:
        self._publish(channel, self._chance.choice(self._names), self._chance.randint(1, self._warn + 2))

    def _overflow(self, channel: Any) -> None:
        self._publish(channel, self._chance.choice(self._names), self._most + 1)

    def _publish(self, channel: Any, name: str, messages: int) -> None:
        self._in[name] = channel.queue_declare(name, durable=True).method.message_count + self._unconfirmed[name]
        for _ in range(messages):
            self._in[name] += 1
            self.most_in[name] = max(self.most_in[name], self._in[name])
            self._unconfirmed[name] += 1  # it may arrive though the connection is lost
            channel.basic_publish("", name, b"a message")
            self._unconfirmed[name] -= 1
            self.done["messages published"] += 1

    def _shrink(self, channel: Any) -> None:
        name = self._chance.choice(self._names)
        channel.queue_declare(name, durable=True)
        for _ in range(self._chance.randint(1, self._most)):
            if channel.basic_get(name, auto_ack=True)[0] is None:
                break
            self.done["messages taken"] += 1

    def _empty(self, channel: Any) -> None:
        name = self._chance.choice(self._names)
        channel.queue_declare(name, durable=True)
        channel.queue_purge(name)
        self.done["queues emptied"] += 1

    def _remove(self, channel: Any) -> None:
        name = self._names.pop(self._chance.randrange(len(self._names)))
        channel.queue_delete(name)
        self.done["queues removed"] += 1
