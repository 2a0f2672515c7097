from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from guardian_consumers._command import EXIT_CODES, add_arguments, consume_in_django


class Command(BaseCommand):
    """Consume messages with functions that use Django, as ``python -m guardian_consumers`` does."""

    requires_system_checks = ()  # for a worker, RABBIT_URL may name a vhost
    help = f"Call functions with the messages of queues, until SIGTERM or Ctrl-C. {EXIT_CODES}"

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Consume, and exit with the code."""
        raise SystemExit(consume_in_django(options, self.stderr.write))
