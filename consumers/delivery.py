"""A message as it came from the broker, and the channel that it came by."""

import time
from collections import deque
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What becomes of a delivery on the channel that it came by."""

    ACK = "ack"
    REQUEUE = "requeue"


class Delivery:
    """A message as it came. ``intake`` is where it came in, ``tag`` its number there; properties are pika's.

    ``exchange``, ``routing_key`` and ``redelivered`` are what the broker said at this delivery; ``since`` is when it
    came, by `time.monotonic`.
    """

    __slots__ = ("body", "exchange", "intake", "properties", "redelivered", "routing_key", "since", "tag")

    def __init__(self, intake: "Intake", method: Any, properties: Any, body: bytes) -> None:
        self.intake = intake
        self.tag: int = method.delivery_tag
        self.exchange: str = method.exchange
        self.routing_key: str = method.routing_key
        self.redelivered: bool = method.redelivered
        self.properties = properties
        self.body = body
        self.since = time.monotonic()

    @property
    def queue(self) -> str:
        """The name of the physical queue that it came from."""
        return self.intake.queue

    @property
    def level(self) -> int:
        """The level of that queue, as the source gave it."""
        return self.intake.level


class Intake:
    """One channel that reads one queue, for as long as its connection lives. All but ``open`` is the connection's.

    A tag is only worth something on its own channel: when that is closed, by whom ever, the broker has put what was
    unacknowledged back into the queue, and the tags are void. So ``open`` never becomes true again; the next connection
    has intakes of its own.
    """

    __slots__ = ("_finished", "_outstanding", "channel", "consumer_tag", "level", "open", "prefetch", "queue")

    def __init__(self, queue: str, level: int, prefetch: int, channel: Any) -> None:
        self.queue = queue
        self.level = level
        self.prefetch = prefetch
        self.channel = channel
        self.consumer_tag = ""
        self.open = True
        self._outstanding: deque[int] = deque()
        self._finished: set[int] = set()

    def arrived(self, tag: int) -> None:
        """Note that a message came; tags rise."""
        self._outstanding.append(tag)

    def settle(self, acked: list[int], requeued: list[int]) -> None:
        """Tell the broker what became of these messages, in as few frames as their order permits.

        One acknowledgement of several is for all up to a tag: it is sent where everything up to there is finished, and
        never for a message that somebody still works on.
        """
        for tag in requeued:
            self.channel.basic_reject(tag, requeue=True)
        outstanding, finished = self._outstanding, self._finished
        finished.update(acked)
        finished.update(requeued)
        upto = 0
        while outstanding and outstanding[0] in finished:
            tag = outstanding.popleft()
            finished.remove(tag)
            upto = tag
        if len(acked) == 1:
            self.channel.basic_ack(acked[0])
            return
        # The broker refuses a tag that it doesn't know any more, as that of a rejected message: this one is acked now.
        together = max((tag for tag in acked if tag <= upto), default=0)
        if together:
            self.channel.basic_ack(together, multiple=True)
        for tag in acked:
            if tag > together:
                self.channel.basic_ack(tag)
