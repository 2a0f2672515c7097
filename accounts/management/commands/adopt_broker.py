import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from accounts.importing import adoption
from accounts.importing.adoption import InvalidFile
from core.refusals import Refusal
from rabbit.errors import BrokerError
from rabbit.names import readable


class Command(BaseCommand):
    """Assign owners to users that exist on the broker."""

    help = (
        "Print the users of the broker that have no owner here, as a CSV file to fill in. With the filled file, "
        "show which Pulse users would be adopted; with --apply, adopt them. Nothing changes on the broker."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the file and the options."""
        parser.add_argument(
            "csv",
            nargs="?",
            type=Path,
            metavar="CSV",
            help="a file with the columns username and owners; without it, print such a file",
        )
        parser.add_argument("--apply", action="store_true", help="adopt the Pulse users")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the CSV file, or adopt the Pulse users of the given file. The exit code is 1 after a failure."""
        if options["csv"] is None and options["apply"]:
            raise CommandError("--apply needs the filled file.")
        try:
            if options["csv"] is None:
                self._propose(as_json=options["json"])
            else:
                self._adopt(options["csv"], apply=options["apply"], as_json=options["json"])
        except InvalidFile as error:
            raise CommandError(f"Nothing was done. The file is invalid:\n{error}") from error
        except BrokerError as error:
            raise CommandError(f"Nothing was done. The request to the broker failed: {error}") from error
        except Refusal as error:
            raise CommandError(f"{error} Completed steps stay; run the command again for the rest.") from error
        except Error as error:
            raise CommandError(
                f"Database error: {error}. Completed steps stay; run the command again for the rest."
            ) from error

    def _propose(self, *, as_json: bool) -> None:
        proposals = adoption.propose()
        if as_json:
            pulse_users = [pulse_user._asdict() for pulse_user in proposals.adoptable]
            self.stdout.write(json.dumps({"accounts": pulse_users, "left_out": proposals.left_out}))
            return
        self.stdout.write(adoption.as_csv(proposals.adoptable))
        for name, reason in proposals.left_out.items():
            self.stderr.write(f"{readable(name)} is left out: {reason}")

    def _adopt(self, path: Path, *, apply: bool, as_json: bool) -> None:
        steps, skipped = adoption.plan_file(path)
        if not as_json:
            self.stdout.write("\n".join([*adoption.as_table(steps), f"{skipped} without an owner: skipped"]))
        to_do = any(step.is_change for step in steps)
        if apply:
            adoption.adopt(steps, notify=True)
        if as_json:
            shown = [step.as_json() for step in steps]
            self.stdout.write(json.dumps({"applied": to_do and apply, "steps": shown, "skipped": skipped}))
        elif not to_do:
            self.stdout.write("There is nothing to do.")
        else:
            self.stdout.write(
                "Done." if apply else "Nothing was changed. Run it with --apply to adopt the Pulse users."
            )
