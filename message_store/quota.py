"""The quota of an application: how many bytes the bodies of its messages may have.

``Application.stored_bytes`` is never less than what the application's clients stored. A post adds to it, in the
transaction that stores the messages if they are in the same database, and nothing subtracts. When it would exceed the
quota, the store is measured, without deleted and expired messages. A measurement reads every message, so there is at
most one a minute.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from django.conf import settings
from django.db import transaction
from django.db.models import F

from core import limits
from message_store.models import Application
from message_store.store import BatchTooLarge, NoQueue, store

MEASURE_INTERVAL_SECONDS = 60


class QuotaReached(Exception):
    """The messages would exceed the quota. The text says what to do."""


@contextmanager
def reserved(application: str, size: int) -> Iterator[None]:
    """Count these bytes for an application, unless the block stores nothing.

    Raises:
        QuotaReached: the application would have more than ``MESSAGE_STORE_MAX_BYTES``.
    """
    for is_last in (False, True):
        with transaction.atomic() if store().in_database else _subtracted_on_error(application, size):
            if _reserve(application, size):
                yield
                return
        if is_last or not _measure(application):
            break
    raise QuotaReached(
        f"The messages of {application} would have more than {settings.MESSAGE_STORE_MAX_BYTES} bytes. Delete some, or "
        "ask an operator for more. Deleted and expired messages are subtracted within a minute"
    )


@contextmanager
def _subtracted_on_error(application: str, size: int) -> Iterator[None]:
    """Do without a transaction: it would lock the application's row while another store works."""
    try:
        yield
    except (NoQueue, BatchTooLarge):
        Application.objects.filter(name=application).update(stored_bytes=F("stored_bytes") - size)
        raise


def _reserve(application: str, size: int) -> bool:
    """Add to the application's bytes, unless they would exceed the quota. In a transaction, this locks its row.

    Return whether the messages may be stored.
    """
    rows = Application.objects.filter(name=application)
    room = rows
    if settings.MESSAGE_STORE_MAX_BYTES:
        room = rows.filter(stored_bytes__lte=settings.MESSAGE_STORE_MAX_BYTES - size)
    return bool(room.update(stored_bytes=F("stored_bytes") + size)) or not rows.exists()


def _measure(application: str) -> bool:
    """Replace the counted bytes by those in the store. Return False if they were measured within the last minute."""
    rows = Application.objects.filter(name=application)
    counted = rows.values_list("stored_bytes", flat=True).first()
    if counted is None or not limits.add(f"measured:{application}", True, MEASURE_INTERVAL_SECONDS):
        return False
    # The store is read after the count, and the difference is added: what is stored meanwhile counts twice, never less.
    rows.update(stored_bytes=F("stored_bytes") + store().stored_bytes(application) - counted)
    return True
