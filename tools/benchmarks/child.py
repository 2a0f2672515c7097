"""One measurement in a process of its own, so that its peak memory is its own.

``python -m tools.benchmarks.child MODULE ARGUMENTS OUTCOME`` calls ``MODULE.measure`` with these arguments (JSON),
on a migrated database, and writes what it returns, and the peak memory in MB, to the file OUTCOME.
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
    """Measure what the command line says."""
    end_with_parent()
    module, arguments, outcome = sys.argv[1:]
    django.setup()
    call_command("migrate", verbosity=0)
    measured = importlib.import_module(module).measure(**json.loads(arguments))
    Path(outcome).write_text(json.dumps({**measured, "peak_mb": peak_megabytes()}))


def peak_megabytes() -> float:
    """Return the most memory that this process had so far, in MB of a million bytes.

    ``resource.getrusage`` won't do: on Linux its figure starts with the memory of the program that started this one.
    """
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak is not None
    return int(peak[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
