import json
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from accounts.importing import adoption, owners_file
from accounts.importing.command import ImportCommand, refusing
from rabbit.names import readable


class Command(ImportCommand):
    """Assign owners to users that exist on the broker."""

    help = (
        "Print the users of the broker that have no owner here, as a CSV file to fill in. With the filled file, "
        "show which Pulse users would be adopted; with --apply, adopt them. Nothing changes on the broker."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "csv",
            nargs="?",
            type=Path,
            metavar="CSV",
            help="a file with the columns username and owners; without it, print such a file",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the CSV file, or adopt the Pulse users of the given file. The exit code is 1 after a failure."""
        path = options["csv"]
        if path is None and (options["apply"] or options["write"]):
            raise CommandError("--apply and --write need the filled file.")
        with refusing():
            if path is None:
                self._propose(as_json=options["json"])
            else:
                steps, skipped = owners_file.plan(path)
                self.carry_out(steps, partial(adoption.adopt, steps, notify=True), options, skipped)

    def _propose(self, *, as_json: bool) -> None:
        adoptable, left_out = owners_file.propose()
        if as_json:
            pulse_users = [pulse_user._asdict() for pulse_user in adoptable]
            self.stdout.write(json.dumps({"accounts": pulse_users, "left_out": left_out}))
            return
        self.stdout.write(owners_file.as_csv(adoptable))
        for name, reason in left_out.items():
            self.stderr.write(f"{readable(name)} is left out: {reason}")
