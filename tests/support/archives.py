"""Archives in the database, without a queue on the broker."""

from datetime import timedelta
from typing import Any

from amqp import Message
from amqp.serialization import dumps
from django.utils import timezone

from accounts.models import PulseUser
from queues.archives.chunks import pack
from queues.models import Archive
from rabbit.fetching import Fetched, Undecoded


def encoded(message: Fetched) -> Undecoded:
    """Return a message as the broker sends it."""
    names = dumps("ss", (message.exchange, message.routing_key))
    content = Message(b"", application_headers=message.headers, **message.properties)
    return Undecoded(names + content._serialize_properties(), message.body, message.redelivered)


def store_archive(
    *messages: bytes | Fetched, name: str = "queue/alice/builds", chunk: int = 500, **fields: Any
) -> Archive:
    """Store an archive of these messages, each a body or a Fetched, in chunks of ``chunk``."""
    now = timezone.now()
    defaults = {
        "vhost": "/", "queue_name": name, "reason": "length", "state": "kept", "created": now,
        "expires": now + timedelta(days=7), "pulse_user": PulseUser.objects.first(),
    }  # fmt: skip
    rows = [one if isinstance(one, Fetched) else Fetched(one, {}, {}, "", name, False) for one in messages]
    size = sum(len(row.body) for row in rows)
    archive = Archive.objects.create(**{**defaults, "messages": len(rows), "bytes": size, **fields})
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        archive.chunks.create(first=start + 1, count=len(part), data=pack([encoded(row) for row in part]))
    return archive
