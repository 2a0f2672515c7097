"""When beat hands tasks over: as Celery's own does, but that a clock which is set back stops nothing.

What is to come between two others is handed over by the clock.
"""

import heapq
import logging
from typing import Any, cast

from celery.beat import PersistentScheduler, ScheduleEntry
from celery.schedules import schedstate, schedule
from django.conf import settings

logger = logging.getLogger(__name__)


class Scheduler(PersistentScheduler):
    """Celery's own, which would wait for the clock to come around to when each task was last handed over.

    A clock that is set back by an hour would so stop the passes for as long. And its intervals begin when a task was
    handed over, so that two that are to stay apart come together by and by, and after a restart at once. Those that
    ``BEAT_BY_THE_CLOCK`` names begin when the seconds since 1970 are a multiple of them, and so many seconds later.
    """

    def is_due(self, entry: ScheduleEntry) -> Any:
        """Return whether this is to be handed over, and in how many seconds to look again."""
        past = settings.BEAT_BY_THE_CLOCK.get(entry.name or "")
        if past is None or entry.last_run_at is None or not isinstance(entry.schedule, schedule):
            return super().is_due(entry)
        seconds = entry.schedule.seconds
        last, now = (at.timestamp() - past for at in (entry.last_run_at, entry.default_now()))
        return schedstate(now // seconds > last // seconds, seconds - now % seconds)

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Begin to wait for what is to be handed over. What goes by the clock is looked at at once."""
        super().populate_heap(*args, **kwargs)
        events = cast(list[Any], self._heap)
        events[:] = [one._replace(time=0) if one.entry.name in settings.BEAT_BY_THE_CLOCK else one for one in events]
        heapq.heapify(events)

    def tick(self, *args: Any, **kwargs: Any) -> Any:
        """Hand over what is due, and return the seconds until something is again."""
        for entry in self.schedule.values():
            now = entry.default_now()
            if entry.last_run_at is not None and entry.last_run_at > now:
                logger.warning("The clock was set back: %s was last handed over at %s.", entry.name, entry.last_run_at)
                entry.last_run_at = now
                self._heap = None  # the times in it are by the clock of before
        return super().tick(*args, **kwargs)
