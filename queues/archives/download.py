"""Download an archive."""

import base64
import json
from collections.abc import Iterator
from typing import Any

from django.http import StreamingHttpResponse

from accounts import audit
from queues.archives import reading
from queues.models import Archive
from rabbit.names import readable


def download(archive: Archive, by: Any) -> StreamingHttpResponse:
    """Return all messages as JSON Lines, streamed, and record who downloads them. Long bodies are in base64."""
    audit.record(by, reading.DOWNLOADED, [archive])

    def lines() -> Iterator[bytes]:
        for position, message in reading.shown(archive):
            line = reading.as_json(position, message)
            if message.cut:
                before, after = json.dumps({**line, "body": "", "encoding": "base64"}).encode().split(b'"body": ""', 1)
                yield before + b'"body": "'
                yield from map(base64.b64encode, reading.body(archive, position))
                yield b'"' + after + b"\n"
            else:
                yield json.dumps(line).encode() + b"\n"

    name = "".join(character if character.isalnum() else "-" for character in readable(archive.queue_name))
    return StreamingHttpResponse(
        lines(),
        content_type="text/plain; charset=utf-8",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{name.encode('ascii', 'replace').decode()}.jsonl",
            "Cache-Control": "no-store",
        },
    )
