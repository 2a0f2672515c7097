"""``make audit``: check Guardian's dependencies for known vulnerabilities.

pip-audit queries the package index about each version of ``requirements.lock``. It has its own virtual environment,
since it brings thirty packages that nothing else needs.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
PROGRAM = PROJECT / "var" / "audit" / "bin" / "pip-audit"
LOCK = PROJECT / "requirements.lock"
TIMEOUT_SECONDS = 60

SKIPPED = "Skipped the check for known vulnerabilities: {}."


def main() -> int:
    """Print the result. Return 1 for a vulnerability, and 0 if there is none or the index is unreachable."""
    code, lines = audit([str(PROGRAM)], TIMEOUT_SECONDS)
    print(*lines, sep="\n")
    return code


def audit(program: Sequence[str], seconds: float) -> tuple[int, list[str]]:
    """Run pip-audit with a timeout. Return the exit code and the lines to print."""
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--timeout", "10", "--format", "json"]
    try:
        done = subprocess.run(
            [*program, "--requirement", str(LOCK), *options],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 0, [SKIPPED.format(f"the package index did not answer within {seconds:g} seconds")]
    try:
        return evaluate_report(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):  # no JSON, or an unexpected structure
        last_line = done.stderr.strip().rpartition("\n")[2]
        if re.search("onnect|ServiceError", done.stderr):  # "Could not connect", "ConnectionError", and the like
            return 0, [SKIPPED.format("the package index can't be reached")]
        return 1, [f"pip-audit failed: {last_line or 'its report has an unexpected structure'}"]


def evaluate_report(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code and the lines to print for a report of pip-audit."""
    packages = report["dependencies"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    vulnerabilities = [
        f"{package['name']} {package['version']} has {vulnerability['id']}; {_remedy(vulnerability['fix_versions'])}."
        for package in packages
        for vulnerability in package.get("vulns", [])
    ]
    if vulnerabilities:
        return 1, vulnerabilities
    if len(unknown) == len(packages):
        return 0, [SKIPPED.format("the package index has no data about the packages")]
    skipped = f" No data about {', '.join(unknown)}." if unknown else ""
    return 0, [f"No known vulnerabilities in {len(packages) - len(unknown)} packages.{skipped}"]


def _remedy(versions: list[str]) -> str:
    return f"fixed in {', '.join(versions)}" if versions else "no fixed version yet"


if __name__ == "__main__":
    sys.exit(main())
