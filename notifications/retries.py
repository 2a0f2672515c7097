"""How long and how often a failed notification is retried, by mail and by channel. Pure: no database, no clock."""

from datetime import datetime, timedelta

FIRST_RETRY_SECONDS = 15
MAX_RETRY_SECONDS = 900

RETRY_FOR = timedelta(hours=24)

MIN_ATTEMPTS = 100
"""About the attempts of one day. A clock that jumps ahead by a day thus ends no retries."""


def should_give_up(created: datetime, attempts: int, now: datetime) -> bool:
    """Return whether a notification is old enough, and was tried often enough, to be given up."""
    return now - created >= RETRY_FOR and attempts >= MIN_ATTEMPTS


def retry_seconds(attempts: int) -> int:
    """Return the seconds to wait after this many failed attempts: doubled each time, up to ``MAX_RETRY_SECONDS``."""
    return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS << min(attempts - 1, 10))
