"""Celery's scheduler, which goes on while its file can't be written, such as on a full disk."""

import logging
from contextlib import suppress
from typing import Any

from celery.beat import PersistentScheduler
from django.conf import settings

logger = logging.getLogger(__name__)

ALIVE = settings.VAR_DIR / "celery" / "beat-alive"
"""A file that beat touches every few seconds, when it looks for due tasks. Health checks of containers read its age."""


class Scheduler(PersistentScheduler):
    """A persistent scheduler. Without its file, tasks run as usual, and once again after a restart."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        seconds: float = super().tick(*args, **kwargs)
        with suppress(OSError):
            ALIVE.touch()
        return seconds

    def sync(self) -> None:
        """Write the file, every three minutes. Celery's own scheduler would end with the error."""
        try:
            super().sync()
        except OSError as error:
            logger.warning("The schedule could not be written, and is written later: %s", error)
