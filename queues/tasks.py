"""Celery tasks. Each calls a function that other entry points may call too, and contains no rule."""

from celery import shared_task

from queues.archives import replay
from queues.guard import consumer_health, deleter, monitor, pruning
from queues.mails import weekly


@shared_task
def monitor_queues() -> None:
    """Run one pass, unless a failure to reach the broker has delayed the next."""
    if monitor.is_due():
        monitor.run_pass()


@shared_task
def delete_queues() -> None:
    """Carry out the recorded deletions."""
    deleter.keep_connection()
    deleter.run()


@shared_task
def replay_archives() -> None:
    replay.run_due()


@shared_task
def prune() -> None:
    pruning.prune()


@shared_task
def count_consumers() -> None:
    consumer_health.count_consumers()


@shared_task
def tell_the_week() -> None:
    weekly.enqueue_weekly_summaries()
