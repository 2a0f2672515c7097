"""Download an archive."""

import json
from collections.abc import Iterator
from typing import Any

from django.http import StreamingHttpResponse

from accounts import audit
from queues.archives import reading
from queues.models import Archive
from rabbit.names import readable


def download(archive: Archive, by: Any) -> StreamingHttpResponse:
    """Return all messages as JSON Lines, streamed, and record who downloads them."""
    audit.record(by, reading.DOWNLOADED, [archive])

    def lines() -> Iterator[bytes]:
        for position, message in reading.messages(archive):
            yield json.dumps(reading.as_json(position, message)).encode() + b"\n"

    name = "".join(character if character.isalnum() else "-" for character in readable(archive.queue_name))
    return StreamingHttpResponse(
        lines(),
        content_type="text/plain; charset=utf-8",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{name.encode('ascii', 'replace').decode()}.jsonl",
            "Cache-Control": "no-store",
        },
    )
