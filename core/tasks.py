"""Celery tasks. They contain no rules."""

from celery import shared_task

from core import removals


@shared_task
def finish_removals() -> None:
    removals.run_due(removals.SECONDS_OF_TASK)
