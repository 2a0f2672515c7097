"""Celery tasks."""

from celery import shared_task

from message_store import expiry, quota
from message_store.store import store


@shared_task
def remove_expired() -> None:
    """Free the disk space of expired and deleted messages."""
    expiry.remove_expired(store())


@shared_task
def measure_applications() -> None:
    """Measure the messages of the applications that are due."""
    quota.measure_due()
