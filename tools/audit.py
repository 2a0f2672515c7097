"""``make audit``: whether a package that Guardian is installed with has a hole that is known.

pip-audit asks the package index about each version of ``requirements.lock``. It stands in a virtual environment of its
own, since it brings thirty packages with it that nothing else needs.
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
"""For so long the index is asked; what it has not told by then is not waited for."""

SKIPPED = "Known holes were not looked for: {}."


def main() -> int:
    """Print what was found, and return 1 where there is a hole; where nobody can be asked, say so and return 0."""
    code, lines = audit([str(PROGRAM)], TIMEOUT_SECONDS)
    print(*lines, sep="\n")
    return code


def audit(program: Sequence[str], seconds: float) -> tuple[int, list[str]]:
    """Return what to end with and what to say, by what this pip-audit finds out within so many seconds."""
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--timeout", "10", "--format", "json"]
    try:
        done = subprocess.run(
            [*program, "--requirement", str(LOCK), *options],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 0, [SKIPPED.format(f"the package index didn't tell of all packages within {seconds:g} seconds")]
    try:
        return evaluate_report(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):  # no JSON, or of another shape
        said = done.stderr.strip().rpartition("\n")[2]
        if re.search("onnect|ServiceError", done.stderr):  # "Could not connect", "ConnectionError", and the like
            return 0, [SKIPPED.format("the package index can't be reached")]
        return 1, [f"pip-audit failed: {said or 'its answer is of another shape'}"]


def evaluate_report(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Return what to end with and what to say, by pip-audit's report."""
    packages = report["dependencies"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    holes = [
        f"{package['name']} {package['version']} has {hole['id']}; {_remedy(hole['fix_versions'])}."
        for package in packages
        for hole in package.get("vulns", [])
    ]
    if holes:
        return 1, holes
    if len(unknown) == len(packages):
        return 0, [SKIPPED.format("the package index here has no data about them")]
    left_out = f" Nothing is known of {', '.join(unknown)}." if unknown else ""
    return 0, [f"No known hole in {len(packages) - len(unknown)} packages.{left_out}"]


def _remedy(versions: list[str]) -> str:
    return f"it is mended in {', '.join(versions)}" if versions else "there is no version without it yet"


if __name__ == "__main__":
    sys.exit(main())
