import json
import logging
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Collection
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import Error, close_old_connections

from accounts import audit
from core import stopping
from core.formatting import counted, rate_in_words
from queues.guard import deleter, monitor, once
from queues.guard.brake_table import Line, totals
from queues.guard.deleter_threads import keep_connection
from queues.guard.pass_run import Report
from queues.rules.listing import count_by_diagnosis
from rabbit.names import QueueName, readable

logger = logging.getLogger(__name__)

DONE, FAILED, BRAKE_HELD = 0, 1, 3


class Command(BaseCommand):
    help = "List the queues, warn about long ones, delete those over their limit, and record it, repeatedly."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="run one pass and end")
        parser.add_argument("--dry-run", action="store_true", help="compare and decide, change nothing, and end")
        parser.add_argument(
            "--force", action="store_true", help="delete blocked queues, too, and accept a list that is too short"
        )
        parser.add_argument("--json", action="store_true", help="print each report as a line of JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one pass and its deletions, or passes until SIGTERM or Ctrl-C with the deleter beside them.

        0: done, or another process is running a pass; 1: the broker could not be queried, or the pass was aborted; 3:
        deletions are blocked. ``--force`` applies to the first pass only.
        """
        stop = stopping.requested_by_signals()  # the current pass is finished first
        if options["once"] or options["dry_run"]:
            raise SystemExit(self._pass(options, once.run_once))
        deleting = threading.Thread(target=_delete, args=(stop,))
        deleting.start()
        try:
            while not stop.is_set():
                self._pass(options, monitor.run_pass)
                options["force"] = False  # the operator checked the first pass only
                stop.wait(self._seconds_to_wait())
        finally:  # also if nobody reads the output any more: then the supervisor restarts the command
            stop.set()
            deleting.join()
        raise SystemExit(DONE)

    def _pass(self, options: dict[str, Any], run: Callable[..., Report]) -> int:
        """Run one pass, print its report, and return the exit code. A failure is printed or logged."""
        close_old_connections()
        try:
            if options["force"] and not options["dry_run"]:
                audit.record(None, "requested a pass", None, force=True)
            report = run(force=options["force"], dry_run=options["dry_run"])
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
        if options["json"]:
            self.stdout.write(json.dumps({**report.as_json(), "diagnoses": count_by_diagnosis()}))
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


DELETER_SECONDS = 1.0
"""The pause of the deleter beside the passes."""


def _delete(stop: threading.Event) -> None:
    """Carry out recorded deletions until ``stop`` is set."""
    while not stop.wait(DELETER_SECONDS):
        close_old_connections()
        try:
            keep_connection()
            deleter.run(stop.is_set)
        except Exception:  # try again, whatever the error
            logger.exception("Deleting failed.")


def as_text(report: Report) -> str:
    if report.another_pass:
        return "Another pass is running; nothing was done."
    lines = [f"Error: {readable(error)}" for error in report.errors]
    if report.deletable:
        lines += _table(report)
    if not report.away:
        lines.append(
            f"{report.queues} queues in {report.seconds:.2f} s ({report.listing_seconds:.2f} s for the list): "
            f"{report.new} new, {report.changed} changed, {report.gone} gone, {report.unknown} of unknown length; "
            f"{report.warned} warned, {report.recovered} recovered, {report.deleted} deleted, {report.kept} kept."
        )
    if report.pending:
        lines.append(f"{counted(report.pending, 'deletion')} pending: the deleter carries them out.")
    return "\n".join(lines)


HEADINGS = ("Decision", "Queue", "Vhost", "Owner", "Messages", "Limit", "Rate", "Consumers")


def _table(report: Report) -> list[str]:
    """Return the table of the queues to delete, with their totals."""
    would_delete = {(queue["vhost"], queue["queue"]) for queue in report.would_delete}
    rows = [HEADINGS, *(_row(line, would_delete) for line in report.deletable)]
    all_ = totals(report.deletable)
    rows.append(
        ("", f"{all_.queues:,} in all", "", "", _number(all_.messages), "", _rate(all_.per_second),
         _number(all_.consumers))
    )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _row(line: Line, would_delete: Collection[QueueName]) -> tuple[str, ...]:
    decision = "blocked" if line.reason else "delete" if line.key in would_delete else "keep after the recheck"
    return (
        decision, readable(line.queue), readable(line.vhost), line.owner, _number(line.length), f"{line.limit:,}",
        _rate(line.per_second), _number(line.consumers),
    )  # fmt: skip


def _number(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _rate(per_second: float | None) -> str:
    return rate_in_words(per_second) or "unknown"
