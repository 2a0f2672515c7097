import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from status import doctor
from status.doctor import Finding, Status

ALL_RIGHT, PROBLEMS = 0, 1


class Command(BaseCommand):
    """Look at everything that Guardian needs."""

    help = "Look at everything that Guardian needs, and say what is wrong and what to do about it."
    requires_system_checks = []  # what is wrong with the settings is to be told like everything else

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the options."""
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print what was found, and end with 0, or with 1 where there is a problem. Warnings are none."""
        findings = doctor.examine()
        problems = [finding for finding in findings if finding.status is Status.PROBLEM]
        if options["json"]:
            checks = [finding._asdict() for finding in findings]
            self.stdout.write(json.dumps({"ok": not problems, "checks": checks}, indent=2, ensure_ascii=False))
        else:
            self.stdout.write(self._in_words(findings))
        raise SystemExit(PROBLEMS if problems else ALL_RIGHT)

    def _in_words(self, findings: list[Finding]) -> str:
        """Return it as a person reads it: what is wrong stands out by its word, with colours or without."""
        marks = {
            Status.OK: self.style.SUCCESS("ok     "),
            Status.WARNING: self.style.WARNING("WARNING"),
            Status.PROBLEM: self.style.ERROR("PROBLEM"),
        }
        width = max(len(finding.name) for finding in findings)
        lines = []
        for name, status, found, advice in findings:
            lines.append(f"{marks[status]}  {name:<{width}}  {found}")
            if status is not Status.OK:
                lines.append(f"{'':9}{'':{width}}  To do: {advice}")
        counted = {status: sum(finding.status is status for finding in findings) for status in Status}
        lines += ["", f"{counted[Status.PROBLEM]} problems, {counted[Status.WARNING]} warnings."]
        return "\n".join(lines)
