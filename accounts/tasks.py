"""Celery tasks. They contain no rules."""

from celery import shared_task

from accounts.pulse_users import invitations
from accounts.signing_in import owners


@shared_task
def prune_visitors() -> None:
    owners.prune_visitors()
    invitations.prune()
