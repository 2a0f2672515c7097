"""An owner whose queues cost Guardian as much as they can, all the time: slow ones, huge headers, large archives."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pika

from tools.crowd import Person
from tools.load import BrokerLoad
from tools.production import MAX

PULSE_USERS = [f"unruly-{number}" for number in range(6)]

SLOW_QUEUES = 3
"""The number for each Pulse user, in all fewer than the brake's: a single active consumer holds back their messages."""

HEADERS = {f"{number:04x}": True for number in range(16_000)}
"""112 kB as properties of a message, and about ten times as much in memory once they are decoded."""

BODY_BYTES = 19_000
"""Of the random bodies that fill archives: three archives take about what an owner may (a fifth of all)."""


def is_unruly(queue: str) -> bool:
    """Return whether the queue with this name belongs to the unruly owner."""
    return queue.startswith("queue/unruly-")


class Unruly(BrokerLoad):
    """A thread that declares and fills the queues whenever Guardian has deleted them."""

    def __init__(self, amqp_urls: Sequence[str], owner: Person, after: float) -> None:
        """Create the load on a broker with these addresses. It begins ``after`` some seconds."""
        super().__init__("unruly owner", amqp_urls)
        self.began: datetime | None = None
        self._owner = owner
        self._after = after
        self._huge = pika.BasicProperties(headers=HEADERS)
        encoded = self._huge.encode()
        self._huge.encode = lambda: list(encoded)  # encoding it for each message would slow down the other threads

    def work(self) -> None:
        self.ended.wait(self._after)
        self.began = datetime.now(UTC)
        for name in PULSE_USERS:
            body = {"username": name, "owners": [self._owner.email]}
            self._owner.client(random.Random(name)).ask("POST", "/api/pulse-users/", body, what="create Pulse users")
        super().work()

    def _work_on(self, connection: Any) -> None:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        while not self.ended.is_set():
            for name in PULSE_USERS:
                for number in range(SLOW_QUEUES):
                    self._fill(channel, f"queue/{name}/slow-{number}", 3 * MAX, is_slow=True)
                self._fill(channel, f"queue/{name}/large", MAX + 4, BODY_BYTES)
            self._fill(channel, f"queue/{PULSE_USERS[0]}/headers", MAX + 4, properties=self._huge)
            connection.process_data_events(0.5)

    def _fill(
        self, channel: Any, name: str, messages: int, size: int = 0, *, properties: Any = None, is_slow: bool = False
    ) -> None:
        arguments = {"x-single-active-consumer": True} if is_slow else None
        declared = channel.queue_declare(name, durable=True, arguments=arguments).method
        if is_slow and not declared.consumer_count:
            channel.basic_consume(name, lambda *_: None)  # it gets one message, and never acknowledges it
        if declared.message_count < MAX:
            for _ in range(messages - declared.message_count):
                channel.basic_publish("", name, random.randbytes(size), properties)
