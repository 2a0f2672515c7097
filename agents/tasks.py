"""Celery tasks. Each calls the same function as a command, and contains no rule."""

from celery import shared_task

from agents.removal import handlers
from agents.sweeps import stale, sweep


@shared_task
def sweep_orphans() -> None:
    sweep.sweep_orphans()


@shared_task
def clean_up_stale() -> None:
    stale.clean_up_stale()


@shared_task
def revoke_expired_passwords() -> None:
    handlers.revoke_expired_passwords()
