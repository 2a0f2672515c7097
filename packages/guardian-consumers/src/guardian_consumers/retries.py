"""The delay queues and the parking queue: what they are, and what is written on the messages that go there.

A message that failed is published to a delay queue, with a confirmation, and acknowledged then. The delay queue has a
TTL and dead-letters to the exchange, by a routing key that leads to the one work queue. Each delay has a queue of its
own: in one with several the short ones would wait behind the long ones. All goes through the consumer's own exchange
and none through the default one, to which a Pulse user may not publish.

How often a message failed stands in a header of ours. ``x-death`` is the broker's, differs from version to version, and
publishers can write it too; it is taken off.

A crash between the confirmation and the acknowledgement leaves the message twice: in the delay or parking queue, and in
the work queue. Both have the same message id.
"""

import hashlib
import time
from collections.abc import Mapping
from copy import copy
from typing import Any

import pika

from guardian_consumers.delivery import Delivery
from guardian_consumers.names import Names, delay_queue, parking_queue, return_key

ATTEMPTS = "consumer-attempts"
"""How often it failed."""
EXCHANGE = "consumer-exchange"
ROUTING_KEY = "consumer-routing-key"
"""Where it was first published."""
QUEUE = "consumer-queue"
"""Whose consumer wrote this."""
ERROR = "consumer-error"
"""The exception's class and text."""
TRACEBACK = "consumer-traceback"
FAILED_AT = "consumer-failed-at"
"""Seconds since 1970, as a whole number."""
MOVED = "consumer-moved"
"""True where the move between queues of priorities published it anew."""
KEPT_PREFIX = "consumer-kept-"
"""Before the name of what was taken off: a property or header with which the broker would do something again."""
GENERATED_ID_PREFIX = "made-"
"""How an id begins that was made of a message that had none."""
HEADERS_DROPPED = "consumer-headers-dropped"
"""True where the headers were too long, or too odd, to be sent on with ours."""

TRACEBACK_BYTES = 16_000
ERROR_BYTES = 2_000
HEADER_BYTES = 100_000
"""The headers of one message have to fit into one frame, which has 131,072 bytes by default."""

DELIVERY_LIMIT = 100
"""How often a quorum queue hands out a message before it is parked. RabbitMQ 3 counts what was given back untouched,
too, as at the end of a process; RabbitMQ 4, by default, drops a message after 20 times."""

_BROKER_HEADERS = ("x-death", "x-first-death-exchange", "x-first-death-queue", "x-first-death-reason",
                "x-last-death-exchange", "x-last-death-queue", "x-last-death-reason",
                "x-delivery-count", "x-acquired-count")  # fmt: skip
_INTERPRETED_HEADERS = ("CC", "BCC", "x-delay")


def work_queue_arguments(queue_type: str, names: Names, queue: str) -> dict[str, Any]:
    """Return the arguments of a work queue, other than its source's.

    A quorum queue counts how often a message came back, and past a limit it goes to the parking queue: that is where
    one ends that kills each process which takes it.
    """
    if queue_type == "classic":
        return {"x-queue-type": "classic"}
    return {
        "x-queue-type": "quorum",
        "x-delivery-limit": DELIVERY_LIMIT,
        "x-dead-letter-exchange": names.exchange,
        "x-dead-letter-routing-key": parking_queue(queue),
        **_AT_LEAST_ONCE,
    }


def delay_queue_arguments(queue_type: str, names: Names, queue: str, seconds: float) -> dict[str, Any]:
    """Return the arguments of the queue in which this queue's messages wait for so many seconds."""
    return {
        "x-queue-type": queue_type,
        "x-message-ttl": round(seconds * 1000),
        "x-dead-letter-exchange": names.exchange,
        "x-dead-letter-routing-key": return_key(queue),
        **({} if queue_type == "classic" else _AT_LEAST_ONCE),
    }


_AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
"""A quorum queue then keeps a dead letter until another queue has it; the second is what the first asks for."""


def delayed(delivery: Delivery, names: Names, error: BaseException, delay: float) -> tuple[str, Any]:
    """Return the routing key and properties with which a message goes on a delay of so many seconds."""
    return delay_queue(delivery.queue, delay), _properties(delivery, error, "")


def parked(delivery: Delivery, names: Names, error: BaseException, trace: str) -> tuple[str, Any]:
    """Return the routing key and properties with which a message goes to the parking queue."""
    return parking_queue(delivery.queue), _properties(delivery, error, trace)


