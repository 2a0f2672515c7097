from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from message_store.applications import create_application, create_key


class Command(BaseCommand):
    help = "Create an application if it does not exist, and print a new key for it. The key cannot be retrieved later."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            _, key = create_key(create_application(options["name"]))
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        self.stdout.write(key)
