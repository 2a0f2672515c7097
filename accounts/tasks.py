"""Celery tasks. They contain no rules."""

from celery import shared_task

from accounts.pulse_users import invitations
from accounts.signing_in import owners


@shared_task
def prune_visitors() -> None:
    """Delete owners who never verified their address, and expired links, sessions and invitations."""
    owners.prune_visitors()
    invitations.prune()
