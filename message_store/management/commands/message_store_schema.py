"""Create or upgrade the tables of the message store on Cassandra."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from message_store.cassandra import setup
from message_store.store import StoreUnavailable


class Command(BaseCommand):
    help = "Create or upgrade the message store's keyspace on Cassandra, and say what was done."

    def handle(self, *args: Any, **options: Any) -> None:
        if settings.MESSAGE_STORE != "cassandra":
            self.stdout.write(f"MESSAGE_STORE is {settings.MESSAGE_STORE}: `migrate` creates its tables.")
            return
        try:
            for line in setup.set_up():
                self.stdout.write(line)
        except (setup.SetupError, StoreUnavailable) as error:
            raise CommandError(str(error)) from error
