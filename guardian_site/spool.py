"""Celery's tasks in a folder, for an installation without Redis: kombu's transport, with files that appear whole.

Kombu opens the file that readers look for, and then writes into it. A worker that looks in between takes an empty file,
can't read it as JSON, and ends (celery/kombu, issue 1551).
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
    """Writes a message, and the table of an exchange, under a name of no meaning, and then gives it its own."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]
        folder = Path(self.data_folder_out)
        # Kombu's own pattern: sorted by name is sorted by time, and what follows the first dot is the queue.
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        unfinished = _written(folder, dumps(payload))
        unfinished.rename(folder / name)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        file: Path = self._exchange_file(exchange)  # type: ignore[attr-defined]
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            empty = _written(file.parent, "[]")
            with suppress(FileExistsError):  # another process was first, and its table has something in it already
                os.link(empty, file)
            empty.unlink()
        super()._queue_bind(exchange, routing_key, pattern, queue)


class Transport(filesystem.Transport):
    """What ``CELERY_BROKER_URL=filesystem://`` uses here."""

    Channel = Channel


def _written(folder: Path, text: str) -> Path:
    path = folder / f"{uuid.uuid4()}.unfinished"
    try:
        path.write_text(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
