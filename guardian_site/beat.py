"""When beat hands tasks over: as Celery's own does, but that a clock which is set back stops nothing."""

import logging
from typing import Any

from celery.beat import PersistentScheduler

logger = logging.getLogger(__name__)


class Scheduler(PersistentScheduler):
    """Celery's own, which would wait for the clock to come around to when each task was last handed over.

    A clock that is set back by an hour would so stop the passes for as long.
    """

    def tick(self, *args: Any, **kwargs: Any) -> Any:
        """Hand over what is due, and return the seconds until something is again."""
        for entry in self.schedule.values():
            now = entry.default_now()
            if entry.last_run_at is not None and entry.last_run_at > now:
                logger.warning("The clock was set back: %s was last handed over at %s.", entry.name, entry.last_run_at)
                entry.last_run_at = now
                self._heap = None  # the times in it are by the clock of before
        return super().tick(*args, **kwargs)
