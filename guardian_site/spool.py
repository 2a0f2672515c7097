"""A folder as Celery's broker, for installations without Redis: kombu's transport, but with atomic writes.

Kombu creates a file and then writes to it. A worker that reads it before the write finds no JSON and exits
(celery/kombu, issue 1551).
"""

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """Writes messages, and tables of exchanges, to temporary files, and then renames them."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]
        folder = Path(self.data_folder_out)
        # Kombu's format: names sort by time, and the queue follows the first dot.
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        temporary = _write_temporary(folder, dumps(payload))
        temporary.rename(folder / name)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        file: Path = self._exchange_file(exchange)  # type: ignore[attr-defined]
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            empty = _write_temporary(file.parent, "[]")
            with suppress(FileExistsError):  # another process created the table, which may have entries already
                os.link(empty, file)
            empty.unlink()
        super()._queue_bind(exchange, routing_key, pattern, queue)


class Transport(filesystem.Transport):
    """The transport for ``CELERY_BROKER_URL=filesystem://``."""

    Channel = Channel


def _write_temporary(folder: Path, text: str) -> Path:
    path = folder / f"{uuid.uuid4()}.unfinished"
    try:
        path.write_text(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
