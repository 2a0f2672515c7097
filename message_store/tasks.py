"""Celery tasks."""

from celery import shared_task

from message_store import expiry, quota
from message_store.store import store


@shared_task
def remove_expired() -> None:
    expiry.remove_expired(store())


@shared_task
def measure_applications() -> None:
    quota.measure_due()
