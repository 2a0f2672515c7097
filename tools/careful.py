"""Owners who watch, delete, restore and move their queues. All messages have numbers, so that a lost one is noticed."""

import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any
from urllib.parse import quote

import pika

from tools.crowd import Person
from tools.load import LOST, Failed, LoadThread
from tools.production import MAX, WARN

PULSE_USER = "careful-{}"
MOVED = 10
"""So few that both queues stay over their warning threshold, if Guardian deleted the first."""

PATIENCE_SECONDS = 60

REASONS = ("length", "deleted")
"""Of archives: Guardian or the owner deleted the queue."""

_numbers = itertools.count(1)


class Careful(LoadThread):
    """A thread in which an owner takes one queue after the other through all of this, and gives up after a failure."""

    def __init__(self, number: int, amqp_urls: Sequence[str], owner: Person, chance: random.Random) -> None:
        """Create the thread, with the number of its Pulse user."""
        super().__init__(f"careful owner {number}")
        self.confirmed: set[int] = set()
        """The numbers of the messages that the broker has accepted."""
        self.overflows: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.missed: list[str] = []
        """Watches that did not show exactly the published messages."""
        self._pulse_user = PULSE_USER.format(number)
        self._exchange = f"exchange/{self._pulse_user}/numbers"
        self._parameters = [pika.URLParameters(f"{amqp_url}/%2F?stack_timeout=6") for amqp_url in amqp_urls]
        self._owner = owner
        self._chance = chance

    def work(self) -> None:
        body = {"username": self._pulse_user, "owners": [self._owner.email]}
        self._ask("POST", "/api/pulse-users/", body, what="create Pulse users")
        for number in itertools.count(1):
            with contextlib.suppress(Failed, *LOST):
                self._use_queue(f"queue/{self._pulse_user}/{number}-")
            if self.ended.wait(1):
                return

    def _use_queue(self, name: str) -> None:
        is_over = self._chance.random() < 0.5
        with self._channel() as channel:
            channel.exchange_declare(self._exchange, durable=True)
            arguments = {"x-queue-type": self._chance.choice(("classic", "quorum"))}
            channel.queue_declare(name, durable=True, arguments=arguments)
            channel.queue_bind(name, self._exchange, name)
        queue = f"/api/queues/{self._listed(name)['uuid']}/"
        self._watch(queue, name, MAX + 1 if is_over else WARN + 5)
        if not is_over:
            self._ask("DELETE", queue, what="delete queues")
        archive = self._await(f"/api/archives/?queue={quote(name, safe='')}", _first(reason=REASONS))
        if archive["arguments"] is None:  # the management API was away, so restoring is refused
            return
        half, path = archive["messages"] // 2, f"/api/archives/{archive['uuid']}/"
        for body in {"last": half}, {"first": half + 1, "queue": f"{name}rest"}:
            replay = self._ask("POST", f"{path}restore/", body, what="restore queues")
            self._await_end(f"{path}replays/{replay['uuid']}/")
        self._listed(name)
        one = self._ask("POST", f"{queue}move/", {"to": {"queue": f"{name}rest"}, "count": MOVED}, what="move messages")
        self._await_end(f"/api/moves/{one['uuid']}/")
        self.done["queues"] += 1

    def _watch(self, queue: str, name: str, messages: int) -> None:
        """Publish messages, and watch the queue meanwhile, unless too many watches were abandoned just now."""
        body = {"queue": queue.split("/")[-2]}
        watch = self._ask("POST", "/api/watches/", body, what="watch queues", expected=(201, 400))
        numbers = list(itertools.islice(_numbers, messages))
        with self._channel() as channel:
            channel.confirm_delivery()
            self.overflows[name] += messages > MAX
            for number in numbers:
                persistent = pika.BasicProperties(delivery_mode=2)
                channel.basic_publish(self._exchange, name, json.dumps({"number": number}).encode(), persistent)
                self.confirmed.add(number)
        if "uuid" in watch:
            path = f"/api/watches/{watch['uuid']}/"
            seen = [one["body"]["number"] for one in self._ask("GET", path, what="watch queues")["messages"]]
            self.done["watches"] += 1
            if seen != numbers:
                self.missed.append(f"of the messages {numbers} to {name}, a watch showed {seen}")
            if self._chance.random() < 0.7:  # otherwise it is abandoned
                self._ask("DELETE", path, what="watch queues")

    @contextlib.contextmanager
    def _channel(self) -> Any:
        with contextlib.closing(pika.BlockingConnection(self._parameters)) as connection:
            yield connection.channel()

    def _ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        return json.loads(self._owner.client(self._chance).ask(method, path, body, **options) or b"null")

    def _listed(self, name: str) -> Any:
        """Return the queue as soon as a pass has listed it."""
        return self._await(f"/api/queues/?search={quote(name, safe='')}", _first(name=[name], state=["ok", "warned"]))

    def _await_end(self, path: str) -> None:
        self._await(path, lambda sending: sending["state"] != "running")

    def _await(self, path: str, find: Callable[[Any], Any]) -> Any:
        """Return what ``find`` finds in the answer, as soon as it does. Raises Failed if that takes too long."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until and not self.ended.wait(0.5):
            if found := find(self._ask("GET", path, what="list queues")):
                return found
        raise Failed(f"{path} did not change")


def _first(**values: Collection[str]) -> Callable[[Any], Any]:
    """Return a function that returns the first of some rows with these values."""
    return lambda rows: next((row for row in rows if all(row[name] in values[name] for name in values)), None)
