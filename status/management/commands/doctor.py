import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from status.doctor import examine
from status.doctor.findings import Finding, Status

NO_PROBLEMS, PROBLEMS = 0, 1


class Command(BaseCommand):
    help = "Check everything that Guardian needs: settings, database, task queue, broker, mail. Print advice."
    requires_system_checks = []  # doctor reports the system checks' messages itself

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the findings. Exit with 1 if there is a problem; a warning is none."""
        findings = examine.examine()
        problems = [finding for finding in findings if finding.status is Status.PROBLEM]
        if options["json"]:
            checks = [finding._asdict() for finding in findings]
            self.stdout.write(json.dumps({"ok": not problems, "checks": checks}, indent=2, ensure_ascii=False))
        else:
            self.stdout.write(self._as_text(findings))
        raise SystemExit(PROBLEMS if problems else NO_PROBLEMS)

    def _as_text(self, findings: list[Finding]) -> str:
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
