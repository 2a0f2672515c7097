"""Celery tasks. They call the same function as the command, and contain no rule."""

from celery import shared_task

from notifications import sending


@shared_task
def send_notifications() -> None:
    sending.send_due()
