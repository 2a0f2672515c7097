import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from queues.archives import replay
from queues.models import Replay

POLL_SECONDS = 5


class Command(BaseCommand):
    help = "Send the messages of the replays that are running, repeatedly."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="end when no replay makes progress")

    def handle(self, *args: Any, **options: Any) -> None:
        """Carry out replays until none is running, or until Ctrl-C."""
        while True:
            sent = replay.run_due()
            if sent:
                self.stdout.write(f"Sent {sent} messages; {self._running()} replays are running.")
            elif options["once"]:
                return
            else:
                time.sleep(POLL_SECONDS)

    def _running(self) -> int:
        return Replay.objects.filter(state=Replay.State.RUNNING).count()
