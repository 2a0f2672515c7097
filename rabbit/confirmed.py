"""Publish messages with publisher confirms, and collect the outcome of each.

It uses py-amqp: pika can't send floats in headers, and its ``BlockingConnection`` waits for each confirm.
"""

import math
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import amqp
from amqp.serialization import dumps

from rabbit.amqp import Session
from rabbit.errors import BrokerUnavailable
from rabbit.fetching import Fetched

CONFIRM_SECONDS = 10.0
"""The timeout for the confirms of a batch. The broker gives none while its memory alarm is raised."""

OTHER_PROPERTIES_BYTES = 4096
"""The most that a message's properties take beside its headers, with the added header."""

KEY_HEADER = "x-guardian-replay"
"""The header with the key of each message. A consumer can drop a message whose key it has seen."""


class Outcome(Enum):
    CONFIRMED = "confirmed"
    REJECTED = "rejected"
    """By a full queue."""
    RETURNED = "returned"
    """No queue is bound for it."""


class ConfirmChannel:
    """A session's channel in confirm mode. Nothing else may use the session.

    ``key_of`` returns the key of a returned message, given its routing key and the message. ``outcomes`` has the
    outcome of each message that the broker answered, by its key. ``blocked_since`` is the monotonic time since when the
    broker blocks the connection, as it does under a resource alarm, or infinity.
    """

    def __init__(self, session: Session, key_of: Callable[[str, Any], str]) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.blocked_since = math.inf
        self._session = session
        self._channel = session.new_channel()
        self._key_of = key_of
        self._sent = 0
        self._unconfirmed: dict[int, str] = {}
        self._channel.connection.on_blocked = lambda _: self._set_blocked_since(time.monotonic())
        self._channel.connection.on_unblocked = lambda: self._set_blocked_since(math.inf)
        session.request(self._channel.confirm_select)
        self._channel.events["basic_ack"].add(lambda tag, multiple: self._record(tag, multiple, Outcome.CONFIRMED))
        self._channel.events["basic_nack"].add(lambda tag, multiple: self._record(tag, multiple, Outcome.REJECTED))
        self._channel.events["basic_return"].add(self._on_return)

    @property
    def frame_max(self) -> int:
        return int(self._channel.connection.frame_max)

    def publish(self, key: str, message: amqp.Message, exchange: str, routing_key: str) -> None:
        self._sent += 1
        self._unconfirmed[self._sent] = key
        self._session.request(
            lambda: self._channel.basic_publish(message, exchange=exchange, routing_key=routing_key, mandatory=True)
        )

    def wait(self, until: float) -> bool:
        """Wait for the outcomes until this monotonic time, and return whether the broker answered all messages."""
        while self._unconfirmed:
            left = until - time.monotonic()
            if left <= 0 or not self._session.drain(self._channel, left):
                return False
        return True

    def poll(self) -> None:
        """Process what the broker sent since the last use."""
        while self._session.drain(self._channel, 0):
            pass

    def _record(self, tag: int, multiple: bool, outcome: Outcome) -> None:
        # The broker confirms in any order: an unroutable message at once, a persistent one later.
        for one in [sent for sent in self._unconfirmed if sent <= tag] if multiple else [tag]:
            self.outcomes.setdefault(self._unconfirmed.pop(one), outcome)

    def _set_blocked_since(self, since: float) -> None:
        self.blocked_since = since

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        self.outcomes[self._key_of(routing_key, message)] = Outcome.RETURNED


class ConfirmedPublisher:
    """Publishes messages in batches over one channel of a session. Nothing else may use the session.

    ``key_header`` is the header with the key of each message.
    """

    def __init__(self, session: Session, key_header: str = KEY_HEADER) -> None:
        self._session = session
        self._key_header = key_header
        self._channel = ConfirmChannel(session, key_of=lambda _, message: message.headers[key_header])

    @property
    def is_connected(self) -> bool:
        return self._session.is_connected

    def publish(
        self, messages: Mapping[str, Fetched], exchange: str | None = None, routing_key: str | None = None
    ) -> dict[str, str]:
        """Publish messages by key, and return by key why a message reached no queue.

        ``exchange`` and ``routing_key`` replace those of the messages. After BrokerUnavailable some of the messages may
        have arrived.
        """
        too_long = self._session.request(lambda: [key for key in messages if self._is_too_long(messages[key])])
        self._channel.outcomes.clear()
        for key, message in messages.items():
            if key not in too_long:
                content = amqp.Message(
                    message.body, application_headers={**message.headers, self._key_header: key}, **message.properties
                )
                to_exchange = message.exchange if exchange is None else exchange
                to = message.routing_key if routing_key is None else routing_key
                self._channel.publish(key, content, to_exchange, to)
        if not self._channel.wait(time.monotonic() + CONFIRM_SECONDS):
            self._session.close()
            raise BrokerUnavailable("the broker did not confirm the messages in time", timed_out=True)
        reasons = {Outcome.REJECTED: "the queue is full", Outcome.RETURNED: "no queue is bound for it"}
        refused = {key: reasons[outcome] for key, outcome in self._channel.outcomes.items() if outcome in reasons}
        return refused | dict.fromkeys(too_long, "its headers are too long to be sent again")

    def _is_too_long(self, message: Fetched) -> bool:
        """Return whether the broker would close the connection, since the message's properties exceed a frame."""
        return len(dumps("F", (message.headers,))) > self._channel.frame_max - OTHER_PROPERTIES_BYTES
