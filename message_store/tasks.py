"""What Celery runs."""

from celery import shared_task

from message_store import expiry
from message_store.store import store


@shared_task
def remove_expired() -> None:
    """Remove from the disk what no read shows any more."""
    expiry.remove_expired(store())
