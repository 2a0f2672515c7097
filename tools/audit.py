"""``make audit``: check Guardian's dependencies for known vulnerabilities.

pip-audit queries the package index about each version of ``requirements.lock``. It has its own virtual environment,
since it brings thirty packages that nothing else needs.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PROGRAM = PROJECT / "var" / "audit" / "bin" / "pip-audit"
LOCK = PROJECT / "requirements.lock"
TIMEOUT_SECONDS = 60

SKIPPED = "Skipped the check for known vulnerabilities: the package index {}."


def main() -> int:
    """Print the result. Return 0 if no vulnerability is known, or the index is unreachable."""
    code, text = audit([str(PROGRAM)], TIMEOUT_SECONDS)
    print(text)
    return code


def audit(program: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run pip-audit with a timeout. Return the exit code and what to print."""
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--timeout", "10"]
    try:
        done = subprocess.run(
            [*program, "--requirement", str(LOCK), *options],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 0, SKIPPED.format(f"did not answer within {seconds:g} seconds")
    if done.returncode and re.search("onnect|ServiceError", done.stderr):  # "ConnectionError", and the like
        return 0, SKIPPED.format("can't be reached")
    return done.returncode, (done.stdout + done.stderr).strip()


if __name__ == "__main__":
    sys.exit(main())
