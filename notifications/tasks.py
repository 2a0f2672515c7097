"""What Celery runs. Each task calls the function that a command calls too, and holds no rule."""

from celery import shared_task

from notifications import sending


@shared_task
def send_notifications() -> None:
    """Send what is due."""
    sending.send_due()
