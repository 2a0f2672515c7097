"""What the commands ``adopt_broker`` and ``import_pulseguardian`` share: options, output and errors."""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from accounts.importing import adoption
from accounts.importing.adoption import InvalidSource, Step, as_table
from core.leases import LeaseLost, LeaseTaken
from core.refusals import Refusal
from rabbit.errors import BrokerError


class ImportCommand(BaseCommand):
    """A command that shows the steps of a plan, and with ``--apply`` carries them out."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options of both commands."""
        parser.add_argument("--apply", action="store_true", help="carry out the steps shown")
        parser.add_argument(
            "--write", type=Path, metavar="FILE", help="write the steps to a new file for manage.py apply instead"
        )
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def carry_out(
        self, steps: Sequence[Step], apply: Callable[[], None], options: Mapping[str, Any], skipped: int | None = None
    ) -> None:
        """Print the steps, and apply them if wanted. ``skipped`` is the number of Pulse users without an owner."""
        if options["write"]:
            if options["apply"]:
                raise CommandError("--apply and --write exclude each other.")
            try:
                with options["write"].open("x") as file:
                    file.write(adoption.as_installation_file(steps))
            except OSError as error:
                raise CommandError(f"{options['write']} can't be written: {error.strerror}.") from error
        is_applied = options["apply"] and any(step.is_change for step in steps)
        if not options["json"]:
            lines = as_table(steps) if skipped is None else [*as_table(steps), f"{skipped} without an owner: skipped"]
            self.stdout.write("\n".join(lines))
        if is_applied:
            apply()
        if options["json"]:
            counts = {} if skipped is None else {"skipped": skipped}
            shown = [step._asdict() for step in steps]
            self.stdout.write(json.dumps({"applied": is_applied, "steps": shown, **counts}))
        elif is_applied:
            self.stdout.write("Done.")
        elif options["write"]:
            self.stdout.write(f"Review {options['write']}, then run: manage.py apply {options['write']}")
        elif any(step.is_change for step in steps):
            self.stdout.write("Nothing was changed. Run it with --apply to carry out these steps.")
        else:
            self.stdout.write("There is nothing to do.")


@contextmanager
def refusing() -> Iterator[None]:
    """Turn the errors of a plan and of its steps into errors of the command, which then exits with 1."""
    try:
        yield
    except InvalidSource as error:
        raise CommandError(f"Nothing was done. {error}") from error
    except BrokerError as error:
        raise CommandError(f"Nothing was done. The request to the broker failed: {error}") from error
    except (LeaseTaken, LeaseLost) as error:
        raise CommandError("Nothing was done: a pass has been running for a minute. Run it again.") from error
    except Refusal as error:
        raise CommandError(f"{error} Completed steps stay; run the command again for the rest.") from error
    except Error as error:
        raise CommandError(
            f"Database error: {error}. Completed steps stay; run the command again for the rest."
        ) from error
