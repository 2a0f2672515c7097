import os
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from accounts.importing import pulseguardian
from accounts.importing.command import ImportCommand, refusing
from queues.actions import unbounded

VARIABLE = "PULSEGUARDIAN_DATABASE_URL"


class Command(ImportCommand):
    """Import from a PulseGuardian database."""

    help = (
        "Show which owners, Pulse users and unbounded queues of a PulseGuardian database would be imported; --apply "
        "imports them. That database is only read, and nothing changes on the broker. You can run it repeatedly."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "database_url",
            nargs="?",
            metavar="DATABASE_URL",
            help=f"postgres://… or sqlite:///…; default: the value of {VARIABLE}, which other users of this machine "
            "can't read",
        )
        super().add_arguments(parser)
        parser.add_argument("--operators", action="store_true", help="make PulseGuardian's administrators operators")

    def handle(self, *args: Any, **options: Any) -> None:
        """Show the steps, and carry them out if wanted. Exit with 1 if either fails."""
        url = options["database_url"] or os.environ.get(VARIABLE, "")
        if not url:
            raise CommandError(f"Pass the address of PulseGuardian's database, or set {VARIABLE}.")
        with refusing():
            found = pulseguardian.read(url)
            steps = pulseguardian.plan(found, operators=options["operators"])
            flags = unbounded.plan(found.unbounded)

            def apply() -> None:
                # First, so that no pass deletes these queues in the meantime.
                unbounded.apply(flags, "import_pulseguardian")
                pulseguardian.apply(steps)

            self.carry_out([*steps, *flags], apply, options)
