"""The quota of an application: how many bytes its messages may have.

``Application.stored_bytes`` is never less than what the application's clients stored. A post adds to it, in the
transaction that stores the messages if they are in the same database, and nothing subtracts.

A task measures the messages in the store, without deleted and expired ones: when half of the room is used that the last
measurement found, and after a post was refused. A measurement visits every queue, so no post waits for it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from django.conf import settings
from django.db import transaction
from django.db.models import F

from core.leases import HeldLease, LeaseLost, LeaseTaken, lease
from message_store.models import Application
from message_store.store import MESSAGE_OVERHEAD, BatchTooLarge, NewMessage, NoQueue, store

LEASE = "quotas of the message store"

QUEUES_PER_READ = 100

ALWAYS = -1
"""A value of ``measure_above``: measure in any case."""


class QuotaReached(Exception):
    """The application would have more than it may. The text says what to do."""


@contextmanager
def reserved(application: str, messages: Iterable[NewMessage]) -> Iterator[None]:
    """Count the bytes of these messages for an application, unless the block stores nothing."""
    size = sum(message.size + MESSAGE_OVERHEAD for message in messages)
    with transaction.atomic() if store().in_database else _subtracted_on_error(application, size):
        if _reserve(application, size):
            yield
            return
    Application.objects.filter(name=application, measure_above__gt=ALWAYS).update(measure_above=ALWAYS)
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


def measure_due() -> None:
    """Measure the applications that are due, unless another process is measuring. If the store fails, begin anew."""
    if not settings.MESSAGE_STORE_MAX_BYTES:
        return
    with suppress(LeaseTaken, LeaseLost), lease(LEASE) as held:
        for name in Application.objects.filter(stored_bytes__gt=F("measure_above")).values_list("name", flat=True):
            _measure(name, held)


def _measure(application: str, held: HeldLease) -> None:
    rows = Application.objects.filter(name=application)
    counted = rows.values_list("stored_bytes", flat=True).first() or 0
    measured, start = 0, ""
    while True:
        held.renew_if_due()
        some = store().queues(application, start=start, limit=QUEUES_PER_READ + 1)
        measured += store().stored_bytes(some[:QUEUES_PER_READ])
        if len(some) <= QUEUES_PER_READ:
            break
        start = some[-1].name
    # The store is read after the count, and the difference is added. So messages stored in between count twice.
    rows.update(
        stored_bytes=F("stored_bytes") + measured - counted,
        measure_above=(measured + settings.MESSAGE_STORE_MAX_BYTES) // 2,
    )
