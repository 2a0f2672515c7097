import json
import logging
import signal
import threading
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import Error, close_old_connections

from accounts import audit
from queues import monitor, shards
from queues.monitor import Report
from rabbit.names import readable

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE, NOT_ASKED, BRAKE_HELD = 0, 1, 3


class Command(BaseCommand):
    """Run passes of the monitor, without Celery."""

    help = (
        "List the queues, warn about long ones, delete those past their maximum, and record it; again and again. With "
        "GUARDIAN_SHARD_BY_VHOST one vhost after the other; --once, --dry-run and --force go over all at once."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the options."""
        parser.add_argument("--once", action="store_true", help="run one pass and end")
        parser.add_argument("--dry-run", action="store_true", help="look and decide, change nothing, and end")
        parser.add_argument(
            "--force", action="store_true", help="lift the brake on bulk deletion, and believe a list that is too short"
        )
        parser.add_argument("--json", action="store_true", help="print each report as a line of JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one pass, or passes until SIGTERM or Ctrl-C, and end with the code of the last.

        0: done, or another process is at it; 1: the broker could not be asked, or the pass not be finished, or not be
        begun beside one over a single vhost; 3: the brake held. ``--force`` is for the first pass alone.
        """
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())  # the pass under way is finished first
        once = options["once"] or options["dry_run"]
        while True:
            if once or options["force"] or not settings.GUARDIAN_SHARD_BY_VHOST:
                code = self._pass(
                    options, partial(monitor.run_pass, force=options["force"], dry_run=options["dry_run"])
                )
            else:
                self._round(options, stop)
            options["force"] = False  # whoever forces a pass has looked at what this one does
            if once:
                raise SystemExit(code)
            if stop.wait(self._seconds_to_wait()):
                raise SystemExit(DONE)

    def _round(self, options: dict[str, Any], stop: threading.Event) -> None:
        """Run one pass over each vhost that no other process is at, one after the other."""
        begun = self._tried(options, shards.begin_round)
        if begun is None:
            return
        if begun.report.errors:
            self._say(options, begun.report)
        for vhost in begun.vhosts:
            if stop.is_set():
                return
            self._pass(options, partial(monitor.run_shard, vhost))

    def _pass(self, options: dict[str, Any], run: Callable[[], Report]) -> int:
        report = self._tried(options, run)
        return NOT_ASKED if report is None else self._say(options, report)

    def _tried(self, options: dict[str, Any], run: Callable[[], T]) -> T | None:
        """Return what this returns; None where it failed, which is said or logged."""
        close_old_connections()
        try:
            if options["force"] and not options["dry_run"]:
                audit.note(None, "asked for a pass", None, force=True)
            return run()
        except Error as error:
            # The next pass finishes what this one began.
            self.stderr.write(f"The database can't be used: {error}. See that it runs and that 'migrate' was run.")
        except Exception:
            if options["once"]:
                raise
            # Whatever it is, the next pass is the best that can be done about it.
            logger.exception("The pass failed.")
        return None

    def _say(self, options: dict[str, Any], report: Report) -> int:
        """Print the report, and return the code that it stands for."""
        if options["json"]:
            self.stdout.write(json.dumps(report.as_json()))
        else:
            self.stdout.write(in_words(report))
        self.stdout.flush()
        if report.away or report.given_up or (report.another_pass and report.errors):
            return NOT_ASKED
        return BRAKE_HELD if report.brake_held else DONE

    def _seconds_to_wait(self) -> float:
        try:
            return monitor.seconds_to_wait()
        except Error:
            return float(settings.GUARDIAN_POLL_MAX_SECONDS)


def in_words(report: Report) -> str:
    """Return the report as a person reads it."""
    if report.another_pass:
        return "\n".join(
            ["Another pass is running; nothing was done.", *(f"Error: {error}" for error in report.errors)]
        )
    lines = [f"Error: {error}" for error in report.errors]
    lines += [f"Would delete {_name(queue)}" for queue in report.would_delete]
    would_go = {(queue["vhost"], queue["queue"]) for queue in report.would_delete}
    kept = [queue for queue in report.condemned if (queue["vhost"], queue["queue"]) not in would_go]
    lines += [f"Would keep {_name(queue)}, though it is to be deleted" for queue in kept]
    if not report.away:
        vhost = f"{readable(report.vhost)}: " if report.vhost else ""
        lines.append(
            f"{vhost}{report.queues} queues in {report.seconds:.2f} s ({report.listing_seconds:.2f} s for the list): "
            f"{report.new} new, {report.changed} changed, {report.gone} gone, {report.unknown} of unknown length; "
            f"{report.warned} warned, {report.recovered} recovered, {report.deleted} deleted, {report.kept} kept."
        )
    return "\n".join(lines)


def _name(queue: dict[str, str]) -> str:
    return f"{queue['queue']} in {queue['vhost']}"
