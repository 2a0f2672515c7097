"""Queues and messages to measure with, on the private broker alone."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

import httpx
import pika

from benchmarks.services import Services
from rabbit.management import Management
from rabbit.snapshot import TOTALS

QUEUES_OF_A_USER = 20
EXCHANGES = 50
LOAD_SECONDS = 600.0

MOST_AT_ONCE = 10_000
"""So many queues does one request make: the broker takes no body of more than 8 MB."""


def user_name(number: int) -> str:
    """Return the name of the Pulse user whose queue the one of this number is."""
    return f"user-{number // QUEUES_OF_A_USER}"


def queue_name(number: int) -> str:
    """Return the name of a queue, as a Pulse user would name it."""
    return f"queue/{user_name(number)}/jobs-{number:06}"


@contextmanager
def filled_vhost(services: Services, queues: int) -> Iterator[str]:
    """Make a vhost with so many durable queues and two bindings for each, and delete it afterwards."""
    vhost = f"bench-{queues}"
    services.say(f"making {queues:,} queues and {2 * queues:,} bindings")
    services.management.make_vhost(vhost)
    try:
        for first in range(0, queues, MOST_AT_ONCE):
            import_definitions(services, _definitions(range(first, min(first + MOST_AT_ONCE, queues))), vhost)
        wait_for_messages(services.management, vhost, queues=queues, messages=0)
        yield vhost
    finally:
        services.say(f"deleting {queues:,} queues")
        services.management.delete_vhost(vhost)


def _definitions(queues: range) -> dict[str, list[dict[str, object]]]:
    exchanges = [f"exchange/build-{number}/events" for number in range(EXCHANGES)]
    return {
        "exchanges": [
            {"name": name, "type": "topic", "durable": True, "auto_delete": False, "internal": False, "arguments": {}}
            for name in exchanges
        ],
        "queues": [
            {"name": queue_name(number), "durable": True, "auto_delete": False, "arguments": {}} for number in queues
        ],
        "bindings": [
            {
                "source": exchanges[(number + again) % EXCHANGES],
                "destination": queue_name(number),
                "destination_type": "queue",
                "routing_key": f"repository.{number % 97}.#",
                "arguments": {},
            }
            for number in queues
            for again in range(2)
        ],
    }


def import_definitions(
    services: Services, definitions: dict[str, list[dict[str, object]]], vhost: str | None = None
) -> None:
    """Have the broker make all of it in one request: two at a time it takes minutes. None: each says its vhost."""
    node = services.node
    where = "" if vhost is None else f"/{quote(vhost, safe='')}"
    address = f"http://127.0.0.1:{node.management_port}/api/definitions{where}"
    auth = httpx.BasicAuth("guardian", node.password)
    httpx.post(address, json=definitions, auth=auth, timeout=LOAD_SECONDS, trust_env=False).raise_for_status()


def publish_one_each(amqp_url: str, vhost: str, queues: Sequence[str]) -> None:
    """Publish one small message to each of these queues, without waiting for the broker to say that it has them."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{amqp_url}/{quote(vhost, safe='')}"))
    try:
        channel = connection.channel()
        for name in queues:
            channel.basic_publish("", name, b"{}")
        channel.close()
    finally:
        connection.close()


def wait_for_messages(management: Management, vhost: str, *, queues: int, messages: int) -> None:
    """Wait until the broker lists so many queues in a vhost, with so many ready messages in all.

    Raises TimeoutError past ``LOAD_SECONDS``.
    """
    deadline = time.monotonic() + LOAD_SECONDS
    while True:
        rows = management.list_queues(vhost, {**TOTALS, "columns": "name,vhost,messages_ready"})
        listed = sum(row.get("messages_ready") or 0 for row in rows)
        if len(rows) == queues and listed == messages:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the broker lists {len(rows)} queues with {listed} messages: not {queues}, {messages}")
        time.sleep(0.1)
