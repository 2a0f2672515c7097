"""Which names Pulse users can't have: ``GUARDIAN_RESERVED_USERS``."""

import re

from django.conf import settings

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def is_reserved(username: str) -> bool:
    return any(pattern(entry).search(username) for entry in settings.GUARDIAN_RESERVED_USERS if entry)


def is_name(entry: str) -> bool:
    """Return whether the entry is a name. Any other entry is a regular expression, searched for in names."""
    return _NAME.fullmatch(entry) is not None


def pattern(entry: str) -> re.Pattern[str]:
    """Return the pattern of the names that an entry reserves, in upper and lower case. Raises re.error."""
    return re.compile(rf"^{re.escape(entry)}\Z" if is_name(entry) else entry, re.IGNORECASE)
