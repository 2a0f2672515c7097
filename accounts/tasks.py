"""Celery tasks. They contain no rules."""

from celery import shared_task

from accounts import invitations, signin


@shared_task
def prune_visitors() -> None:
    """Delete owners who never verified their address, and expired links, sessions and invitations."""
    signin.prune_visitors()
    invitations.prune()
