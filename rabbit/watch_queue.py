"""The temporary queue of a watch: it gets copies of messages, and keeps the newest until they are taken."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from rabbit.amqp import Session
from rabbit.decoding import envelope_of
from rabbit.fetching import Fetched, Undecoded
from rabbit.names import WATCH_QUEUE

EXPIRES_SECONDS = 60
MAX_MESSAGES = 100
MAX_BYTES = 4 * 1024 * 1024

ARGUMENTS = {
    "x-queue-type": "classic",
    "x-expires": EXPIRES_SECONDS * 1000,
    "x-max-length": MAX_MESSAGES,
    "x-max-length-bytes": MAX_BYTES,
    "x-overflow": "drop-head",
    # No exchange has this name. It precedes a policy, which could send what is dropped to somebody's queue.
    "x-dead-letter-exchange": "guardian.watch",
}


class Source(NamedTuple):
    """A binding of the queue: from which exchange, and which messages."""

    exchange: str
    routing_key: str
    arguments: Mapping[str, Any]


def declare(session: Session, uuid_hex: str, sources: Iterable[Source]) -> None:
    """Declare the queue of a watch, and bind it.

    Raises:
        NotOnBroker: an exchange does not exist. The queue expires.
    """
    name = WATCH_QUEUE + uuid_hex
    session.declare_queue(name, durable=True, auto_delete=False, arguments=ARGUMENTS)
    for source in sources:
        session.bind_queue(name, *source)


def take(session: Session, uuid_hex: str, max_header_values: int) -> list[Fetched]:
    """Remove the messages from the queue, up to ``MAX_MESSAGES``, and return them, oldest first.

    Raises:
        NotOnBroker: the queue expired.
    """
    get = partial(session.new_channel().basic_get, WATCH_QUEUE + uuid_hex, no_ack=True)
    found: list[Fetched] = []
    while len(found) < MAX_MESSAGES:
        message = session.request(get)
        if message is None:
            break
        body = message.body or b""  # py-amqp's body of no bytes is a str
        found.append(
            Undecoded(envelope_of(message), body, bool(message.delivery_info["redelivered"])).decode(max_header_values)
        )
    return found
