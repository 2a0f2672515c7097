import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from core.confirmation import Effect
from core.leases import HeldLease, LeaseLost, LeaseTaken, lease
from installation import consequences, present, reading
from installation.applying import Applier
from installation.planning import Do, Plan, make_plan
from installation.resources import InvalidFile, State, Wanted
from installation.revision import revision
from message_store.store import StoreUnavailable
from rabbit.errors import BrokerError
from rabbit.names import readable

PENDING, BRAKED = 2, 3

PROGRESS_SECONDS = 5


class Command(BaseCommand):
    help = (
        "Compare a file with this installation, print what would change, and change it. Exit codes: 0 done, or nothing "
        "to do; 1 an error; 2 changes are pending; 3 the brake blocks the removal of that much."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path, metavar="FILE", help="a YAML file, such as export prints")
        parser.add_argument("--dry-run", action="store_true", help="change nothing")
        parser.add_argument(
            "--prune", action="store_true", help="remove what an earlier apply created and the file no longer has"
        )
        parser.add_argument("--yes", metavar="DIGEST", default="", help="confirm the plan with this digest")
        parser.add_argument(
            "--passwords",
            type=Path,
            metavar="FOLDER",
            help="write the passwords of new Pulse users to files in this empty folder; default: nowhere, and owners "
            "set passwords on their pages",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        path, folder = options["file"], options["passwords"]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CommandError(f"{path} can't be read: {error.strerror}.") from error
        if folder is not None and not folder.is_dir():
            raise CommandError(f"{folder} is not a folder. Create it first.")
        if folder is not None and any(folder.iterdir()):
            raise CommandError(f"{folder} is not empty. Name an empty folder, so that no file is replaced.")
        try:
            wanted = reading.read(content)
            if options["dry_run"]:
                plan, effect, why_not = self._planned(wanted, options)
                code = BRAKED if why_not else PENDING
            else:
                with lease("apply") as held:
                    plan, effect, why_not = self._planned(wanted, options)
                    code = BRAKED if why_not else PENDING
                    if not why_not and self._is_confirmed(plan, effect, options["yes"]):
                        applier = Applier(f"{path} at {revision(path, content)}", effect, folder)
                        code = self._apply(plan, applier, held)
        except InvalidFile as error:
            for at, text in error.problems:
                self.stderr.write(readable(f"{path}:{at.line}:{at.column}: {text}"))
            raise CommandError("Nothing was done.") from error
        except LeaseTaken as error:
            raise CommandError(
                "Nothing was done. Another apply is running, or was killed less than two minutes ago. Try again later."
            ) from error
        except BrokerError as error:
            raise CommandError(f"Nothing was done. The request to the broker failed: {error}") from error
        except StoreUnavailable as error:
            raise CommandError(f"Nothing was done. The message store does not answer: {error}") from error
        except (LeaseLost, Error) as error:
            raise CommandError(f"{error} Completed changes stay; run the command again for the rest.") from error
        if code and plan.changes:
            raise SystemExit(code)

    def _planned(self, wanted: list[Wanted], options: dict[str, Any]) -> tuple[Plan, Effect, str]:
        """Return the printed plan, the queues it deletes, and why it can't be applied, or ""."""
        state: State = present.read(wanted, prune=options["prune"])
        plan = make_plan(wanted, state, prune=options["prune"])
        effect, why_not = consequences.of_plan(plan), consequences.why_braked(plan, state)
        for line in plan.lines():
            self.stdout.write(line)
        if effect.queues:
            self.stdout.write(effect.sentence)
            for queue in sorted(effect.queues, key=lambda one: (one.vhost, one.name)):
                messages = "an unknown number of" if queue.messages is None else f"{queue.messages:,}"
                self.stdout.write(f"  deletes {queue.readable_name} in {queue.readable_vhost} with {messages} messages")
        if plan.changes:
            self.stdout.write(f"Digest of this plan: {plan.digest(effect.queues)}")
        if why_not:
            self.stderr.write(why_not)
        return plan, effect, why_not

    def _is_confirmed(self, plan: Plan, effect: Effect, given: str) -> bool:
        digest = plan.digest(effect.queues)
        if given and given != digest and plan.changes:
            self.stderr.write(f"Nothing was done: the digest {given} is not that of this plan. Read it again.")
            return False
        if not given and (effect.queues or any(change.do is Do.REMOVE for change in plan.changes)):
            self.stderr.write(
                f"Nothing was done. The plan deletes or removes something: to confirm it, add --yes {digest}"
            )
            return False
        return True

    def _apply(self, plan: Plan, applier: Applier, held: HeldLease) -> int:
        """Carry out a plan with its progress, and return the exit code."""
        failures, total, shown = 0, len(plan.changes), time.monotonic()
        for number, failure in enumerate(applier.carry_out(plan, held), 1):
            if failure is not None:
                failures += 1
                self.stderr.write(f"Failed: {failure.change}: {readable(failure.why)}")
            if time.monotonic() - shown >= PROGRESS_SECONDS:
                shown = time.monotonic()
                self.stderr.write(f"{number:,} of {total:,} changes are done.")
        if failures:
            self.stderr.write(f"{failures:,} of {total:,} changes failed; run the command again for these.")
            return 1
        if total:
            self.stdout.write("Done.")
        return 0
