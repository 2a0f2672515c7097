"""Where this site is: addresses that are told to others, whatever name it was asked by."""

from django.conf import settings


def absolute(path: str) -> str:
    """Return the whole address of this path of the site."""
    return f"{settings.GUARDIAN_BASE_URL}{path}"
