"""Celery tasks. Each calls the same function as a command, and contains no rule."""

from celery import shared_task

from agents.removal import handlers
from agents.sweeps import stale, sweep


@shared_task
def sweep_orphans() -> None:
    """Delete agents' queues without a registration, and declare missing registered queues again."""
    sweep.sweep_orphans()


@shared_task
def clean_up_stale() -> None:
    """Remove the subscriptions of owners without a valid token, and expired tokens."""
    stale.clean_up_stale()


@shared_task
def revoke_expired_passwords() -> None:
    """Reset the passwords of logins whose token is no longer valid."""
    handlers.revoke_expired_passwords()
