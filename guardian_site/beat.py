"""Celery's scheduler, which goes on while its file can't be written, such as on a full disk."""

import logging

from celery.beat import PersistentScheduler

logger = logging.getLogger(__name__)


class Scheduler(PersistentScheduler):
    """A persistent scheduler. Without its file, tasks run as usual, and once again after a restart."""

    def sync(self) -> None:
        """Write the file, every three minutes. Celery's own scheduler would end with the error."""
        try:
            super().sync()
        except OSError as error:
            logger.warning("The schedule could not be written, and is written later: %s", error)
