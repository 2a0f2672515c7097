from typing import Any

from django.core.management.base import BaseCommand

from installation import exporting, present


class Command(BaseCommand):
    help = (
        "Print this installation as a file that apply would leave unchanged: owners, Pulse users, limits of queues, "
        "offerings and applications, without passwords and keys."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(exporting.of_state(present.read()), ending="")
