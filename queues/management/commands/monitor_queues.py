import json
import logging
import signal
import threading
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import Error, close_old_connections

from accounts import audit
from queues import monitor
from queues.pass_run import Report

logger = logging.getLogger(__name__)

DONE, FAILED, BRAKE_HELD = 0, 1, 3


class Command(BaseCommand):
    """Run passes of the monitor, without Celery."""

    help = "List the queues, warn about long ones, delete those over their limit, and record it, repeatedly."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument("--once", action="store_true", help="run one pass and end")
        parser.add_argument("--dry-run", action="store_true", help="compare and decide, change nothing, and end")
        parser.add_argument(
            "--force", action="store_true", help="lift the brake on bulk deletion, and accept a list that is too short"
        )
        parser.add_argument("--json", action="store_true", help="print each report as a line of JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one pass, or passes until SIGTERM or Ctrl-C, and exit with the code of the last.

        0: done, or another process is running a pass; 1: the broker could not be queried, or the pass was aborted; 3:
        the brake blocked deletions. ``--force`` applies to the first pass only.
        """
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())  # the current pass is finished first
        once = options["once"] or options["dry_run"]
        while True:
            code = self._pass(options)
            options["force"] = False  # the operator checked the first pass only
            if once:
                raise SystemExit(code)
            if stop.wait(self._seconds_to_wait()):
                raise SystemExit(DONE)

    def _pass(self, options: dict[str, Any]) -> int:
        """Run one pass, print its report, and return the exit code. A failure is printed or logged."""
        close_old_connections()
        try:
            if options["force"] and not options["dry_run"]:
                audit.record(None, "asked for a pass", None, force=True)
            report = monitor.run_pass(force=options["force"], dry_run=options["dry_run"])
        except Error as error:
            # The next pass continues.
            self.stderr.write(f"The database can't be used: {error}. Check that it runs, and that 'migrate' was run.")
            return FAILED
        except Exception:
            if options["once"]:
                raise
            # Try again with the next pass, whatever the error.
            logger.exception("The pass failed.")
            return FAILED
        return self._print(options, report)

    def _print(self, options: dict[str, Any], report: Report) -> int:
        """Print the report, and return its exit code."""
        if options["json"]:
            self.stdout.write(json.dumps(report.as_json()))
        else:
            self.stdout.write(as_text(report))
        self.stdout.flush()
        if report.away or report.given_up:
            return FAILED
        return BRAKE_HELD if report.brake_held else DONE

    def _seconds_to_wait(self) -> float:
        try:
            return monitor.seconds_to_wait()
        except Error:
            return float(settings.GUARDIAN_POLL_MAX_SECONDS)


def as_text(report: Report) -> str:
    """Return the report as text."""
    if report.another_pass:
        return "Another pass is running; nothing was done."
    lines = [f"Error: {error}" for error in report.errors]
    lines += [f"Would delete {_name(queue)}" for queue in report.would_delete]
    deleted = {(queue["vhost"], queue["queue"]) for queue in report.would_delete}
    kept = [queue for queue in report.condemned if (queue["vhost"], queue["queue"]) not in deleted]
    lines += [f"Would keep {_name(queue)}, though it is to be deleted" for queue in kept]
    if not report.away:
        lines.append(
            f"{report.queues} queues in {report.seconds:.2f} s ({report.listing_seconds:.2f} s for the list): "
            f"{report.new} new, {report.changed} changed, {report.gone} gone, {report.unknown} of unknown length; "
            f"{report.warned} warned, {report.recovered} recovered, {report.deleted} deleted, {report.kept} kept."
        )
    return "\n".join(lines)


def _name(queue: dict[str, str]) -> str:
    return f"{queue['queue']} in {queue['vhost']}"
