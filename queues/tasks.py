"""What Celery runs. Each task calls the function that a command calls too, and holds no rule."""

from celery import shared_task

from queues import consumer_health, monitor, pruning, weekly


@shared_task
def monitor_queues() -> None:
    """Run one pass, unless the broker is away and the wait is not over."""
    if monitor.is_due():
        monitor.run_pass()


@shared_task
def prune() -> None:
    """Remove what is old."""
    pruning.prune()


@shared_task
def count_consumers() -> None:
    """Count the consumers of the guarded queues."""
    consumer_health.count_consumers()


@shared_task
def tell_the_week() -> None:
    """Write the weekly summaries that are due."""
    weekly.enqueue_weekly_summaries()
