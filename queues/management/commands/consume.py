import os
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from guardian_consumers.command import EXIT_CODES, add_arguments, consume
from guardian_consumers.django import with_fresh_connections


class Command(BaseCommand):
    """Consume messages with functions that use Django; ``python -m guardian_consumers`` does the same without."""

    requires_system_checks = ()  # for a worker, RABBIT_URL may name a vhost
    help = f"Call functions with the messages of queues, until SIGTERM or Ctrl-C. {EXIT_CODES}"

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Consume, and exit with the code. RABBIT_URL defaults to the setting of that name."""
        environment = {**os.environ}
        if not environment.get("RABBIT_URL"):
            environment["RABBIT_URL"] = settings.RABBIT_URL
        raise SystemExit(consume(options, environment, self.stderr.write, with_fresh_connections))
