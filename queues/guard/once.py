"""A pass, then its deletions: what ``monitor_queues --once`` does."""

import time

from django.db.models import QuerySet

from queues.guard import deleter, monitor
from queues.guard.pass_run import Report
from queues.models import Queue, QueueEvent
from queues.rules.thresholds import DELETING

WAIT_SECONDS = 60.0
"""How long to begin deletions, or to wait for a deleter that runs elsewhere."""

POLL_SECONDS = 0.5


def run_once(*, force: bool = False, dry_run: bool = False) -> Report:
    """Run a pass and carry out the recorded deletions, and report both.

    If a deleter runs elsewhere, wait for its outcomes of this pass's decisions, and report the rest as pending.
    """
    report = monitor.run_pass(force=force, dry_run=dry_run)
    if dry_run or report.another_pass or report.away:
        return report
    until = time.monotonic() + WAIT_SECONDS
    outcome = deleter.run(lambda: time.monotonic() > until)
    if outcome is not None:
        report.deleted += outcome.deleted
        report.kept += outcome.kept
        report.errors += outcome.errors
    else:
        while _pending(report).exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        events = QueueEvent.objects.filter(queue__in=report.decided, at__gte=report.at)
        report.deleted += events.filter(kind=QueueEvent.Kind.DELETED).count()
        report.kept += events.filter(kind=QueueEvent.Kind.KEPT).count()
    report.pending = _pending(report).count()
    return report


def _pending(report: Report) -> QuerySet[Queue]:
    return Queue.objects.filter(pk__in=report.decided, state=DELETING)
