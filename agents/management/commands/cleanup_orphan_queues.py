import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import Error

from accounts import audit
from agents.models import Sweep
from agents.sweeps import sweep
from agents.sweeps.reports import Report
from queues.management.commands.monitor_queues import BRAKE_HELD, DONE, FAILED
from rabbit.names import readable


class Command(BaseCommand):
    help = "Delete agents' queues without a registration, and declare missing registered queues again."
    force_help = "ignore the brake on bulk deletion, and delete orphans in use too"
    event = "requested a sweep of orphans"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options, the same as those of ``monitor_queues``."""
        parser.add_argument("--once", action="store_true", help="run once and exit (the default)")
        parser.add_argument("--dry-run", action="store_true", help="report what would be done, and change nothing")
        parser.add_argument("--force", action="store_true", help=self.force_help)
        parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")

    def run(self, *, force: bool, dry_run: bool) -> Report:
        return sweep.sweep_orphans(force=force, dry_run=dry_run)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run once, and set the exit code.

        0: done, or another process is running. 1: the broker is unreachable, or the run did not finish. 3: the brake
        blocked the deletion.
        """
        try:
            if options["force"] and not options["dry_run"]:
                audit.record(None, self.event, None, force=True)
            report = self.run(force=options["force"], dry_run=options["dry_run"])
        except Error as error:
            # The next one finishes what this one began.
            self.stderr.write(f"The database can't be used: {error}. Check that it runs, and that 'migrate' was run.")
            raise SystemExit(FAILED) from error
        self.stdout.write(json.dumps(report.as_json()) if options["json"] else in_words(report))
        if report.away or report.given_up:
            raise SystemExit(FAILED)
        raise SystemExit(BRAKE_HELD if report.brake_held else DONE)


def in_words(report: Report) -> str:
    if report.another_sweep:
        return "Another clean-up is running; nothing was done."
    lines = [f"Error: {error}" for error in report.errors]
    lines += [f"Would delete {_name(queue)}" for queue in report.would_delete]
    lines += [f"Would declare {_name(queue)} again" for queue in report.would_repair]
    lines += [f"{'Would keep' if report.dry_run else 'Kept'} {_name(queue)}" for queue in report.in_use]
    would = "would be " if report.dry_run else ""
    deleted = len(report.would_delete) if report.dry_run else report.deleted
    if report.kind == Sweep.Kind.STALE:
        lines += [f"{owner} has no valid token" for owner in report.owners]
        lines.append(
            f"{report.seen} registered queues in {report.seconds:.2f} s: {report.subscriptions} subscriptions and "
            f"consumers {would}removed with {deleted} queues, {report.tokens} expired tokens {would}removed."
        )
    elif not report.away or report.seen:
        lines.append(
            f"{report.seen} queues in {report.seconds:.2f} s: {report.found} without a registration, {deleted} "
            f"{would}deleted, {report.kept} {would}kept, {report.repaired} {would}declared again."
        )
    return "\n".join(lines)


def _name(queue: dict[str, str]) -> str:
    return f"{readable(queue['queue'])} in {queue['vhost']}"
