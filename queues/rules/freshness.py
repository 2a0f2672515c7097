"""How old the stored figures of queues are."""

from datetime import datetime, timedelta
from typing import NamedTuple

from django.conf import settings
from django.utils import timezone

from queues.models import Watch

LATE_AFTER_POLLS = 3
LATE_AFTER_SECONDS = 60
"""A list of a large broker takes longer than several polls: the figures are late only after this time, too."""

MAX_AGE = timedelta(minutes=5)
"""Older figures of consumers are not stated as current."""


def is_current(at: datetime | None, now: datetime) -> bool:
    """Return whether figures of this time are stated as current."""
    return at is not None and now - at <= MAX_AGE


class Freshness(NamedTuple):
    """When queues were last listed, if ever. ``late``: too long ago. ``outage``: the broker is unreachable.

    ``counted_at`` is when their consumers were last counted.
    """

    listed_at: datetime | None
    late: bool
    outage: bool
    counted_at: datetime | None = None

    @property
    def now(self) -> datetime | None:
        """The time to which trends are continued, or None if the figures are too old to predict anything."""
        return None if self.late else timezone.now()

    @property
    def is_counted(self) -> bool:
        """Whether the counts of consumers are current."""
        return is_current(self.counted_at, timezone.now())


def freshness_of_list(watch: Watch) -> Freshness:
    """Return how fresh the last list of queues is."""
    limit = timedelta(seconds=max(LATE_AFTER_SECONDS, LATE_AFTER_POLLS * settings.GUARDIAN_POLL_SECONDS))
    late = watch.listed_at is None or timezone.now() - watch.listed_at > limit
    return Freshness(watch.listed_at, late, watch.outage_since is not None, watch.consumers_counted_at)
