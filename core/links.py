"""Absolute URLs of this site, from GUARDIAN_BASE_URL. They don't depend on the request's Host."""

import uuid
from functools import lru_cache

from django.conf import settings
from django.urls import reverse


def absolute_url(path: str) -> str:
    return f"{settings.GUARDIAN_BASE_URL}{path}"


def object_url(route: str, uuid_: uuid.UUID) -> str:
    """Return the absolute URL of an object. ``route`` names a URL pattern whose only argument is a UUID."""
    before, after = _around_uuid(route)
    return absolute_url(f"{before}{uuid_.hex}{after}")


@lru_cache
def _around_uuid(route: str) -> tuple[str, str]:
    """Return the path before and after the UUID. It is cached because Django's ``reverse`` is slow."""
    placeholder = uuid.UUID(int=0).hex
    before, _, after = reverse(route, args=[placeholder]).partition(placeholder)
    return before, after
