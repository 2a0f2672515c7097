"""Publish messages in batches with publisher confirms, on a connection of its own.

It uses py-amqp: pika can't send floats in headers, and its ``BlockingConnection`` waits for each confirm.
"""

import time
from collections.abc import Mapping
from typing import Any

import amqp
from amqp.serialization import dumps

from rabbit.amqp import Session
from rabbit.fetching import Fetched
from rabbit.management import BrokerUnavailable

CONFIRM_SECONDS = 10.0
"""The timeout for the confirms of a batch. The broker gives none while its memory alarm is raised."""

OTHER_PROPERTIES_BYTES = 4096
"""The most that a message's properties take beside its headers, with the added header."""

KEY_HEADER = "x-guardian-replay"
"""The header with the key of each message. A consumer can drop a message whose key it has seen."""


class ConfirmedPublisher:
    """Publishes over one channel of a session. Nothing else may use the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channel = session.new_channel()
        self._sent = 0
        self._first = 1
        self._settled: dict[int, bool] = {}
        self._returned: set[str] = set()
        session.request(self._channel.confirm_select)
        self._channel.events["basic_ack"].add(lambda tag, multiple: self._settle(tag, multiple, True))
        self._channel.events["basic_nack"].add(lambda tag, multiple: self._settle(tag, multiple, False))
        self._channel.events["basic_return"].add(self._on_return)

    def publish(self, messages: Mapping[str, Fetched], exchange: str, routing_key: str | None = None) -> dict[str, str]:
        """Publish messages by key, and return why each that no queue took was not taken.

        ``routing_key`` replaces those of the messages.

        Raises:
            BrokerUnavailable: the broker does not answer in time. Some of the messages may have arrived.
            BrokerError: the broker refuses.
        """
        too_long = self._session.request(lambda: [key for key in messages if self._is_too_long(messages[key])])
        to_send = {key: message for key, message in messages.items() if key not in too_long}
        self._first = self._sent + 1
        tags = dict(enumerate(to_send, self._first))
        self._sent += len(to_send)
        self._settled.clear()
        self._returned.clear()
        self._session.request(lambda: self._publish(to_send, exchange, routing_key))
        deadline = time.monotonic() + CONFIRM_SECONDS
        while not tags.keys() <= self._settled.keys():
            left = deadline - time.monotonic()
            if left <= 0 or not self._session.drain(self._channel, left):
                self._session.close()
                raise BrokerUnavailable("the broker did not confirm the messages in time", timed_out=True)
        full = {key: "the queue is full" for tag, key in tags.items() if not self._settled[tag]}
        unsent = dict.fromkeys(too_long, "its headers are too long to be sent again")
        return full | dict.fromkeys(self._returned, "no queue is bound for it") | unsent

    def _is_too_long(self, message: Fetched) -> bool:
        """Return whether the broker would close the connection, since the message's properties exceed a frame."""
        most: int = self._channel.connection.frame_max - OTHER_PROPERTIES_BYTES
        return len(dumps("F", (message.headers,))) > most

    def _publish(self, messages: Mapping[str, Fetched], exchange: str, routing_key: str | None) -> None:
        for key, message in messages.items():
            content = amqp.Message(
                message.body, application_headers={**message.headers, KEY_HEADER: key}, **message.properties
            )
            to = message.routing_key if routing_key is None else routing_key
            self._channel.basic_publish(content, exchange, to, mandatory=True)

    def _settle(self, tag: int, multiple: bool, is_confirmed: bool) -> None:
        # The broker confirms in any order: an unroutable message at once, a persistent one later.
        for one in range(self._first, tag + 1) if multiple else (tag,):
            self._settled.setdefault(one, is_confirmed)

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        self._returned.add(message.properties["application_headers"][KEY_HEADER])
