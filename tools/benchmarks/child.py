"""Run a measurement in its own process, to get its peak memory.

``python -m tools.benchmarks.child MODULE ARGUMENTS OUTCOME`` migrates the database, calls ``MODULE.measure`` with these
arguments (JSON), and writes the result and the peak memory in MB to the file OUTCOME.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import django
from django.core.management import call_command

from tools.processes import end_with_parent


def main() -> None:
    """Run the measurement of the command line."""
    end_with_parent()
    module, arguments, outcome = sys.argv[1:]
    django.setup()
    call_command("migrate", verbosity=0)
    measured = importlib.import_module(module).measure(**json.loads(arguments))
    Path(outcome).write_text(json.dumps({**measured, "peak_mb": peak_megabytes()}))


def peak_megabytes() -> float:
    """Return the peak memory of this process in MB of a million bytes.

    On Linux, ``resource.getrusage`` would include the memory of the parent process.
    """
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak is not None
    return int(peak[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
