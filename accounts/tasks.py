"""What Celery runs. Each task calls the function that a command or a page calls too, and holds no rule."""

from celery import shared_task

from accounts import removal, signin


@shared_task
def finish_removals() -> None:
    """Go on with the removals of accounts that were begun."""
    removal.finish_removals()


@shared_task
def prune_visitors() -> None:
    """Remove who never proved an address, and links and sessions that have run out."""
    signin.prune_visitors()
