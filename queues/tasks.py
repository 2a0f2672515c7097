"""Celery tasks. Each calls a function that other entry points may call too, and contains no rule."""

from mmap import mmap
from typing import Any

from celery import shared_task, signals

from queues.archives import replay
from queues.guard import consumer_health, deleter, monitor, pruning
from queues.guard.deleter_threads import keep_connection
from queues.mails import weekly
from queues.moves import moving
from queues.watching import polling

_is_stopping = mmap(-1, 1)
"""Whether the worker stops: memory that it shares with the processes that it forks."""


@signals.worker_shutting_down.connect
def begin_no_more_deletions(**_: Any) -> None:
    """Let the deleter end with the deletions in hand. A worker that stops waits for its task."""
    _is_stopping[0] = 1


@shared_task
def monitor_queues() -> None:
    """Run one pass, unless a failure to reach the broker has delayed the next."""
    if monitor.is_due():
        monitor.run_pass()


@shared_task
def delete_queues() -> None:
    """Carry out the recorded deletions."""
    keep_connection()
    deleter.run(lambda: bool(_is_stopping[0]))


@shared_task
def replay_archives() -> None:
    replay.run_due()


@shared_task
def move_messages() -> None:
    moving.run_due()


@shared_task
def prune() -> None:
    pruning.prune()
    polling.sweep()


@shared_task
def count_consumers() -> None:
    consumer_health.count_consumers()


@shared_task
def tell_the_week() -> None:
    weekly.enqueue_weekly_summaries()
