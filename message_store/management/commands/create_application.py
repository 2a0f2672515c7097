from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from message_store.applications import create_application, create_key


class Command(BaseCommand):
    """Make an application that may keep queues over HTTP, or another key for one that exists."""

    help = "Make an application, and print a key for it and nothing else. The key can't be had again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the name."""
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        """Make the application and the key."""
        try:
            _, key = create_key(create_application(options["name"]))
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        self.stdout.write(key)
