"""Time zones: of the browser, and of an owner."""

import zoneinfo
from functools import cache
from urllib.parse import unquote

from django.http import HttpRequest

COOKIE = "timezone"
"""The cookie in which ``guardian.js`` stores the time zone of the browser."""

# Entries of the time zone database that are no places: the machine's own setting, and placeholders.
EXCLUDED_ZONES = {"Factory", "localtime", "posixrules"}


@cache
def time_zones() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones() - EXCLUDED_ZONES)


def zone_of(name: str) -> zoneinfo.ZoneInfo:
    """Return the time zone of this name, or UTC if it no longer exists, as after a system update."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return zoneinfo.ZoneInfo("UTC")


def of_browser(request: HttpRequest) -> str:
    """Return the name of the browser's time zone, or UTC if it is unknown."""
    name = unquote(request.COOKIES.get(COOKIE, ""))
    return name if name in time_zones() else "UTC"
