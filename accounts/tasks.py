"""What Celery runs. Each task calls the function that a command or a page calls too, and holds no rule."""

from celery import shared_task

from accounts import signin


@shared_task
def prune_visitors() -> None:
    """Remove who never proved an address, and links and sessions that have run out."""
    signin.prune_visitors()
