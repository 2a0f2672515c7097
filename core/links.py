"""Where this site is: addresses that are told to others, whatever name it was asked by."""

import uuid
from functools import lru_cache

from django.conf import settings
from django.urls import reverse


def absolute_url(path: str) -> str:
    """Return the whole address of this path of the site."""
    return f"{settings.GUARDIAN_BASE_URL}{path}"


def object_url(route: str, thing: uuid.UUID) -> str:
    """Return the whole address of a thing, at the route of this name, whose path has its UUID and nothing else."""
    before, after = _around(route)
    return absolute_url(f"{before}{thing.hex}{after}")


@lru_cache
def _around(route: str) -> tuple[str, str]:
    """Return what stands before and after a UUID in the paths of a route, which Django needs long to put together."""
    anything = uuid.UUID(int=0).hex
    before, _, after = reverse(route, args=[anything]).partition(anything)
    return before, after
