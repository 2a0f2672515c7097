"""``make bench``: run benchmarks, print a table of each, and fail if a target was missed.

``python -m tools.benchmarks [NAME ...]`` only runs these.
"""

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.benchmarks.figures import show
from tools.benchmarks.running import measure
from tools.processes import StartError

BENCHMARKS = {
    "passes": "passes",
    "growth": "passes",
    "prometheus": "passes",
    "warned": "warned",
    "deleting": "deleting",
    "archiving": "archiving",
    "queue_list": "queue_list",
    "registrations": "registrations",
    "cascade": "agents",
    "orphan_sweep": "agents",
    "publishing": "agents",
    "message_store_cassandra": "message_store_cassandra",
    "consuming": "consuming",
}
"""The module of each benchmark. The function has the benchmark's name."""

WITHOUT_DATABASE = ("message_store_cassandra", "consuming")


def main() -> int:
    """Run the benchmarks. Return 1 if a target was missed, 2 if a benchmark failed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description="Run benchmarks, by default all.")
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"one of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--small", action="store_true", help="small sizes, only to try the benchmarks")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark: {', '.join(unknown)}; choose from: {', '.join(BENCHMARKS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the clean-up
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_machine(), style="dim")
    missed, broken = [], []
    for name, module in BENCHMARKS.items():
        if arguments.only and name not in arguments.only:
            continue
        for database in ("SQLite",) if name in WITHOUT_DATABASE else ("SQLite", "PostgreSQL"):
            console.print(f"{name}, {database}", style="dim")
            try:
                measured = measure(module, name, database, small=arguments.small)
            except KeyboardInterrupt:
                return 130
            except (StartError, EOFError) as error:  # the other benchmarks run nevertheless
                broken.append(f"{name}, {database}")
                console.print(f"not measured: {broken[-1]} {error}", style="red", markup=False, soft_wrap=True)
            else:
                figures = [replace(figure, where=f"{figure.where}, {database}") for figure in measured]
                show(console, name, figures)
                if not arguments.small:  # its ratios mean nothing
                    missed += [f"{name}, {one.where}: {one.what} {one.target}" for one in figures if one.missed]
    for line in missed:
        console.print(f"missed: {line}", style="red", markup=False, soft_wrap=True)
    for line in broken:
        console.print(f"not measured: {line}", style="red")
    return 2 if broken else 1 if missed else 0


def _machine() -> str:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = model[0].partition(": ")[2] if model else os.uname().machine
    return f"{os.cpu_count()} cores, {processor}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