def moved(delivery: Delivery) -> Any:
    """Return the properties with which a message is moved, unhandled, to another queue."""
    new, headers = _sanitized(delivery.properties)
    exchange, routing_key = first_published(delivery)
    ours = {EXCHANGE: exchange, ROUTING_KEY: routing_key, MOVED: True}
    return _with_headers(new, headers, ours, message_id_of(delivery))


def first_published(delivery: Delivery) -> tuple[str, str]:
    """Return the exchange and routing key with which a message was first published."""
    headers = delivery.properties.headers or {}
    if not attempts_of(headers) and MOVED not in headers:
        return delivery.exchange, delivery.routing_key
    return str(headers.get(EXCHANGE, delivery.exchange)), str(headers.get(ROUTING_KEY, delivery.routing_key))


def attempts_of(headers: Mapping[str, Any]) -> int:
    """Return how often a message failed before, whatever somebody wrote into the header."""
    attempts = headers.get(ATTEMPTS)
    return attempts if type(attempts) is int and 0 < attempts < 2**31 else 0


def message_id_of(delivery: Delivery) -> str:
    """Return the publisher's message id; without one, one made of what stays the same at each delivery."""
    properties = delivery.properties
    if properties.message_id:
        return str(properties.message_id)
    said = repr((properties.timestamp, properties.correlation_id, properties.type, properties.app_id))
    return GENERATED_ID_PREFIX + hashlib.sha256(said.encode() + b"\0" + delivery.body).hexdigest()[:32]


def describe_error(error: BaseException) -> str:
    """Return the exception's class and text."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        return f"{name}: {error}"
    except Exception:
        return f"{name}, whose text can't be had"


def _properties(delivery: Delivery, error: BaseException, trace: str) -> Any:
    new, headers = _sanitized(delivery.properties)
    if delivery.properties.expiration:
        # It would count again.
        headers[KEPT_PREFIX + "expiration"], new.expiration = new.expiration, None
    exchange, routing_key = first_published(delivery)
    ours: dict[str, Any] = {
        EXCHANGE: exchange,
        ROUTING_KEY: routing_key,
        QUEUE: delivery.queue,
        ATTEMPTS: attempts_of(headers) + 1,
        ERROR: _truncated(describe_error(error), ERROR_BYTES),
        FAILED_AT: int(time.time()),
    }
    if trace:
        ours[TRACEBACK] = _truncated(trace, TRACEBACK_BYTES)
    return _with_headers(new, headers, ours, message_id_of(delivery))


def _sanitized(old: Any) -> tuple[Any, dict[str, Any]]:
    """Return a copy of the properties, and of the headers, without what the broker would act upon or refuse."""
    new = copy(old)
    headers = {name: value for name, value in (old.headers or {}).items() if name not in _BROKER_HEADERS}
    for name in _INTERPRETED_HEADERS:
        if name in headers:
            headers[KEPT_PREFIX + name] = headers.pop(name)
    if old.user_id:
        headers[KEPT_PREFIX + "user_id"], new.user_id = old.user_id, None
    return new, headers


def _with_headers(new: Any, headers: dict[str, Any], ours: dict[str, Any], message_id: str) -> Any:
    """Return the properties with these headers, and ours; without what can't be sent, and then with ours alone."""
    new.headers = {**headers, **ours}
    new.message_id = message_id
    new.delivery_mode = 2
    if _is_encodable(new):
        return new
    new.headers = {**ours, HEADERS_DROPPED: True}
    if _is_encodable(new):
        return new
    return pika.BasicProperties(headers=new.headers, message_id=new.message_id, delivery_mode=2)


def _truncated(text: str, most: int) -> str:
    """Return at most so many bytes of a text: a fifth from its beginning, the rest from its end, where the cause is."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most:
        return encoded.decode()
    head, tail = encoded[: most // 5], encoded[-(most * 4 // 5 - 10) :]
    return f"{head.decode('utf-8', 'ignore')}\n[…]\n{tail.decode('utf-8', 'ignore')}"


def _is_encodable(properties: Any) -> bool:
    """Whether pika can write them, which reads more than it writes, and whether they fit into a frame."""
    try:
        return sum(map(len, properties.encode())) <= HEADER_BYTES
    except Exception:
        return False
