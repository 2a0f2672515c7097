"""Queues and messages on the broker of a benchmark, and Guardian as a server."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pika
from django.conf import settings

from core import broker
from rabbit.snapshot import TOTALS
from tools.mail import Mail
from tools.stack import Stack

QUEUES_PER_USER = 20
EXCHANGES = 50
TIMEOUT_SECONDS = 600.0


def user_name(number: int) -> str:
    """Return the name of the Pulse user that owns the queue of this number."""
    return f"user-{number // QUEUES_PER_USER}"


def queue_name(number: int) -> str:
    return f"queue/{user_name(number)}/jobs-{number:06}"


def declare_queues(vhost: str, numbers: Iterable[int]) -> None:
    """Declare durable queues with two bindings each."""
    exchanges = [f"exchange/build-{number}/events" for number in range(EXCHANGES)]
    names = {number: queue_name(number) for number in numbers}
    import_definitions(
        {
            "exchanges": [
                {"name": name, "vhost": vhost, "type": "topic", "durable": True, "auto_delete": False,
                 "internal": False, "arguments": {}}
                for name in exchanges
            ],
            "queues": [queue_definition(vhost, name, {}) for name in names.values()],
            "bindings": [
                {"source": exchanges[(number + again) % EXCHANGES], "vhost": vhost, "destination": name,
                 "destination_type": "queue", "routing_key": f"repository.{number % 97}.#", "arguments": {}}
                for number, name in names.items()
                for again in range(2)
            ],
        }
    )  # fmt: skip


def queue_definition(vhost: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "vhost": vhost, "durable": True, "auto_delete": False, "arguments": arguments}


def import_definitions(definitions: dict[str, list[dict[str, Any]]]) -> None:
    """Import definitions in one request, of up to 8 MB; single requests take minutes."""
    url = f"{settings.RABBITMQ_MANAGEMENT_URL}/api/definitions"
    httpx.post(url, json=definitions, timeout=TIMEOUT_SECONDS, trust_env=False).raise_for_status()


def amqp_connection(vhost: str = "/") -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_url()}/{quote(vhost, safe='')}"))


def publish_one_each(vhost: str, queues: Sequence[str]) -> dict[str, float]:
    """Publish a small message to each of these queues. Return the monotonic time before each by queue."""
    sent_at = {}
    with amqp_connection(vhost) as connection:
        channel = connection.channel()
        for name in queues:
            sent_at[name] = time.monotonic()
            channel.basic_publish("", name, b"{}")
        channel.close()
    return sent_at


def wait_for_messages(*vhosts: str, queues: int, messages: int) -> None:
    """Wait until the broker lists this number of queues in these vhosts, and of ready messages in all of them."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        params = {**TOTALS, "columns": "name,vhost,messages_ready"}
        rows = [row for vhost in vhosts for row in broker.management().list_queues(vhost, params)]
        listed = sum(row.get("messages_ready") or 0 for row in rows)
        if (len(rows), listed) == (queues, messages):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the broker lists {len(rows)} queues with {listed} messages: not {queues}, {messages}")
        time.sleep(0.1)


@contextmanager
def guardian(
    settings: Mapping[str, str], *, workers: int = 0, on_mail: Callable[[Mail], None] | None = None
) -> Iterator[Stack]:
    """Run Guardian's processes as in production, with these settings. Without workers, there is no beat."""
    environment = {**os.environ, **settings}
    var = Path(os.environ["GUARDIAN_VAR_DIR"])
    with Stack(environment, var=var, say=lambda _: None, on_mail=on_mail, workers=workers) as stack:
        stack.prepare()
        stack.start()
        yield stack
