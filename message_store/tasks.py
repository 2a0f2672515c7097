"""Celery tasks."""

import time

from celery import shared_task

from message_store import quota
from message_store.store import store

BATCH_SIZE = 1000
MAX_RUN_SECONDS = 50
"""Less than the minute between runs."""


@shared_task
def remove_expired() -> None:
    """Remove expired messages, and those of deleted queues, in small batches. The next run continues."""
    until = time.monotonic() + MAX_RUN_SECONDS
    while time.monotonic() < until and store().remove_expired(BATCH_SIZE) == BATCH_SIZE:
        pass


@shared_task
def measure_applications() -> None:
    quota.measure_due()
