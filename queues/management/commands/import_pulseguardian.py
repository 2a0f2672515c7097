import json
import os
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from accounts.importing import adoption, pulseguardian
from accounts.importing.pulseguardian import SourceError
from core.leases import LeaseLost, LeaseTaken
from core.refusals import Refusal
from queues.actions import unbounded
from rabbit.errors import BrokerError

VARIABLE = "PULSEGUARDIAN_DATABASE_URL"


class Command(BaseCommand):
    """Import from a PulseGuardian database."""

    help = (
        "Show which owners, Pulse users and unbounded queues of a PulseGuardian database would be imported; --apply "
        "imports them. That database is only read, and nothing changes on the broker. You can run it repeatedly."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the address of the database and the options."""
        parser.add_argument(
            "database_url",
            nargs="?",
            metavar="DATABASE_URL",
            help=f"postgres://… or sqlite:///…; default: the value of {VARIABLE}, which other users of this machine "
            "can't read",
        )
        parser.add_argument("--apply", action="store_true", help="carry out the steps shown")
        parser.add_argument("--operators", action="store_true", help="make PulseGuardian's administrators operators")
        parser.add_argument("--json", action="store_true", help="print the steps as a line of JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        """Show the steps, and carry them out if wanted. Exit with 1 if either fails."""
        url = options["database_url"] or os.environ.get(VARIABLE, "")
        if not url:
            raise CommandError(f"Pass the address of PulseGuardian's database, or set {VARIABLE}.")
        try:
            found = pulseguardian.read(url)
            steps = pulseguardian.plan(found, operators=options["operators"])
            flags = unbounded.plan(found.unbounded or ())
        except SourceError as error:
            raise CommandError(str(error)) from error
        except BrokerError as error:
            raise CommandError(f"Nothing was done. The broker can't be queried: {error}") from error
        except Error as error:
            raise CommandError(f"Nothing was done. Guardian's database can't be used: {error}") from error
        steps += flags
        if not options["json"]:
            self.stdout.write("\n".join(adoption.as_table(steps)) or "The database is empty.")
            if found.unbounded is None:
                self.stdout.write("This version of PulseGuardian has no unbounded queues.")
        to_do = any(step.is_change for step in steps)
        if to_do and options["apply"]:
            try:
                # First, so that no pass deletes these queues in the meantime.
                unbounded.apply(flags, "import_pulseguardian")
                pulseguardian.apply(steps)
            except Refusal as error:
                raise CommandError(f"{error} What was done stays; run it again for the rest.") from error
            except (LeaseTaken, LeaseLost) as error:
                raise CommandError("Nothing was done: a pass has been running for a minute. Run it again.") from error
            except Error as error:
                raise CommandError(
                    f"Guardian's database can't be used: {error}. What was done stays; run it again for the rest."
                ) from error
        if options["json"]:
            applied = to_do and options["apply"]
            self.stdout.write(json.dumps({"applied": applied, "steps": [step.as_json() for step in steps]}))
        elif not to_do:
            self.stdout.write("There is nothing to do.")
        else:
            self.stdout.write("Done." if options["apply"] else "Nothing was changed; --apply does it.")
