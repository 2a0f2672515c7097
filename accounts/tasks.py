"""Celery tasks. They contain no rules."""

from celery import shared_task

from accounts import signin


@shared_task
def prune_visitors() -> None:
    """Delete owners who never verified their address, and expired links and sessions."""
    signin.prune_visitors()
