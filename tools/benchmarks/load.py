"""Queues and messages for benchmarks, on the private broker."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

import httpx
import pika

from rabbit.errors import BrokerError
from rabbit.management import Management
from rabbit.snapshot import TOTALS
from tools.benchmarks.services import Services

QUEUES_PER_USER = 20
EXCHANGES = 50
LOAD_TIMEOUT_SECONDS = 600.0

MAX_QUEUES_PER_VHOST = 10_000
"""One request declares them: the broker accepts bodies up to 8 MB."""

REST_SECONDS = 7
"""A list wakes the process of every queue. About five seconds later the broker hibernates them in a burst: 2.7 s of
work for 50,000 queues. An immediate second list takes about 20 % longer with 50,000 queues, and 15 % less with 10,000.
"""


def user_name(number: int) -> str:
    """Return the name of the Pulse user that owns the queue of this number."""
    return f"user-{number // QUEUES_PER_USER}"


def queue_name(number: int) -> str:
    """Return the name of a Pulse user's queue."""
    return f"queue/{user_name(number)}/jobs-{number:06}"


@contextmanager
def filled_vhost(services: Services, queues: int) -> Iterator[str]:
    """Create a vhost with durable queues and two bindings for each, and delete it afterwards."""
    vhost = f"bench-{secrets.token_hex(4)}"
    services.management.create_vhost(vhost)
    try:
        fill_vhost(services, vhost, range(queues))
        yield vhost
    finally:
        services.say(f"deleting {queues:,} queues")
        try:
            services.management.delete_vhost(vhost)
        except BrokerError as error:  # must not hide a result or an error
            services.say(f"could not delete {vhost}: {error}")


def fill_vhost(services: Services, vhost: str, numbers: range, *, there: int = 0) -> None:
    """Declare durable queues with two bindings each in a vhost, which has ``there`` other queues."""
    services.say(f"declaring {len(numbers):,} queues and {2 * len(numbers):,} bindings")
    import_definitions(services, _definitions(numbers), vhost)
    wait_for_messages(services.management, vhost, queues=there + len(numbers))


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
    """Import definitions in one request; single ones take minutes. Without ``vhost``, each definition has its own."""
    node = services.node
    where = "" if vhost is None else f"/{quote(vhost, safe='')}"
    address = f"http://127.0.0.1:{node.management_port}/api/definitions{where}"
    auth = httpx.BasicAuth("guardian", node.password)
    httpx.post(address, json=definitions, auth=auth, timeout=LOAD_TIMEOUT_SECONDS, trust_env=False).raise_for_status()


def publish_one_each(amqp_url: str, vhost: str, queues: Sequence[str]) -> dict[str, float]:
    """Publish a small message to each of these queues without confirms.

    Return the time before each publishing by queue, from ``time.monotonic``.
    """
    sent_at = {}
    connection = pika.BlockingConnection(pika.URLParameters(f"{amqp_url}/{quote(vhost, safe='')}"))
    try:
        channel = connection.channel()
        for name in queues:
            sent_at[name] = time.monotonic()
            channel.basic_publish("", name, b"{}")
        channel.close()
    finally:
        connection.close()
    return sent_at


def wait_for_messages(management: Management, *vhosts: str, queues: int, messages: int | None = None) -> None:
    """Wait until the broker lists this number of queues in these vhosts and, if given, of ready messages in total.

    Raises TimeoutError after ``LOAD_TIMEOUT_SECONDS``.
    """
    deadline = time.monotonic() + LOAD_TIMEOUT_SECONDS
    while True:
        params = {**TOTALS, "columns": "name,vhost,messages_ready"}
        rows = [row for vhost in vhosts for row in management.list_queues(vhost, params)]
        listed = sum(row.get("messages_ready") or 0 for row in rows)
        if len(rows) == queues and messages in (None, listed):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the broker lists {len(rows)} queues with {listed} messages: not {queues}, {messages}")
        time.sleep(0.1)
