"""Delay and parking queues, and the headers of messages that are published there.

A failed message is published to a delay queue with a confirm, then acknowledged. A delay queue has a TTL and
dead-letters to the consumer's exchange, with a routing key that leads to this work queue only. Each delay has its own
queue: in a shared one, short delays would wait behind long ones. Nothing uses the default exchange: Pulse users may not
publish to it.

A header counts the failures. The broker's ``x-death`` differs between versions and publishers can forge it, so it is
removed.

A crash between the confirm and the ack leaves two copies with the same message id: one in the delay or parking queue,
and one in the work queue.
"""

import hashlib
import re
import time
from copy import copy
from typing import Any

import pika

from guardian_consumers._delivery import Delivery
from guardian_consumers.headers import (
    ATTEMPTS,
    ERROR,
    EXCHANGE,
    FAILED_AT,
    HEADERS_DROPPED,
    KEPT_PREFIX,
    MOVED,
    QUEUE,
    ROUTING_KEY,
    TRACEBACK,
    attempts_of,
)
from guardian_consumers.names import Names, delay_queue, parking_queue, return_key

GENERATED_ID_PREFIX = "made-"
"""Prefix of the ids of messages without an id."""

TRACEBACK_BYTES = 16_000
ERROR_BYTES = 2_000
HEADER_BYTES = 100_000
"""Headers must fit into one frame, by default 131,072 bytes."""

DELIVERY_LIMIT = 100
"""Deliveries by a quorum queue before it parks a message. RabbitMQ 3 also counts messages that were requeued unhandled,
as at shutdown. RabbitMQ 4's default is to drop a message after 20 deliveries."""

_BROKER_HEADERS = ("x-death", "x-first-death-exchange", "x-first-death-queue", "x-first-death-reason",
                "x-last-death-exchange", "x-last-death-queue", "x-last-death-reason",
                "x-delivery-count", "x-acquired-count")  # fmt: skip
_INTERPRETED_HEADERS = ("CC", "BCC", "x-delay")


def work_queue_arguments(queue_type: str, names: Names, queue: str) -> dict[str, Any]:
    """Return the arguments of a work queue, without those of its source.

    A quorum queue moves a message past its delivery limit to the parking queue, for instance one that kills each
    process that handles it.
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
    return {
        "x-queue-type": queue_type,
        "x-message-ttl": round(seconds * 1000),
        "x-dead-letter-exchange": names.exchange,
        "x-dead-letter-routing-key": return_key(queue),
        **({} if queue_type == "classic" else _AT_LEAST_ONCE),
    }


_AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
"""A quorum queue then keeps a dead letter until another queue has it. This strategy requires reject-publish."""


def delayed(delivery: Delivery, error: BaseException, delay: float) -> tuple[str, Any]:
    """Return the routing key and properties to publish a message to a delay queue."""
    return delay_queue(delivery.queue, delay), _properties(delivery, error, "")


def parked(delivery: Delivery, error: BaseException, trace: str) -> tuple[str, Any]:
    """Return the routing key and properties to publish a message to the parking queue."""
    return parking_queue(delivery.queue), _properties(delivery, error, trace)


def moved(delivery: Delivery) -> Any:
    """Return the properties to publish an unhandled message to another queue."""
    new, headers = _sanitized(delivery.properties)
    exchange, routing_key = first_published(delivery)
    ours = {EXCHANGE: exchange, ROUTING_KEY: routing_key, MOVED: True}
    return _with_headers(new, headers, ours, message_id_of(delivery))


def first_published(delivery: Delivery) -> tuple[str, str]:
    headers = delivery.properties.headers or {}
    if not attempts_of(headers) and MOVED not in headers:
        return delivery.exchange, delivery.routing_key
    return str(headers.get(EXCHANGE, delivery.exchange)), str(headers.get(ROUTING_KEY, delivery.routing_key))


def message_id_of(delivery: Delivery) -> str:
    """Return the publisher's message id, or one derived from what is the same at each delivery."""
    properties = delivery.properties
    if properties.message_id:
        return str(properties.message_id)
    stable = repr((properties.timestamp, properties.correlation_id, properties.type, properties.app_id))
    return GENERATED_ID_PREFIX + hashlib.sha256(stable.encode() + b"\0" + delivery.body).hexdigest()[:32]


def describe_error(error: BaseException) -> str:
    """Return the exception's class, without private modules, and its text."""
    kind = type(error)
    module = re.sub(r"\._\w+|^builtins$", "", kind.__module__)
    name = f"{module}.{kind.__qualname__}".lstrip(".")
    try:
        return f"{name}: {error}"
    except Exception:
        return f"{name} (its text raised an exception)"


def _properties(delivery: Delivery, error: BaseException, trace: str) -> Any:
    new, headers = _sanitized(delivery.properties)
    if delivery.properties.expiration:
        # The expiration would apply again.
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
    """Return copies of the properties and headers without those that the broker would act on or refuse."""
    new = copy(old)
    headers = {name: value for name, value in (old.headers or {}).items() if name not in _BROKER_HEADERS}
    for name in _INTERPRETED_HEADERS:
        if name in headers:
            headers[KEPT_PREFIX + name] = headers.pop(name)
    if old.user_id:
        headers[KEPT_PREFIX + "user_id"], new.user_id = old.user_id, None
    return new, headers


def _with_headers(new: Any, headers: dict[str, Any], ours: dict[str, Any], message_id: str) -> Any:
    """Return the properties with these headers and ours, or with ours only if the others can't be encoded."""
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
    """Truncate a text to ``most`` bytes: a fifth from its start, the rest from its end, where the cause is."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most:
        return encoded.decode()
    head, tail = encoded[: most // 5], encoded[-(most * 4 // 5 - 10) :]
    return f"{head.decode('utf-8', 'ignore')}\n[…]\n{tail.decode('utf-8', 'ignore')}"


def _is_encodable(properties: Any) -> bool:
    """Return whether pika can encode the properties (it decodes more than it encodes), and they fit into a frame."""
    try:
        return sum(map(len, properties.encode())) <= HEADER_BYTES
    except Exception:
        return False
