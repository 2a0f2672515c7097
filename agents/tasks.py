"""What Celery runs. Each task calls the function that a command calls too, and holds no rule."""

from celery import shared_task

from agents import removals, stale, sweep


@shared_task
def sweep_orphans() -> None:
    """Delete the agents' queues that no registration stands for, and make again those that are missing."""
    sweep.sweep_orphans()


@shared_task
def clean_up_stale() -> None:
    """Remove the subscriptions of owners without a live token, and expired tokens."""
    stale.clean_up_stale()


@shared_task
def revoke_expired_passwords() -> None:
    """Reset the passwords of logins whose token is no longer valid."""
    removals.revoke_expired_passwords()
