from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import Error, close_old_connections

from core import stopping
from notifications import claims, sending

INTERVAL_SECONDS = 5


class Command(BaseCommand):
    help = "Send the notifications that are due, repeatedly."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="send what is due now and end")

    def handle(self, *args: Any, **options: Any) -> None:
        stop = stopping.requested_by_signals()
        while True:
            close_old_connections()
            try:
                counts = _send_all_due() if options["once"] else sending.send_due()
            except Error as error:
                if options["once"]:
                    raise
                self.stderr.write(f"The database can't be used: {error}")
            else:
                if options["once"] or counts.sent or counts.postponed or counts.failed:
                    self.stdout.write(
                        f"{counts.sent} sent, {counts.postponed} to be retried, {counts.failed} given up."
                    )
            if options["once"] or stop.wait(INTERVAL_SECONDS):
                return


def _send_all_due() -> claims.DeliveryCounts:
    """Send until nothing is due, as one call has a time limit."""
    total = claims.DeliveryCounts()
    while (counts := sending.send_due()).claimed:
        total += counts
    return total
